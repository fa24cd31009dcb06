"""One answer in the shape that published reward managers read: a batch of one sequence. It can only be read."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from verl.rewards.base import RewardInput
from verl.utils.errors import VerlError
from verl.utils.suggest import did_you_mean


class NotInAnswerError(VerlError, KeyError, AttributeError):
    """A column or attribute that one answer does not have; it names those that it has."""

    def __str__(self) -> str:
        return str(self.args[0])


class Columns(Mapping[str, Any]):
    """Columns by name, to be read only."""

    def __init__(self, where: str, values: Mapping[str, Any]):
        self._where, self._values = where, dict(values)

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            advice = f"; {did_you_mean(name, self._values)}" if self._values else ", which is empty"
            raise NotInAnswerError(f"there is no {name!r} in {self._where}{advice}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _Answer:
    """The common part of an item and a batch of one item."""

    _has = "batch, non_tensor_batch, meta_info"

    def __init__(self, batch: Mapping[str, Any], non_tensor_batch: Mapping[str, Any]):
        self.batch = Columns("data.batch of a reward manager", batch)
        self.non_tensor_batch = Columns("data.non_tensor_batch of a reward manager", non_tensor_batch)
        self.meta_info = Columns("data.meta_info of a reward manager", {})

    def __getattr__(self, name: str) -> Any:
        raise NotInAnswerError(
            f"data of a reward manager has no {name!r}: it is one answer, which can be read ({self._has}), not a "
            "DataProto (docs/rewards/own_reward_manager.md)"
        )


class AnswerItem(_Answer):
    """`data[0]`: columns without a leading dimension."""


class OneAnswer(_Answer):
    """`data`: len 1, columns with a leading dimension of 1. P tokens of the prompt, R that follow; no padding.

    prompts (1, P), responses (1, R), input_ids and attention_mask (1, P + R), response_mask (1, R; 1 where the policy
    sampled), rollout_log_probs (1, R; nats, 0 where it did not).
    """

    _has = f"len(data), data[0], {_Answer._has}"

    def __init__(self, item: RewardInput):
        tensors, others = _tensors(item), _others(item)
        arrays = {name: np.empty(1, dtype=object) for name in others}
        for name, array in arrays.items():
            array[0] = others[name]
        super().__init__({name: tensor[None] for name, tensor in tensors.items()}, arrays)
        self._item = AnswerItem(tensors, others)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> AnswerItem:
        if index not in (0, -1):
            raise IndexError(f"data[{index!r}]: data of a reward manager is one answer, data[0]")
        return self._item


def _tensors(item: RewardInput) -> dict[str, torch.Tensor]:
    if item.answer is None:
        raise NotInAnswerError(
            f"{item.where or 'this answer'} is known as text only, without the tokens that a reward manager of your "
            "own reads; answers that a run samples have them, gold answers and those of a checkpoint do not"
        )
    answer, start = item.answer, item.answer.prompt_length
    return {
        "prompts": answer.tokens[:start].clone(),
        "responses": answer.tokens[start:].clone(),
        "input_ids": answer.tokens.clone(),
        "attention_mask": torch.ones_like(answer.tokens),
        "response_mask": answer.loss_mask[start:].long(),
        "rollout_log_probs": answer.rollout_logprobs[start:].clone(),
    }


def _others(item: RewardInput) -> dict[str, Any]:
    columns = item.row.columns if item.row is not None else {}
    told = {} if item.answer is None else item.answer.loop_fields
    return {
        **columns,
        "data_source": item.data_source,
        "reward_model": {"ground_truth": item.ground_truth},
        "extra_info": item.extra_info,
        "raw_prompt": item.row.messages if item.row is not None else [],
        "reward_scores": item.extra_info.get("reward_scores", {}),
        "tool_extra_fields": {**told},
        "__num_turns__": item.num_turns,
    }
