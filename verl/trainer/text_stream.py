"""The text of an answer while its tokens arrive: whole characters only, and nothing of what ends it."""

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what a decoder gives for the first bytes of a character


def cut(text: str, ends: Sequence[str]) -> str:
    """`text` up to the first of `ends`."""
    places = [text.index(end) for end in ends if end in text]
    return text[: min(places)] if places else text


class TextStream:
    """Pieces that joined are `cut(decode(all tokens), ends)`. `decode`: token ids to text."""

    def __init__(self, decode: Callable[[list[int]], str], ends: Sequence[str]):
        self.decode, self.ends = decode, ends
        self.ids: list[int] = []  # the newest; the text of the first `context` of them is settled
        self.context = 0
        self.kept = ""  # may turn out to begin one of `ends`
        self.ended = False

    def add(self, token_ids: Sequence[int], last: bool = False) -> str:
        """The text that `token_ids` make certain; with `last`, all that is left."""
        self.ids += token_ids
        before, text = self.decode(self.ids[: self.context]), self.decode(self.ids)
        if self.ended or (text.endswith(_INCOMPLETE) and not last):
            return ""
        self.kept += text[len(before) :]
        if len(text) > len(before):
            self.ids, self.context = self.ids[self.context :], len(self.ids) - self.context
        text = cut(self.kept, self.ends)
        self.ended = text != self.kept or last
        certain = len(text) if self.ended else len(text) - self._begun(text)
        self.kept = text[certain:]
        return text[:certain]

    def _begun(self, text: str) -> int:
        """Characters at the end of `text` with which one of `ends` may begin."""
        longest = min(max(map(len, self.ends), default=1) - 1, len(text))
        sizes = range(longest, 0, -1)
        return next((n for n in sizes if any(end.startswith(text[-n:]) for end in self.ends)), 0)
