"""A main job on two ranks is the job on one: the same answers are sampled, and the same weights come out."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e import jobs
from verl.observe.ledger import read_ledger

ARR = jobs.ARR
STEPS = 3
COMMON = [
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    f"{ARR}.actor.fsdp_config.dtype=float32",
    f"{ARR}.actor.use_dynamic_bsz=True",
    f"{ARR}.actor.ppo_max_token_len_per_gpu=64",
    f"{ARR}.actor.ppo_mini_batch_size=2",  # two optimiser steps, old log-probs from a pass of their own
]
PPO = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "critic.fsdp.dtype=float32",
    "critic.optim.lr=1e-2",
    "critic.ppo_mini_batch_size=4",
    "critic.model.enable_gradient_checkpointing=False",
    f"{ARR}.ref.fsdp_config.dtype=float32",
    f"{ARR}.rollout.free_cache_engine=False",
    "trainer.balance_batch=False",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    return tmp_path


def trained(folder: Path, run: str, role: str = "actor") -> dict[str, torch.Tensor]:
    (files,) = [sorted((folder / run / f"global_step_{STEPS}" / role / "huggingface").glob("*.safetensors"))]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("extra", "roles"), [([], ["actor"]), (PPO, ["actor", "critic"])], ids=["grpo", "ppo"])
def test_two_ranks_sample_and_learn_what_one_does(folder: Path, extra: list[str], roles: list[str]):
    jobs.train(folder, "one", *COMMON, *extra)
    jobs.train(folder, "two", *COMMON, *extra, "trainer.n_gpus_per_node=2")
    for step in range(1, STEPS + 1):
        one, two = (read_ledger(folder / run / "ledger", step).batch for run in ("one", "two"))
        assert torch.equal(one["tokens"], two["tokens"]) and torch.equal(one["rewards"], two["rewards"])
        torch.testing.assert_close(one["rollout_logprobs"], two["rollout_logprobs"], rtol=0, atol=1e-4)
    for role in roles:
        one, two = trained(folder, "one", role), trained(folder, "two", role)
        start = load_file(next((folder / "model").glob("*.safetensors")))
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, two[name], rtol=1e-4, atol=1e-5)
        moved = [name for name in start if name in one and not torch.equal(start[name], one[name])]
        assert len(moved) > 5
    ours, theirs = (jobs.without_timings(jobs.metrics(folder, run)) for run in ("one", "two"))
    assert ours.keys() == theirs.keys()
    for step, values in ours.items():
        assert values.keys() == theirs[step].keys()
        assert theirs[step].get("rollout/generated_tokens") == values.get("rollout/generated_tokens")
        for name, value in values.items():
            if name.startswith("rollout/"):  # forwards and occupancy are about how many ranks answered
                continue
            assert theirs[step][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
