"""Complete answers that no step has taken, as JSON values of a checkpoint; their scores are not in it."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl.data.trajectory import Trajectory
from verl.trainer.ppo.sources.prompt_engine import ANSWER, versions_of, versions_of_answer
from verl.workers.rollout.base import GenerationRequest

_TENSORS = {"tokens": torch.int64, "loss_mask": torch.bool, "rollout_logprobs": torch.float32}
_PLAIN = (
    "conversation", "reward", "reward_baseline", "policy_version", "segments", "stop_reason", "num_turns",
    "tool_rewards", "tool_errors", "loop_timings", "loop_fields",
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
        fields = {name: values[name] for name in _PLAIN if name in values}
        fields["policy_version"] = tuple(values["policy_version"])
        fields["segments"] = tuple((version, count) for version, count in values["segments"])
        fields |= {name: torch.tensor(values[name], dtype=dtype) for name, dtype in _TENSORS.items()}
        out.append(Trajectory(group_id=group_id, row=row, **fields))
    return out


def by_position(
    known: list[dict[str, Any]], answers: Sequence[Trajectory] | None, in_flight: Sequence[GenerationRequest]
) -> list[dict[str, Any]]:
    """Saved `PromptEngine.known`; earlier versions found log-probs again by the tokens and a digest of those before."""
    if not known or "before" not in known[0]:
        return known
    found = [(ANSWER, n, 0, a.tokens.tolist(), versions_of_answer(a).tolist()) for n, a in enumerate(answers or ())]
    for request in in_flight:
        prompt = request.prompt_ids
        for n, sample in enumerate(request.sampled):
            versions = [-1] * len(prompt) + versions_of(sample.all_segments).tolist()
            found.append((request.request_id, n, len(prompt), prompt + sample.token_ids, versions))
    out = []
    for request_id, n, first, tokens, versions in found:
        logprobs: list[float | None] = [None] * len(tokens)
        for run in known:
            before = np.array(tokens[: run["first"]], dtype="<i8").tobytes()
            is_here = hashlib.blake2b(before, digest_size=16).hexdigest() == run["before"]
            for place, (token, logprob) in enumerate(zip(run["tokens"], run["logprobs"], strict=True), run["first"]):
                is_here = is_here and place < len(tokens) and tokens[place] == token
                if is_here and versions[place] == run["version"]:
                    logprobs[place] = logprob
        out.append({"request": request_id, "sample": n, "versions": versions[first:], "logprobs": logprobs[first:]})
    return out
