"""Complete answers that no step has taken, as JSON values of a checkpoint; their scores are not in it."""

import json
from collections.abc import Sequence
from typing import Any

import torch

from verl.data.trajectory import Trajectory

_TENSORS = {"tokens": torch.int64, "loss_mask": torch.bool, "rollout_logprobs": torch.float32}
_PLAIN = (
    "reward", "reward_baseline", "policy_version", "segments", "stop_reason", "num_turns", "tool_rewards",
    "loop_timings", "loop_fields",
)  # fmt: skip


def trajectories_as_json(answers: Sequence[Trajectory] | None) -> list[dict[str, Any]] | None:
    """Every field of unscored answers; what JSON cannot hold of an agent loop's own fields becomes text."""
    if answers is None:
        return None
    return [
        json.loads(json.dumps({name: getattr(answer, name) for name in _PLAIN}, default=str))
        | {name: getattr(answer, name).tolist() for name in _TENSORS}
        for answer in answers
    ]


def trajectories_from_json(saved: Sequence[dict[str, Any]] | None, group_id: int, row: int) -> list[Trajectory] | None:
    """The answers of `trajectories_as_json` to the prompt in `row`."""
    if saved is None:
        return None
    out = []
    for values in saved:
        fields = {name: values[name] for name in _PLAIN}
        fields["policy_version"] = tuple(values["policy_version"])
        fields["segments"] = tuple((version, count) for version, count in values["segments"])
        fields |= {name: torch.tensor(values[name], dtype=dtype) for name, dtype in _TENSORS.items()}
        out.append(Trajectory(group_id=group_id, row=row, **fields))
    return out
