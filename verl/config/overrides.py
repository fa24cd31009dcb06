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
    value = None if text is None else _ValueParser(text, source).parse()
    return Override(match["mode"], match["path"], value, text, source)


def parse_scalar(text: str) -> Any:
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


class _ValueParser:
    """Reads one value: a quoted string, [list], {dictionary} or word."""

    def __init__(self, text: str, source: str):
        self.text, self.source, self.position = text, source, 0

    def parse(self) -> Any:
        """The value that takes up all of the text."""
        if self.text == "":
            return ""
        value = self._parse_value(stops="")
        self._skip_spaces()
        if self.position != len(self.text):
            raise self._error("unexpected " + repr(self.text[self.position :]))
        return value

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"override {self.source!r} cannot be read: {what}")

    def _skip_spaces(self) -> None:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1

    def _peek(self) -> str:
        self._skip_spaces()
        return self.text[self.position] if self.position < len(self.text) else ""

    def _parse_value(self, stops: str) -> Any:
        first = self._peek()
        if first == "[":
            return self._parse_items("]", self._parse_element)
        if first == "{":
            return dict(self._parse_items("}", self._parse_pair))
        if first in "'\"" and first:
            return self._parse_quoted(first)
        return self._parse_word(stops)

    def _parse_items(self, end: str, read: Any) -> list[Any]:
        self.position += 1
        items: list[Any] = []
        while self._peek() != end:
            if not self._peek():
                raise self._error(f"{end!r} is missing")
            items.append(read())
            if self._peek() == ",":
                self.position += 1
            elif self._peek() != end:
                raise self._error(f"expected ',' or {end!r} before {self.text[self.position :]!r}")
        self.position += 1
        return items

    def _parse_element(self) -> Any:
        return self._parse_value(stops=",]")

    def _parse_pair(self) -> tuple[Any, Any]:
        name = self._parse_quoted(self._peek()) if self._peek() in "'\"" else self._parse_word(":,}")
        if self._peek() != ":":
            raise self._error(f"expected ':' after {name!r}")
        self.position += 1
        return name, self._parse_value(stops=",}")

    def _parse_quoted(self, quote: str) -> str:
        self.position += 1
        out = []
        while self.position < len(self.text):
            char = self.text[self.position]
            if char == "\\" and self.text[self.position + 1 : self.position + 2] in (quote, "\\"):
                out.append(self.text[self.position + 1])
                self.position += 2
                continue
            self.position += 1
            if char == quote:
                return "".join(out)
            out.append(char)
        raise self._error(f"the closing {quote} is missing")

    def _parse_word(self, stops: str) -> Any:
        start, depth = self.position, 0
        while self.position < len(self.text):
            char = self.text[self.position]
            if self.text.startswith("${", self.position):
                depth += 1
                self.position += 1
            elif depth:
                depth -= char == "}"
            elif char == "\\":
                self.position += 1
            elif char in stops:
                break
            elif char == ",":
                raise self._error("a comma outside quotes; write [a,b] for a list or '\"a,b\"' for text")
            self.position += 1
        word = self.text[start : self.position].strip()
        return re.sub(r"\\(.)", r"\1", word) if "\\" in word else parse_scalar(word)
