"""GRPO and PPO with adapters, from rows on disk to a folder that peft reads."""

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e import jobs
from verl.config import FSDPEngineConfig, HFModelConfig
from verl.observe.ledger import read_ledger
from verl.workers.engine.fsdp_engine import FSDPEngineWithLMHead

LORA = [
    "actor_rollout_ref.model.lora_rank=8",
    "actor_rollout_ref.model.lora_alpha=16",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "trainer.save_freq=2",
]
CRITIC = [
    "algorithm.adv_estimator=gae",
    "critic.model.lora_rank=4",
    "critic.fsdp.dtype=float32",
    "critic.optim.lr=1e-2",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    return tmp_path


@pytest.mark.parametrize("extra", [[], CRITIC], ids=["grpo", "ppo"])
def test_adapters_learn_against_the_base_model_and_resume(folder: Path, extra: list[str]):
    jobs.train(folder, "whole", *LORA, *extra)
    rows = jobs.metrics(folder, "whole")
    assert rows[1]["actor/grad_norm"] > 0 and rows[1]["actor/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert rows[6]["actor/kl_loss"] > 1e-4

    base = FSDPEngineWithLMHead(
        HFModelConfig(path=str(folder / "model")), FSDPEngineConfig(dtype="float32", forward_only=True)
    )
    base.initialize()
    batch = read_ledger(folder / "whole" / "ledger", 6).batch
    logprobs = base.forward(batch)["logprobs"]
    torch.testing.assert_close(batch["ref_logprobs"], logprobs, rtol=1e-5, atol=1e-5)
    assert (batch["old_logprobs"] - logprobs).abs().max() > 1e-2

    saved = folder / "whole" / "global_step_6" / "actor"
    merged = AutoModelForCausalLM.from_pretrained(saved / "huggingface")
    apart = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder / "model"), saved / "lora_adapter"
    )
    ids = torch.tensor([[3, 4, 5, 6]])
    torch.testing.assert_close(apart.eval()(input_ids=ids).logits, merged.eval()(input_ids=ids).logits)

    jobs.train(folder, "parts", *LORA, *extra, "trainer.total_training_steps=2")
    jobs.train(folder, "parts", *LORA, *extra)
    resumed = jobs.metrics(folder, "parts")
    for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm", "critic/score/mean"):
        assert [resumed[step][name] for step in range(1, 7)] == [rows[step][name] for step in range(1, 7)]


def test_sampling_and_training_agree_on_the_policy(folder: Path):
    jobs.train(folder, "run", *LORA)
    for step, row in jobs.metrics(folder, "run").items():
        if step:
            assert row["training/rollout_probs_diff_max"] < 1e-4
