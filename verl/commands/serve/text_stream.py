"""The text of an answer while its tokens arrive: whole characters only, without stop strings."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # a decoder's output for an incomplete character


def cut_at_stop(text: str, stop_strings: Sequence[str]) -> str:
    """`text` up to the first of `stop_strings`."""
    places = [text.index(end) for end in stop_strings if end in text]
    return text[: min(places)] if places else text


class TextStream:
    """Returns pieces that join to `cut_at_stop(decode(all tokens), stop_strings)`. `decode`: token ids to text."""

    def __init__(self, decode: Callable[[list[int]], str], stop_strings: Sequence[str]):
        self.decode, self.stop_strings = decode, stop_strings
        self.ids: list[int] = []  # the newest tokens; the text of the first `context` of them is final
        self.context = 0
        self.held_back = ""  # text that may be the beginning of a stop string
        self.ended = False

    def add(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text that is final after `token_ids`; with `last`, all remaining text."""
        self.ids += token_ids
        before, text = self.decode(self.ids[: self.context]), self.decode(self.ids)
        if self.ended or (text.endswith(_INCOMPLETE) and not last):
            return ""
        self.held_back += text[len(before) :]
        if len(text) > len(before):
            self.ids, self.context = self.ids[self.context :], len(self.ids) - self.context
        text = cut_at_stop(self.held_back, self.stop_strings)
        self.ended = text != self.held_back or last
        final_length = len(text) if self.ended else len(text) - self._partial_stop_length(text)
        self.held_back = text[final_length:]
        return text[:final_length]

    def _partial_stop_length(self, text: str) -> int:
        """Characters at the end of `text` with which one of `stop_strings` may begin."""
        longest = min(max(map(len, self.stop_strings), default=1) - 1, len(text))
        sizes = range(longest, 0, -1)
        return next((n for n in sizes if any(end.startswith(text[-n:]) for end in self.stop_strings)), 0)
