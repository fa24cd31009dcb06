"""The grammar of command-line overrides: `a.b=1`, `+a.b=[x,y]`, `++a={k:v}`, `~a`."""

import re
from dataclasses import dataclass
from typing import Any

from verl.utils.errors import ConfigError

_OVERRIDE = re.compile(r"(?P<mode>\+\+|\+|~|)(?P<path>[A-Za-z_][\w.@/:-]*)\s*(?P<rest>=.*)?", re.DOTALL)
_INT = re.compile(r"[+-]?\d+(_\d+)*")
_FLOAT = re.compile(r"[+-]?((\d+(_\d+)*\.\d*|\.\d+|\d+)([eE][+-]?\d+)?|inf|nan)", re.IGNORECASE)


@dataclass(frozen=True)
class Override:
    """One parsed override. `mode` is '', '+', '++' or '~'; `text` is the value as written."""

    mode: str
    path: str
    value: Any
    text: str | None
    source: str


def parse_override(source: str) -> Override:
    """An override string as its parts; ConfigError says where it cannot be read."""
    match = _OVERRIDE.fullmatch(source)
    if match is None or (match["rest"] is None and match["mode"] != "~"):
        raise ConfigError(f"override {source!r} is not of the form key=value (+key=value, ++key=value or ~key)")
    text = None if match["rest"] is None else match["rest"][1:].strip()
    value = None if text is None else _Values(text, source).whole()
    return Override(match["mode"], match["path"], value, text, source)


def scalar(text: str) -> Any:
    """An unquoted word: null, true, false, an integer, a float, or the word itself."""
    lowered = text.lower()
    if lowered == "null":
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


class _Values:
    """Reads one value: a quoted string, [list], {dictionary} or word."""

    def __init__(self, text: str, source: str):
        self.text, self.source, self.at = text, source, 0

    def whole(self) -> Any:
        """The value that takes up all of the text."""
        if self.text == "":
            return ""
        value = self._value(stops="")
        self._skip_spaces()
        if self.at != len(self.text):
            raise self._error("unexpected " + repr(self.text[self.at :]))
        return value

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"override {self.source!r} cannot be read: {what}")

    def _skip_spaces(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def _peek(self) -> str:
        self._skip_spaces()
        return self.text[self.at] if self.at < len(self.text) else ""

    def _value(self, stops: str) -> Any:
        first = self._peek()
        if first == "[":
            return self._items("]", self._element)
        if first == "{":
            return dict(self._items("}", self._pair))
        if first in "'\"" and first:
            return self._quoted(first)
        return self._word(stops)

    def _items(self, end: str, read: Any) -> list[Any]:
        self.at += 1
        items: list[Any] = []
        while self._peek() != end:
            if not self._peek():
                raise self._error(f"{end!r} is missing")
            items.append(read())
            if self._peek() == ",":
                self.at += 1
            elif self._peek() != end:
                raise self._error(f"expected ',' or {end!r} before {self.text[self.at :]!r}")
        self.at += 1
        return items

    def _element(self) -> Any:
        return self._value(stops=",]")

    def _pair(self) -> tuple[Any, Any]:
        name = self._quoted(self._peek()) if self._peek() in "'\"" else self._word(":,}")
        if self._peek() != ":":
            raise self._error(f"expected ':' after {name!r}")
        self.at += 1
        return name, self._value(stops=",}")

    def _quoted(self, quote: str) -> str:
        self.at += 1
        out = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in (quote, "\\"):
                out.append(self.text[self.at + 1])
                self.at += 2
                continue
            self.at += 1
            if char == quote:
                return "".join(out)
            out.append(char)
        raise self._error(f"the closing {quote} is missing")

    def _word(self, stops: str) -> Any:
        start, depth = self.at, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if self.text.startswith("${", self.at):
                depth += 1
                self.at += 1
            elif depth:
                depth -= char == "}"
            elif char == "\\":
                self.at += 1
            elif char in stops:
                break
            elif char == ",":
                raise self._error("a comma outside quotes; write [a,b] for a list or '\"a,b\"' for text")
            self.at += 1
        word = self.text[start : self.at].strip()
        return re.sub(r"\\(.)", r"\1", word) if "\\" in word else scalar(word)
