"""Names of helpers on TensorDict, which this library does not use: a call says what to use instead."""

from collections.abc import Callable
from typing import Any

_COLUMNS = "a column is batch[name]; batch.with_columns(name=column) adds one"
_CUT = "batch.select(sequences) cuts a batch, verl.data.micro_batches.split_micro_batches makes micro-batches"
_BUILD = "verl.data.batch.Batch.pack makes a batch of trajectories"
_PAD = "batches are packed and need no padding"
INSTEAD = {
    **dict.fromkeys(("get", "get_keys", "get_non_tensor_data", "pop", "pop_keys", "assign_non_tensor"), _COLUMNS),
    **dict.fromkeys(("assign_non_tensor_data", "assign_non_tensor_stack", "union_tensor_dict"), _COLUMNS),
    **dict.fromkeys(("chunk_tensordict", "index_select_tensor_dict", "make_iterator", "unpad_tensordict"), _CUT),
    **dict.fromkeys(("get_tensordict", "concat_tensordict", "list_of_dict_to_tensordict"), _BUILD),
    **dict.fromkeys(("pad_to_divisor", "unpad", "contiguous", "maybe_fix_3d_position_ids"), _PAD),
    "assert_tensordict_eq": "compare columns with torch.testing.assert_close",
}


def __getattr__(name: str) -> Callable[..., Any]:
    """A function of that name which refuses to be called."""
    if name not in INSTEAD:
        raise AttributeError(f"module 'verl.utils.tensordict_utils' has no attribute {name!r}")

    def refused(*args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise ImportError(
            f"verl.utils.tensordict_utils.{name} is not provided: TensorDict is not used here; {INSTEAD[name]}"
        )

    refused.__name__ = name
    return refused
