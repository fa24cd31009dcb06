"""`tool=nsys`: programs start under `nsys profile`, and mark the chosen steps; with a stand-in for nsys."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import standin_nsys
from tests.conftest import ROOT
from tests.e2e import jobs
from verl.config import load_config
from verl.trainer.main_ppo import run_ppo
from verl.utils.errors import ConfigError

PROFILER = f"{jobs.ARR}.actor.profiler"
NSYS = [
    "global_profiler.tool=nsys",
    "global_profiler.steps=[2]",
    f"{PROFILER}.enable=True",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=False",
    "trainer.save_freq=-1",
]


def run(folder: Path, *extra: str) -> list[list]:
    """The job as a command; what the stand-in and the programs under it noted."""
    jobs.prepare(folder)
    words = jobs.overrides(folder, "run", *NSYS, f"global_profiler.save_path={folder}/p", *extra)
    settings = {"VERL_USE_EXTERNAL_MODULES": "tests.marking_platform", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    settings |= {"VERL_FILE_LOGGER_ROOT": str(folder / "metrics"), **standin_nsys.install(folder / "bin")}
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return standin_nsys.notes(folder / "bin")


@pytest.mark.slow
def test_ranks_start_under_nsys_and_mark_the_stages_of_the_chosen_steps(tmp_path):
    option = "global_profiler.global_tool_config.nsys.worker_nsight_options.trace=nvtx"
    found = run(
        tmp_path, "trainer.n_gpus_per_node=2", f"{PROFILER}.ranks=[1]", f"{PROFILER}.relocate_results=True", option
    )
    (_, _, driver, flags, program), (_, _, rank, rank_flags, _) = [n for n in found if n[1] == "nsys"]
    assert flags[:3] == ["--trace=cuda,nvtx,cublas,ucx", "--cuda-memory-usage=true", "--cuda-graph-trace=graph"]
    assert program[:3] == [sys.executable, "-m", "verl.trainer.main_ppo"]
    assert rank_flags[:6] == [
        "--trace=nvtx", "--cuda-memory-usage=true", "--cuda-graph-trace=graph", "--capture-range=cudaProfilerApi",
        "--kill=none", "--capture-range-end=repeat-shutdown:6",
    ]  # fmt: skip
    marks = [words for process, *words in found if process == rank and words[0] != "nsys"]
    assert marks[:3] == [["start"], ["range", "step"], ["range", "collect"]] and marks[-1] == ["stop"]
    assert ["range", "update_actor"] in marks and not [n for n in found if n[0] == driver]
    reports = sorted(path.name for path in (tmp_path / "p" / "nsys").iterdir())
    assert reports == [f"controller_{driver}.1.nsys-rep", f"worker_process_{rank}.1.nsys-rep"]


@pytest.mark.ray
def test_actors_of_ray_start_under_nsys_and_mark_the_chosen_step(tmp_path):
    found = run(tmp_path, "trainer.runtime=ray", "trainer.n_gpus_per_node=2", f"{PROFILER}.ranks=[1]")
    marked = {process for process, *words in found if words == ["range", "update_actor"]}
    actors = {words[1]: words[2] for _, *words in found if words[0] == "nsys" and "default_worker.py" in str(words[3])}
    assert len(marked) == 1 and marked < actors.keys() and len(actors) == 2
    assert all("--capture-range=cudaProfilerApi" in flags for flags in actors.values())
    assert any(f.startswith("-o ") and f.endswith("/logs/nsight/worker_process_%p") for f in actors[marked.pop()])


def test_a_driver_that_computes_is_started_again_as_a_rank_and_each_stage_can_be_a_range(tmp_path):
    discrete = "global_profiler.global_tool_config.nsys.discrete=True"
    found = run(tmp_path, f"{PROFILER}.all_ranks=True", discrete)
    [(_, _, process, flags, _)] = [n for n in found if n[1] == "nsys"]
    assert "--capture-range=cudaProfilerApi" in flags
    marks = [words for number, *words in found if number == process]
    starts = [marks[n + 1] for n, words in enumerate(marks) if words == ["start"]]
    assert ["range", "collect"] in starts and ["range", "update_actor"] in starts and ["range", "step"] not in starts
    assert len(starts) == marks.count(["stop"])


def test_nsys_that_is_not_there_is_said_before_the_run(tmp_path, monkeypatch):
    jobs.prepare(tmp_path)
    words = jobs.overrides(tmp_path, "run", *NSYS, f"{PROFILER}.all_ranks=True")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no nsys on PATH; .*tool=torch"):
        run_ppo(load_config(words))
    standin_nsys.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    with pytest.raises(ConfigError, match=r"nsys has not started it; .*trainer.runtime=processes"):
        run_ppo(load_config(words))
