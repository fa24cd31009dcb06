"""A reference on ranks of its own gives the KL term that it gives on the actor's, and a run may change between them."""

from pathlib import Path

import pytest
import torch

from tests.e2e import jobs
from tests.e2e.test_ranks import assert_same_answers, trained
from tests.tiers import soak

ARR = jobs.ARR
SECTIONS = (f"{ARR}.actor.fsdp_config", f"{ARR}.ref.fsdp_config")
JOB = [
    *(f"{section}.{key}=float64" for section in SECTIONS for key in ("dtype", "model_dtype")),
    f"{ARR}.rollout.dtype=auto",
    f"{ARR}.actor.use_kl_loss=True",
    f"{ARR}.actor.kl_loss_coef=0.5",
    f"{ARR}.actor.ppo_mini_batch_size=2",
    f"{ARR}.actor.optim.total_training_steps=3",
    f"{ARR}.actor.optim.lr=1e-2",
    "trainer.device=cpu",
    "trainer.val_before_train=False",
]
REFERENCE_RANKS = {1: 2, 2: None, 3: 1}  # by step
LORA = [f"{ARR}.model.lora_rank=4", f"{ARR}.model.lora_alpha=8", f"{ARR}.model.target_modules=all-linear"]


@pytest.mark.parametrize("adapters", [*soak([[]]), LORA], ids=["whole model", "adapters"])
def test_a_reference_on_its_own_ranks_gives_the_same_and_may_move_between_steps(tmp_path: Path, monkeypatch, adapters):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    job = [*JOB, *adapters]
    jobs.train(tmp_path, "one", *job, "trainer.total_training_steps=3")
    for step, ranks in REFERENCE_RANKS.items():
        own = [] if ranks is None else [f"{ARR}.ref.n_gpus_per_node={ranks}"]
        jobs.train(tmp_path, "two", *job, f"trainer.total_training_steps={step}", *own)
    assert_same_answers(tmp_path, 3)
    one, two = trained(tmp_path, "one", "actor"), trained(tmp_path, "two", "actor")
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-10, atol=1e-10, msg=name)
    ours, theirs = jobs.metrics(tmp_path, "one"), jobs.metrics(tmp_path, "two")
    assert ours[3]["actor/kl_loss"] > 0
    for step, ranks in REFERENCE_RANKS.items():
        assert theirs[step]["actor/kl_loss"] == pytest.approx(ours[step]["actor/kl_loss"], rel=1e-6, abs=1e-12)
        seconds = theirs[step]["perf/time_per_step"] * (1 + (ranks or 0))
        assert theirs[step]["perf/throughput"] * seconds == pytest.approx(theirs[step]["perf/total_num_tokens"])
