"""`DataProto` as the type of what a reward manager gets: one answer, which can be read."""

from typing import Any

from verl.rewards.single_sequence_batch import AnswerItem as DataProtoItem
from verl.rewards.single_sequence_batch import NotInAnswerError, OneAnswer
from verl.utils.import_paths import replacement

__all__ = ["DataProto", "DataProtoItem"]


class _TypeOfOneAnswer(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, OneAnswer)

    def __getattr__(cls, name: str) -> Any:
        raise NotInAnswerError(f"DataProto.{name} is not provided: {replacement('verl.protocol.DataProto')}")

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotInAnswerError(f"no DataProto can be made: {replacement('verl.protocol.DataProto')}")


class DataProto(metaclass=_TypeOfOneAnswer):
    """The type of one answer, in annotations and for isinstance; others know a batch with methods by this name."""
