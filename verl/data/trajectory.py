"""What one rollout produced: the unit every stage passes on."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Trajectory:
    """One sampled sequence: prompt, generated and tool tokens, in order. L is its length.

    `loss_mask` is True exactly on tokens the policy sampled, so several turns are no special case.
    """

    tokens: Tensor  # (L,) int64
    loss_mask: Tensor  # (L,) bool; loss_mask[0] is False
    rollout_logprobs: Tensor  # (L,) float32 nats at the sampling temperature; 0 where loss_mask is False
    group_id: int  # trajectories of one prompt share it
    row: int = -1  # index of the prompt row in the data set
    reward: float | None = None
    policy_version: tuple[int, int] = (0, 0)  # oldest and newest weights that sampled a token of it
    stop_reason: str = "stop"  # "stop", "length" or "aborted"
    extra: dict[str, Any] = field(default_factory=dict)  # data_source, reward parts, turn counts: for logs only

    def __post_init__(self) -> None:
        length = self.tokens.shape[0]
        for name in ("loss_mask", "rollout_logprobs"):
            if getattr(self, name).shape != (length,):
                raise ValueError(f"{name} has shape {tuple(getattr(self, name).shape)}, tokens have ({length},)")
        if length == 0 or bool(self.loss_mask[0]):
            raise ValueError("a trajectory starts with a prompt token: loss_mask[0] must be False")

    @classmethod
    def from_completion(
        cls, prompt_ids: list[int], response_ids: list[int], response_logprobs: list[float], **fields: Any
    ) -> "Trajectory":
        """A single-turn trajectory: every response token was sampled."""
        num_prompt, num_response = len(prompt_ids), len(response_ids)
        if len(response_logprobs) != num_response:
            raise ValueError(f"{len(response_logprobs)} log-probs for {num_response} response tokens")
        # numpy: hundreds of short answers a step, and each operation of torch would let other threads go first
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

    def with_reward(self, reward: float | None, /, **extra: Any) -> "Trajectory":
        """The same trajectory, scored; None where the scorer failed or abstained."""
        scored = object.__new__(Trajectory)  # its tensors were checked already, and a step scores hundreds
        scored.__dict__.update(self.__dict__, reward=reward, extra={**self.extra, **extra})
        return scored
