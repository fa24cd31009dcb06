"""Before data and ranks: everything that keeps a run from starting, in one message, and the same in the doctor."""

import json
import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType

import pytest

from tests.e2e import jobs
from verl.checks.findings import Findings
from verl.checks.loaded import TrainedModel
from verl.checks.machine import early_findings
from verl.commands import doctor
from verl.config import ConfigError, load_config
from verl.experimental.agent_loop import AgentLoopBase
from verl.plugin.findings import Status
from verl.plugin.platform import get_platform
from verl.runtime.processes import ProcessGroup
from verl.trainer.ppo.preparation import prepare_run
from verl.trainer.ppo.run_setup import build_run
from verl.trainer.sft.ranks import num_ranks_to_start
from verl.trainer.sft.trainer import build_sft

ARR = jobs.ARR
Disk = namedtuple("Disk", "total used free")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    jobs.prepare(tmp_path)
    return tmp_path


def config(job: Path, *extra: str):
    return load_config(jobs.overrides(job, "run", *extra))


def findings(job: Path, *extra: str) -> Findings:
    settings = config(job, *extra)
    found = early_findings(settings)
    prepare_run(settings, found)
    return found


def refusal(job: Path, *extra: str) -> str:
    with pytest.raises(Exception, match=r".") as raised:
        findings(job, *extra).refuse()
    return str(raised.value)


WRONG = {
    "trainer.n_gpus_per_node=8": "n_gpus_per_node=8 asks for 8 GPUs, but this machine has none; trainer.device=cpu",
    f"{ARR}.rollout.name=sglang": "rollout.name=sglang needs sglang, which is not installed here",
    "reward.custom_reward_function.path=null": "no reward is known for data_source 'quickstart/addition'",
    "algorithm.adv_estimator=grpoo": "unknown advantage estimator 'grpoo'; did you mean 'grpo'?",
    f"{ARR}.actor.policy_loss.loss_mode=vanila": "unknown policy loss 'vanila'; did you mean 'vanilla'?",
    f"{ARR}.actor.strategy=fsdp3": "fsdp3",
    "data.val_files=nowhere.jsonl": "nowhere.jsonl does not exist",
    "trainer.logger=[consol]": "unknown tracker 'consol'",
}


def test_all_refusals_of_a_command_come_in_one_message_and_before_the_ranks(job: Path, monkeypatch, capsys):
    monkeypatch.setattr(ProcessGroup, "__init__", lambda *_: pytest.fail("ranks were started"))
    with pytest.raises(ConfigError) as raised:
        build_run(config(job, *WRONG))
    assert str(raised.value).startswith(f"{len(WRONG)} things keep this run from starting:\n  1. ")
    assert [text for text in WRONG.values() if text not in str(raised.value)] == []
    assert doctor.main(["--json", *jobs.overrides(job, "run", *WRONG)]) == 1
    rows = json.loads(capsys.readouterr().out)["this configuration"]
    said = [row["detail"] for row in rows if row["status"] == "bad"]
    assert len(said) == len(WRONG) and all(text in str(raised.value) for text in said)


def test_a_single_refusal_is_the_error_itself_and_a_good_run_has_none(job: Path):
    assert refusal(job, "algorithm.adv_estimator=grpoo") == WRONG["algorithm.adv_estimator=grpoo"]
    found = findings(job)
    assert found.errors == [] and {row.status for row in found.rows} <= {Status.GOOD, Status.WARN}


def test_several_devices_where_there_are_none_are_cpu_ranks_only_when_the_cpu_is_named(job: Path, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    if get_platform().device_name != "cpu":
        pytest.skip("this machine has an accelerator")
    assert "trainer.n_gpus_per_node=1 starts one" in refusal(job, "trainer.n_gpus_per_node=4")
    apart = refusal(job, "algorithm.adv_estimator=gae", "critic.n_gpus_per_node=1")
    assert "trainer.n_gpus_per_node=1 and critic.n_gpus_per_node=1 asks for 2 GPUs, but this machine has none" in apart
    assert findings(job, "trainer.n_gpus_per_node=4", "trainer.device=cpu").errors == []
    assert findings(job, "trainer.n_gpus_per_node=1").errors == []
    assert "trainer.device=cuda, but this machine has cpu" in refusal(job, "trainer.device=cuda")
    sft = load_config([f"model.path={job / 'model'}", "trainer.n_gpus_per_node=4"], "sft_trainer")
    with pytest.raises(ConfigError, match="n_gpus_per_node=4 asks for 4 GPUs"):
        num_ranks_to_start(sft)


def test_sources_without_scorer_are_a_doubt_where_a_loop_of_the_user_may_score(job: Path):
    (job / "loops.yaml").write_text("- {name: mine, _target_: tests.unit.trainer.test_preflight.Loop}\n")
    found = findings(
        job, "reward.custom_reward_function.path=null", f"{ARR}.rollout.agent.agent_loop_config_path={job}/loops.yaml"
    )
    assert found.errors == [] and "quickstart/addition" in next(r.detail for r in found.rows if r.name == "scorers")


class Loop(AgentLoopBase):
    async def run(self, *args: object, **kwargs: object) -> None: ...  # type: ignore[override]


def test_a_disk_without_room_for_a_checkpoint_stops_the_run_and_one_with_little_is_a_doubt(job: Path, monkeypatch):
    arr = config(job).actor_rollout_ref
    size = TrainedModel(arr.model, arr.actor.fsdp_config, arr.actor.checkpoint).checkpoint_bytes()
    weights = sum(path.stat().st_size for path in (job / "model").glob("*.safetensors"))
    assert 3.5 * weights < size <= 4 * weights  # model, two moments and the model for transformers, all float32
    free = Disk(0, 0, size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    assert "a checkpoint needs about" in refusal(job, "trainer.save_freq=1")
    assert findings(job, "trainer.save_freq=-1").errors == []
    free = Disk(0, 0, 2 * size)
    keep = ["trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2"]
    found = findings(job, *keep)
    assert found.errors == [] and any("2 are kept" in row.detail for row in found.rows if row.status is Status.WARN)


def test_longer_sequences_than_the_model_was_made_for_are_said_before_the_run(job: Path, caplog):
    found = findings(job, "data.max_response_length=5000", f"{ARR}.actor.ppo_max_token_len_per_gpu=9000")
    found.refuse()
    assert "sequences may have 5008 tokens (data.max_prompt_length + data.max_response_length)" in caplog.text


def test_wandb_without_an_account_and_a_server_without_its_python_are_named(job: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", os.devnull)
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert "WANDB_MODE=offline" in refusal(job, "trainer.logger=[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert findings(job, "trainer.logger=[wandb]").errors == []
    message = refusal(job, f"{ARR}.rollout.name=vllm", f"{ARR}.rollout.server.python=/nowhere/python")
    assert "server.python=/nowhere/python is no program here" in message


def test_fine_tuning_says_everything_before_its_ranks(job: Path, monkeypatch):
    monkeypatch.setattr(ProcessGroup, "__init__", lambda *_, **__: pytest.fail("ranks were started"))
    words = [f"model.path={job}/nowhere", f"data.train_files={job}/none.jsonl", "trainer.device=cpu"]
    words += ["trainer.n_gpus_per_node=2", "trainer.logger=[consol]", "engine.strategy=fsdp3"]
    settings = load_config(words, "sft_trainer")
    with pytest.raises(ConfigError) as raised:
        build_sft(settings)
    message = str(raised.value)
    assert message.startswith("4 things keep this run from starting:")
    assert all(text in message for text in ("nowhere is not a folder", "none.jsonl does not exist", "consol", "fsdp3"))
