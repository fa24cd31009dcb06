"""The order of the training prompts: shuffled per epoch from a seed, and resumed exactly."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl.data.prompts import PromptDataset, PromptRow
from verl.utils.errors import ConfigError, DataError
from verl.utils.seeds import derive_seed

logger = logging.getLogger(__name__)


def warn_about_unused_rows(num_rows: int, batch_size: int, shuffle: bool) -> None:
    """Log a warning if rows are never used: without shuffling, every epoch drops the same incomplete batch."""
    remaining = num_rows % batch_size
    if remaining and not shuffle:
        text = "data.shuffle=False: the last %d of %d rows fill no batch of %d prompts and are never used"
        logger.warning(text, remaining, num_rows, batch_size)


class PromptSampler:
    """Returns batches of prompts, epoch after epoch, endlessly.

    The order of an epoch is a permutation that depends only on (seed, epoch), or file order without shuffling. A batch
    never spans two epochs: if too few rows remain, they are dropped and the next epoch begins, as in a data loader
    with `drop_last`. After `state_dict` and, in a new process, `load_state_dict`, the next batches are those of an
    uninterrupted run, also at the end of an epoch.
    """

    def __init__(self, dataset: PromptDataset, shuffle: bool = True, seed: int | None = None):
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = 1 if seed is None else seed
        self._epoch = 0
        self._offset = 0
        self._dropped = 0
        self._order = self._epoch_order()

    @property
    def epoch(self) -> int:
        """The epoch of the last batch taken, from 0."""
        return self._epoch

    def __len__(self) -> int:
        """Rows of one epoch."""
        return len(self._dataset)

    @property
    def position(self) -> tuple[int, int, int]:
        """Where the next prompt is, for `go_to`: epoch, offset in its order, rows dropped so far."""
        return self._epoch, self._offset, self._dropped

    def go_to(self, position: tuple[int, int, int]) -> None:
        """Go on from an earlier `position`, as if what was taken since had not been."""
        is_other_epoch = position[0] != self._epoch
        self._epoch, self._offset, self._dropped = position
        if is_other_epoch:
            self._order = self._epoch_order()

    @property
    def dropped(self) -> int:
        """Rows dropped so far because an epoch's last batch was incomplete."""
        return self._dropped

    def steps_per_epoch(self, batch_size: int) -> int:
        """Number of complete batches in one epoch; ConfigError if there is none."""
        self._check_batch_size(batch_size)
        return len(self._dataset) // batch_size

    def take(self, count: int) -> list[PromptRow]:
        """The next `count` prompts."""
        self._check_batch_size(count)
        remaining = len(self._dataset) - self._offset
        if remaining < count:
            self._dropped += remaining
            self._epoch += 1
            self._offset = 0
            self._order = self._epoch_order()
        positions = self._order[self._offset : self._offset + count]
        self._offset += count
        return self._dataset.rows(positions.tolist())

    def rows_of(self, indices: Sequence[int]) -> list[PromptRow]:
        """The prompts with these `PromptRow.index`, which a checkpoint names."""
        return self._dataset.rows(self._dataset.positions_of(indices)) if indices else []

    def _check_batch_size(self, count: int) -> None:
        if count < 1:
            raise ConfigError(f"a batch of {count} prompts was requested; data.train_batch_size must be at least 1")
        if count > len(self._dataset):
            raise ConfigError(
                f"data.train_batch_size={count} is more than the {len(self._dataset)} prompts there are "
                f"({self._dataset.summary.line()}); lower it to at most {len(self._dataset)} or add rows"
            )

    def _epoch_order(self) -> np.ndarray:
        """(rows,) positions. Sorts raw generator output: numpy keeps that stream fixed, unlike `permutation`'s."""
        if not self._shuffle:
            return np.arange(len(self._dataset))
        keys = np.random.PCG64(derive_seed(self._seed, "prompt order", self._epoch)).random_raw(len(self._dataset))
        return np.argsort(keys, kind="stable")

    def state_dict(self) -> dict[str, Any]:
        """Epoch, offset and dropped rows, and what the order depends on, as plain JSON values."""
        return {
            "epoch": self._epoch,
            "offset": self._offset,
            "dropped": self._dropped,
            **self._order_inputs(),
        }

    def _order_inputs(self) -> dict[str, Any]:
        return {
            "num_rows": len(self._dataset),
            "digest": self._dataset.digest,
            "shuffle": self._shuffle,
            "seed": self._seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; DataError if its order cannot be continued on these rows."""
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise DataError(
                f"the saved sampler state lacks {', '.join(sorted(missing))}; it was written by another program"
            )
        current = self._order_inputs()
        changed = [key for key in current if state[key] != current[key]]
        if changed:
            raise DataError(_describe_change(changed, state, current))
        self._epoch, self._offset, self._dropped = state["epoch"], state["offset"], state["dropped"]
        self._order = self._epoch_order()


def _describe_change(changed: Sequence[str], saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    names = {
        "num_rows": "the number of prompts",
        "digest": "the content or selection of data.train_files",
        "shuffle": "data.shuffle",
        "seed": "data.seed",
    }
    details = "; ".join(f"{names[key]} was {saved[key]}, is {now[key]}" for key in changed)
    return (
        f"the data order of the checkpoint cannot be continued: {details}. Restore the files and data.* settings "
        "of the saved run, or start over under another trainer.experiment_name"
    )
