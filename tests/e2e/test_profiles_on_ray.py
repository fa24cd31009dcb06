"""Profiles of ranks that are actors of a real Ray: one trace a rank, and the command at the end on each of them."""

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e import jobs
from tests.e2e.test_profiles import TORCH, check_trace
from tests.small_ray import small_ray
from verl.observe.step_records import PROFILES_FILE, read_records

pytestmark = pytest.mark.ray


def test_ranks_of_ray_write_a_trace_each_and_run_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the ranks
    jobs.prepare(tmp_path)
    program = f"import os; open('{tmp_path}/hook_' + os.environ['VERL_PROFILE_RANK'], 'w').write(str(os.getppid()))"
    hook = [f"global_profiler.finish_hook_cmd={json.dumps(f'{sys.executable} -c {json.dumps(program)}')}"]
    where = [f"global_profiler.save_path={tmp_path}/p", "global_profiler.finish_hook_all_ranks=True", *hook]
    ranks = ["trainer.runtime=ray", "trainer.n_gpus_per_node=2", "global_profiler.steps=[2]"]
    with small_ray():
        jobs.train(tmp_path, "run", *TORCH, *where, *ranks)
    traces = sorted((tmp_path / "p" / "step_2").iterdir())
    assert [path.name for path in traces] == ["actor_rank0.json.gz", "actor_rank1.json.gz"]
    for trace in traces:
        check_trace(trace, jobs.metrics(tmp_path, "run")[2])
    assert read_records(tmp_path / "run" / PROFILES_FILE) == [{"name": "step_2", "files": list(map(str, traces))}]
    processes = {(tmp_path / f"hook_{rank}").read_text() for rank in (0, 1)}
    assert len(processes) == 2, "each rank's own process ran the command"
    assert "nothing was written" not in capfd.readouterr().out
