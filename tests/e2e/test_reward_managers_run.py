"""Short real runs of the reward managers, one process each; only the reward differs."""

from pathlib import Path

import pytest

from tests.e2e import jobs
from tests.e2e.jobs import ARR
from verl.utils.errors import RewardError

SHORT = (
    "trainer.total_training_steps=1",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "data.train_batch_size=2",
    f"{ARR}.actor.ppo_mini_batch_size=2",
    "reward.num_workers=2",
)
MANAGER = """
from verl.experimental.reward_loop.reward_manager import RewardManagerBase


class Own(RewardManagerBase):
    async def run_single(self, data):
        item = data[0]
        text = self.tokenizer.decode(item.batch["responses"], skip_special_tokens=True)
        assert item.batch["rollout_log_probs"].shape == item.batch["responses"].shape
        row = {name: item.non_tensor_batch[name] for name in ("data_source", "extra_info")}
        truth = item.non_tensor_batch["reward_model"]["ground_truth"]
        return {"reward_score": self.compute_score(solution_str=text, ground_truth=truth, **row)}
"""
BATCH = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    assert len(solution_strs) == len(ground_truths) == len(extra_infos) == 4 and len(set(ground_truths)) == 1
    return [sum(c.isdigit() for c in text) / 8 for text in solution_strs]
"""
DIES = """
import os

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    try:
        os.close(os.open("{flag}", os.O_CREAT | os.O_EXCL))  # by one process alone
    except FileExistsError:
        pass
    else:
        os._exit(9)
    return sum(c.isdigit() for c in solution_str) / 8
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    return tmp_path


def train(folder: Path, run: str, *overrides: str) -> dict[str, float]:
    """The metrics of the step."""
    jobs.train(folder, run, *SHORT, *overrides)
    return jobs.metrics(folder, run)[1]


def test_every_manager_gives_the_rewards_of_a_plain_function(folder: Path):
    name = "reward.reward_manager.name"
    scores = {"naive": train(folder, "naive")["critic/score/mean"]}
    (folder / "manager.py").write_text(MANAGER)
    own = ("reward.reward_manager.source=importlib", f"reward.reward_manager.module.path={folder / 'manager.py'}")
    scores["own"] = train(folder, "own", *own, f"{name}=Own")["critic/score/mean"]
    limits = ("reward.max_concurrent=3", "reward.max_rpm=60000")
    scores["limit"] = train(folder, "limit", f"{name}=limit", *limits)["critic/score/mean"]
    (folder / "batch.py").write_text(BATCH)
    batch = f"reward.custom_reward_function.path={folder / 'batch.py'}"
    scores["batch"] = train(folder, "batch", f"{name}=batch", batch)["critic/score/mean"]
    scores["prime"] = train(folder, "prime", f"{name}=prime")["critic/score/mean"]
    assert len(set(scores.values())) == 1, scores


def test_a_process_that_dies_is_counted_and_the_step_goes_on(folder: Path):
    (folder / "dies.py").write_text(DIES.format(flag=folder / "flag"))
    path = f"reward.custom_reward_function.path={folder / 'dies.py'}"
    remote = ("reward.reward_manager.name=remote", path)
    row = train(folder, "remote", *remote, "reward.retries=1")
    assert (row["reward/errors"], row["reward/retries"], row["reward/processes_lost"]) == (0, 1, 1)
    (folder / "flag").unlink()
    row = train(folder, "counted", *remote, "reward.on_error=count", "reward.max_errors=1")
    assert (row["reward/errors"], row["reward/retries"], row["reward/processes_lost"]) == (1, 0, 1)
    (folder / "flag").unlink()
    with pytest.raises(RewardError, match=r"reward\.max_errors allows"):
        jobs.train(folder, "spent", *SHORT, *remote, "reward.on_error=count", "reward.max_errors=0")
