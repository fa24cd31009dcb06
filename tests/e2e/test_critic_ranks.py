"""A critic on ranks of its own learns what it learns on the actor's, and a run changes between the two placements."""

from pathlib import Path

import pytest
import torch

from tests.e2e import jobs
from tests.e2e.test_ranks import assert_same_answers, trained
from tests.tiers import soak
from verl.utils.errors import ConfigError

ARR = jobs.ARR
SECTIONS = (f"{ARR}.actor.fsdp_config", f"{ARR}.ref.fsdp_config", "critic.fsdp")
JOB = [
    *(f"{section}.{key}=float64" for section in SECTIONS for key in ("dtype", "model_dtype")),
    f"{ARR}.rollout.dtype=auto",
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    f"{ARR}.actor.ppo_mini_batch_size=2",
    "critic.optim.lr=1e-2",
    "critic.ppo_max_token_len_per_gpu=64",
    *(f"{part}.optim.total_training_steps=3" for part in (f"{ARR}.actor", "critic")),
    "trainer.device=cpu",
    "trainer.val_before_train=False",
]
CRITIC_RANKS = {1: 2, 2: None, 3: 1}  # by step


@pytest.mark.parametrize("scale", [*soak([False]), True], ids=["values", "normalised values"])
def test_a_critic_on_its_own_ranks_learns_the_same_and_may_move_between_steps(tmp_path: Path, monkeypatch, scale):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    job = [*JOB, f"critic.normalize_values={scale}"]
    jobs.train(tmp_path, "one", *job, "trainer.total_training_steps=3")
    for step, ranks in CRITIC_RANKS.items():
        own = [] if ranks is None else [f"critic.n_gpus_per_node={ranks}"]
        jobs.train(tmp_path, "two", *job, f"trainer.total_training_steps={step}", *own)
    assert_same_answers(tmp_path, 3)
    for role in ("actor", "critic"):
        one, two = trained(tmp_path, "one", role), trained(tmp_path, "two", role)
        assert one.keys() == two.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(two[name], tensor, rtol=1e-10, atol=1e-10, msg=name)
    assert ("critic/return_scale/mean" in jobs.metrics(tmp_path, "one")[1]) == scale
    ours, theirs = jobs.metrics(tmp_path, "one"), jobs.metrics(tmp_path, "two")
    for step, values in jobs.without_timings(ours).items():
        for name, value in values.items():
            assert theirs[step][name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    for step, ranks in CRITIC_RANKS.items():
        seconds = theirs[step]["perf/time_per_step"] * (1 + (ranks or 0))
        assert theirs[step]["perf/throughput"] * seconds == pytest.approx(theirs[step]["perf/total_num_tokens"])
    if scale:
        with pytest.raises(ConfigError, match=r"predicts normalised returns.*set critic\.normalize_values=True"):
            jobs.train(tmp_path, "one", *JOB, "trainer.total_training_steps=4", "trainer.on_existing=resume")
