"""Every metric that a run logs is in the table, and docs/reference/metrics.md is the page that the table makes."""

import ast
import json
import re
from pathlib import Path

import pytest

from scripts.metrics_page import page
from tests.conftest import ROOT
from tests.e2e import jobs
from verl.config import load_config
from verl.observe.metric_names import find_metric, metric_sections, spellings
from verl.trainer.sft_trainer import run_sft
from verl.weight_sync.base import Receipt
from verl.weight_sync.logprob_probe import ProbeResult
from verl.workers.rollout.engine_stats import metrics_between
from verl.workers.rollout.vllm.engine import SchedulerStatistics

ARR = "actor_rollout_ref"
EVERYTHING = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    f"{ARR}.actor.use_kl_loss=True",
    f"{ARR}.actor.entropy_coeff=0.01",
    f"{ARR}.rollout.multi_turn.enable=True",
    f"{ARR}.rollout.val_kwargs.n=4",
    f"{ARR}.rollout.val_kwargs.do_sample=True",
    f"{ARR}.rollout.val_kwargs.temperature=1.0",
    "critic.fsdp.dtype=float32",
    "trainer.total_training_steps=2",
    "trainer.test_freq=1",
    "trainer.save_freq=2",
]
FAMILIES = {
    name.partition("/")[0] for section in metric_sections() for m in section.metrics for name in spellings(m.name)
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    reward = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    reward += "    return {'score': len(solution_str) / 8, 'acc': 0.0, 'digits': 1.0, 'pred': solution_str[:1]}\n"
    (tmp_path / "reward.py").write_text(reward)
    return tmp_path


def unnamed(names: set[str]) -> list[str]:
    return sorted(name for name in names if find_metric(name) is None)


def test_every_metric_of_training_with_everything_switched_on_has_a_meaning(folder: Path):
    jobs.train(folder, "run", *EVERYTHING, f"trainer.rollout_data_dir={folder / 'dump'}")
    names = {name for data in jobs.metrics(folder, "run").values() for name in data}
    assert {"timing_s/agent_loop/tool_calls/mean", "actor/kl_loss", "critic/vf_loss", "tool_call_counts/max"} <= names
    assert {"val-aux/quickstart/addition/acc/std@4", "val-core/quickstart/addition/acc/maj@4/mean"} <= names
    assert unnamed(names) == []


def test_every_metric_of_fine_tuning_has_a_meaning(folder: Path):
    worked = folder / "data" / "worked.jsonl"
    keys = [f"model.path={folder / 'model'}", f"data.train_files={worked}", f"data.val_files={worked}"]
    keys += ["data.train_batch_size=4", "data.max_length=64", "trainer.total_training_steps=2", "trainer.test_freq=1"]
    keys += ["trainer.logger=[file]", "trainer.project_name=e2e", "trainer.experiment_name=sft"]
    run_sft(load_config([*keys, f"trainer.default_local_dir={folder / 'sft'}"], config_name="sft_trainer"))
    lines = (folder / "metrics" / "e2e" / "sft.jsonl").read_text().splitlines()
    names = {name for line in lines for name in json.loads(line)["data"]}
    assert "val/loss" in names and unnamed(names) == []


def test_metrics_of_engines_that_this_machine_lacks_have_a_meaning():
    receipt = Receipt(1, 1, 0.1, 8, num_tensors=2, probes=(ProbeResult(0.0, 1.0),))
    names = set(receipt.metrics()) | {
        f"rollout/{name}" for name in metrics_between([], [SchedulerStatistics(engine_steps=1).totals()])
    }
    assert len(names) > 10 and unnamed(names) == []


def test_every_metric_that_the_code_spells_out_has_a_meaning():
    pattern = re.compile(rf"({'|'.join(sorted(map(re.escape, FAMILIES)))})/[a-z0-9_()A-Z/]*[a-z)]")
    found = {
        node.value
        for path in (ROOT / "verl").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.fullmatch(node.value)
    }
    assert len(found) > 60
    found -= {"actor/huggingface"}  # a folder
    assert [name for name in unnamed(found) if find_metric(f"{name}/mean") is None] == []


def test_a_name_has_one_meaning_and_an_unknown_one_none():
    names = [name for section in metric_sections() for metric in section.metrics for name in spellings(metric.name)]
    assert sorted(set(names)) == sorted(names)
    assert find_metric("actor/no_such_thing") is None and find_metric("timing_s") is None
    assert find_metric("val-core/a/b/acc/mean@8") is not None


def test_the_page_is_the_one_that_the_table_makes():
    assert (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8") == page(), "run: make docs"
