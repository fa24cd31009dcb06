"""Profiles of chosen steps of a main job: one trace a rank, with every stage of the step."""

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from tests.e2e import jobs
from verl.commands import report
from verl.config import load_config
from verl.trainer.sft_trainer import run_sft

ARR = jobs.ARR
TORCH = [
    "global_profiler.tool=torch",
    f"{ARR}.actor.profiler.enable=True",
    f"{ARR}.actor.profiler.all_ranks=True",
    f"{ARR}.actor.profiler.tool_config.torch.contents=[cpu]",
    f"{ARR}.actor.use_kl_loss=True",
    f"{ARR}.ref.fsdp_config.dtype=float32",
    f"{ARR}.actor.ppo_mini_batch_size=2",
    "trainer.total_training_steps=3",
    "trainer.val_before_train=False",
    "trainer.save_freq=-1",
    "trainer.device=cpu",
]
STAGES = ("collect", "old_log_prob", "ref", "adv", "update_actor", "update_weights")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    return tmp_path


def events(trace: Path, category: str) -> list[dict[str, Any]]:
    found = [e for e in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if e.get("cat") == category]
    assert all(e["ph"] == "X" for e in found)
    return sorted(found, key=lambda e: (e["ts"], -e["dur"]))


def assert_nested(slices: list[dict[str, Any]]) -> None:
    """Of two slices of one thread, one is inside the other or after it."""
    for thread in {e["tid"] for e in slices}:
        ends: list[float] = []
        for e in (e for e in slices if e["tid"] == thread):
            while ends and ends[-1] <= e["ts"] + 1e-3:
                ends.pop()
            assert not ends or e["ts"] + e["dur"] <= ends[-1] + 1.0, e["name"]  # torch rounds to microseconds
            ends.append(e["ts"] + e["dur"])


def check_trace(trace: Path, measured: dict[str, Any], steps: int = 1) -> None:
    """Valid, nested, and with every stage that `measured` has, for about as long."""
    lane, on_rank = events(trace, "stage"), events(trace, "user_annotation")
    assert_nested(lane)
    assert_nested(on_rank)
    assert events(trace, "cpu_op")
    timed = {name.removeprefix("timing_s/") for name in measured if name.startswith("timing_s/")}
    assert timed - {"start_profile", "stop_profile"} <= {e["name"] for e in lane}
    assert [e["name"] for e in on_rank if e["name"] in STAGES] == [*STAGES] * steps
    [first, *_] = [e for e in lane if e["name"] == "update_actor"]
    [twin, *_] = [e for e in on_rank if e["name"] == "update_actor"]
    assert abs(first["ts"] - twin["ts"]) < 1e5 and first["pid"] != twin["pid"]  # one clock: within 0.1 s
    if steps == 1:
        assert first["dur"] == pytest.approx(1e6 * measured["timing_s/update_actor"], rel=0.2, abs=2e4)


def test_chosen_steps_leave_a_trace_with_every_stage_and_the_others_none(folder, capsys):
    hook = f"{sys.executable} -c \"import os; print(os.environ['VERL_PROFILE_ROLE'], file=open('{folder}/hook', 'a'))\""
    where = [f"global_profiler.save_path={folder}/p", f"global_profiler.finish_hook_cmd={json.dumps(hook)}"]
    jobs.train(folder, "run", *TORCH, *where, "global_profiler.steps=[2]")
    assert [path.name for path in (folder / "p").iterdir()] == ["step_2"]
    [trace] = (folder / "p" / "step_2").iterdir()
    rows = jobs.metrics(folder, "run")
    check_trace(trace, rows[2])
    assert "timing_s/start_profile" in rows[2] and "timing_s/start_profile" not in rows[3]
    assert (folder / "hook").read_text() == "actor\n"
    said = capsys.readouterr().out
    assert str(trace) in said and "nothing reads it" not in said


def test_two_ranks_write_a_trace_each_of_consecutive_steps_together(folder):
    where = [f"global_profiler.save_path={folder}/p", "global_profiler.profile_continuous_steps=True"]
    ranks = ["trainer.n_gpus_per_node=2", "global_profiler.steps=[2,3]"]
    jobs.train(folder, "run", *TORCH, *where, *ranks)
    traces = sorted((folder / "p" / "steps_2_3").iterdir())
    assert [path.name for path in traces] == ["actor_rank0.json.gz", "actor_rank1.json.gz"]
    for trace in traces:
        check_trace(trace, jobs.metrics(folder, "run")[2], steps=2)
    assert report.main([str(folder / "run")]) == 0
    page = (folder / "run" / "report.html").read_text()
    links = re.findall(r'<a href="([^"]*)">actor_rank[01].json.gz</a>', page)
    assert [(folder / "run" / unquote(link)).resolve() for link in links] == traces
    assert "replica 1, step 3: " in page and "VerlMismatch" in page


def test_discrete_writes_a_trace_a_stage_and_a_schedule_one_a_cycle(folder):
    discrete = f"{ARR}.actor.profiler.tool_config.torch.discrete=True"
    common = ["trainer.total_training_steps=1", "global_profiler.steps=[1]", f"{ARR}.actor.profiler.ranks=[0]"]
    jobs.train(folder, "run", *TORCH, *common, f"global_profiler.save_path={folder}/p", discrete)
    names = {path.name for path in (folder / "p" / "step_1").iterdir()}
    assert {f"actor_rank0_{stage}.json.gz" for stage in STAGES} <= names
    update = folder / "p" / "step_1" / "actor_rank0_update_actor.json.gz"
    assert [e["name"] for e in events(update, "user_annotation") if e["name"] in STAGES] == ["update_actor"]

    schedule = f"{ARR}.actor.profiler.tool_config.torch.schedule"
    mini = [f"{ARR}.actor.ppo_mini_batch_size=1", f"{schedule}.wait=1", f"{schedule}.active=1"]
    jobs.train(folder, "scheduled", *TORCH, *common, f"global_profiler.save_path={folder}/s", *mini)
    names = sorted(path.name for path in (folder / "s" / "step_1").iterdir())
    assert names == ["actor_rank0_cycle0.json.gz", "actor_rank0_cycle1.json.gz"]  # 4 mini-batches


def test_fine_tuning_records_its_interval(folder):
    words = [f"model.path={folder / 'model'}", f"data.train_files={folder / 'data' / 'worked.jsonl'}"]
    words += ["data.train_batch_size=2", "data.max_length=64", "trainer.total_training_steps=3", "engine.dtype=float32"]
    words += ["trainer.logger=[file]", "trainer.save_freq=-1", f"trainer.default_local_dir={folder / 'sft'}"]
    words += ["trainer.profile_interval=[2,3]", "profiler.enable=True", "profiler.ranks=[0]"]
    run_sft(load_config([*words, f"profiler.save_path={folder}/p"], config_name="sft_trainer"))
    [trace] = (folder / "p").rglob("*.json.gz")
    assert (trace.parent.name, trace.name) == ("steps_2_3", "sft_rank0.json.gz")
    stages = [e["name"] for e in events(trace, "user_annotation") if e["name"] in ("step", "update")]
    assert stages == ["step", "update"] * 2
