"""What one rollout produced: the unit every stage passes on."""

from dataclasses import dataclass, field, replace
from typing import Any

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
        mask = torch.zeros(num_prompt + num_response, dtype=torch.bool)
        mask[num_prompt:] = True
        logprobs = torch.zeros(num_prompt + num_response, dtype=torch.float32)
        logprobs[num_prompt:] = torch.tensor(response_logprobs, dtype=torch.float32)
        tokens = torch.tensor([*prompt_ids, *response_ids], dtype=torch.int64)
        return cls(tokens=tokens, loss_mask=mask, rollout_logprobs=logprobs, **fields)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first sampled one (all of them when nothing was sampled)."""
        sampled = torch.nonzero(self.loss_mask)
        return int(sampled[0]) if len(sampled) else self.tokens.shape[0]

    @property
    def response_ids(self) -> list[int]:
        """Token ids from the first sampled one to the end."""
        return self.tokens[self.prompt_length :].tolist()

    def with_reward(self, reward: float, **extra: Any) -> "Trajectory":
        """The same trajectory, judged."""
        return replace(self, reward=reward, extra={**self.extra, **extra})
