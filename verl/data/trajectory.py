"""One sampled sequence: what a rollout produces, a reward scores and `Batch.pack` packs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

FIRST_VALIDATION_GROUP = 1 << 40  # group ids of validations, above those of training: their random streams differ


@dataclass(frozen=True)
class Trajectory:
    """A prompt and what followed it, token by token: sampled tokens and tool results, in order. L is their number.

    `loss_mask` is True on the tokens that the policy sampled and False on all others, so a conversation of several
    turns needs no other fields than a single answer. `verl.data.columns.COLUMNS` says which column each field becomes.
    """

    tokens: Tensor  # (L,) int64
    loss_mask: Tensor  # (L,) bool; loss_mask[0] is False
    rollout_logprobs: Tensor  # (L,) float32 nats at the sampling temperature; 0 where loss_mask is False
    group_id: int  # the same for all trajectories of one prompt
    conversation: int = -1  # the same for all outputs of one conversation in its group; -1: a conversation of its own
    row: int = -1  # index of the prompt's row in the data set; -1: none
    reward: float | None = None  # None: not scored yet, or the scorer failed or abstained
    reward_baseline: float | None = None  # of a greedy answer to the same prompt; None: nothing asks for one
    policy_version: tuple[int, int] = (0, 0)  # oldest and newest weights that sampled a token of it
    older_logprobs: Tensor | None = None  # (L,) nats by the trainer at the versions that sampled; NaN: not scored
    segments: tuple[tuple[int, int], ...] = ()  # (version, tokens that it sampled), in order, if there were several
    stop_reason: str = "stop"  # "stop", "length" or "aborted"
    data_source: str = ""  # of the prompt's row
    response_text: str = ""  # what follows the prompt, decoded
    num_turns: int = 2  # messages, the prompt's included
    score_parts: dict[str, object] = field(default_factory=dict)  # what the reward function returned besides the score
    tool_rewards: Sequence[float] | None = None  # one per tool call; None: its agent loop counts none
    tool_errors: Sequence[Sequence[str]] = ()  # (tool, why) of each call whose tool failed
    loop_timings: dict[str, float] | None = None  # seconds per activity of its agent loop; None: it had none
    loop_fields: dict[str, object] = field(default_factory=dict)  # what an agent loop of others tells rewards and logs

    def __post_init__(self) -> None:
        length = self.tokens.shape[0]
        for name in ("loss_mask", "rollout_logprobs"):
            if getattr(self, name).shape != (length,):
                raise ValueError(f"{name} has shape {tuple(getattr(self, name).shape)}, tokens have ({length},)")
        if length == 0 or self.loss_mask.numpy()[0]:  # numpy: an operation of torch would let other threads go first
            raise ValueError("a trajectory starts with a prompt token: loss_mask[0] must be False")

    @classmethod
    def from_completion(
        cls, prompt_ids: list[int], response_ids: list[int], response_logprobs: list[float], **fields: Any
    ) -> "Trajectory":
        """A single-turn trajectory: every token after the prompt was sampled."""
        num_prompt, num_response = len(prompt_ids), len(response_ids)
        if len(response_logprobs) != num_response:
            raise ValueError(f"{len(response_logprobs)} log-probs for {num_response} response tokens")
        # numpy as above: a step has hundreds of short answers
        tokens = np.array([*prompt_ids, *response_ids], dtype=np.int64)
        mask = np.zeros(num_prompt + num_response, dtype=np.bool_)
        logprobs = np.zeros(num_prompt + num_response, dtype=np.float32)
        mask[num_prompt:], logprobs[num_prompt:] = True, response_logprobs
        return cls(torch.from_numpy(tokens), torch.from_numpy(mask), torch.from_numpy(logprobs), **fields)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one (all of them when nothing was sampled)."""
        mask = self.loss_mask.tolist()
        return mask.index(True) if True in mask else len(mask)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.loss_mask.tolist())

    @property
    def response_ids(self) -> list[int]:
        """Token ids from the first sampled one to the end."""
        return self.tokens.tolist()[self.prompt_length :]

    def told(self) -> dict[str, object]:
        """Facts about its conversation for reward functions and dumps, under public names."""
        counted: dict[str, object] = {"agent_loop": self.loop_timings, "tool_rewards": self.tool_rewards}
        counted["tool_errors"] = self.tool_errors or None
        present = {name: value for name, value in counted.items() if value is not None}
        return {"num_turns": self.num_turns, **present, **self.loop_fields}

    def with_reward(
        self, reward: float | None, score_parts: dict[str, object], data_source: str = "", response_text: str = ""
    ) -> "Trajectory":
        """The same trajectory with what its scoring found; a reward of None: the scorer failed or abstained."""
        found = {"score_parts": score_parts, "data_source": data_source, "response_text": response_text}
        scored = object.__new__(Trajectory)  # its tensors were checked already, and a step scores hundreds
        scored.__dict__.update(self.__dict__, reward=reward, **found)
        return scored


def conversations_of(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """The outputs of each conversation, in order of appearance."""
    found: dict[tuple[int, int], list[Trajectory]] = {}
    for index, one in enumerate(trajectories):
        number = one.conversation if one.conversation >= 0 else -1 - index
        found.setdefault((one.group_id, number), []).append(one)
    return list(found.values())
