"""A source that gives a run again what another run recorded: the arrivals of events.jsonl, the tokens of the ledger."""

from pathlib import Path
from typing import Any

from verl.data.batch import Batch
from verl.data.trajectory import Trajectory
from verl.observe.events import read_events
from verl.observe.ledger import read_ledger
from verl.rewards.base import Score
from verl.trainer.ppo.sources.trajectory_source import RolloutBatch, TrajectorySource


class RecordedArrivals(TrajectorySource):
    """What each `take` of the run in `folder` got, in the same order. Asks no engine."""

    epoch = 0

    def __init__(self, folder: Path):
        self.takes = [event["groups"] for event in read_events(folder / "events.jsonl") if event["event"] == "take"]
        self.ledger, self.taken = folder / "ledger", 0
        self.step, self.left = 0, list[Trajectory]()

    async def take(self, num_prompts: int) -> RolloutBatch:
        groups, self.taken = self.takes[self.taken], self.taken + 1
        assert len(groups) == num_prompts
        if not self.left:
            self.step += 1
            self.left = trajectories_of(read_ledger(self.ledger, self.step).batch)
        taken = [trajectory for trajectory in self.left if trajectory.group_id in groups]
        self.left = [trajectory for trajectory in self.left if trajectory.group_id not in groups]
        return RolloutBatch(taken, scores=[Score(trajectory.reward) for trajectory in taken])

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("a replay begins at the first step")

    def close(self) -> None:
        pass


def trajectories_of(batch: Batch) -> list[Trajectory]:
    """The trajectories that were packed into a batch."""
    out = []
    for number in range(batch.num_sequences):
        start, end = batch.cu_seqlens[number : number + 2].tolist()
        columns = {name: batch[name][start:end] for name in ("tokens", "loss_mask", "rollout_logprobs")}
        oldest, newest = batch["policy_versions"][number].tolist()
        group, row, reward = (batch[name][number].item() for name in ("group_ids", "rows", "rewards"))
        out.append(Trajectory(**columns, group_id=group, row=row, reward=reward, policy_version=(oldest, newest)))
    return out
