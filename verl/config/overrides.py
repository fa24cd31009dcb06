"""The grammar of command-line overrides: `a.b=1`, `+a.b=[x,y]`, `++a={k:v}`, `~a`."""

import re
from dataclasses import dataclass
from typing import Any

from verl.utils.errors import ConfigError

_OVERRIDE = re.compile(r"(?P<mode>\+\+|\+|~|)(?P<path>[A-Za-z_][\w.@/:-]*)\s*(?P<rest>=.*)?", re.DOTALL)
_INT = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[+-]?(([0-9]+(_[0-9]+)*\.[0-9]*|\.[0-9]+|[0-9]+)(e[+-]?[0-9]+)?|inf|nan)", re.IGNORECASE)
MAX_DEPTH = 64
"""Lists, dictionaries and names inside one another in one value or key; deeper ones are refused."""


@dataclass(frozen=True)
class Override:
    """One parsed override. `mode` is '', '+', '++' or '~'; `text` is the value as written."""

    mode: str
    path: str
    value: Any
    text: str | None
    source: str


def parse_override(source: str) -> Override:
    """The parts of an override string; ConfigError where it cannot be parsed."""
    match = _OVERRIDE.fullmatch(source)
    if match is None or (match["rest"] is None and match["mode"] != "~"):
        raise ConfigError(f"override {source!r} is not of the form key=value (+key=value, ++key=value or ~key)")
    if match["path"].count(".") > MAX_DEPTH:
        raise ConfigError(f"override {source[:60]!r}... names a key more than {MAX_DEPTH} levels deep")
    text = None if match["rest"] is None else match["rest"][1:].strip()
    value = None if text is None else _ValueParser(text, source).parse()
    return Override(match["mode"], match["path"], value, text, source)


def is_number(text: str) -> bool:
    """True for a number in ASCII digits; inf is one, nan is not."""
    return _FLOAT.fullmatch(text) is not None and "nan" not in text.lower()


def parse_value(text: str) -> Any:
    """A value as it is written in an override."""
    return _ValueParser(text.strip(), text).parse()


def parse_scalar(text: str) -> Any:
    """An unquoted word: null, true, false, an integer, a float, or the word itself."""
    lowered = text.lower()
    if lowered == "null":
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    if _INT.fullmatch(text) and len(text) < 1000:
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


class _ValueParser:
    """Parses one value: a quoted string, [list], {dictionary} or word."""

    def __init__(self, text: str, source: str):
        self.text, self.source, self.position, self.depth = text, source, 0, 0

    def parse(self) -> Any:
        """The value of the whole text."""
        if self.text == "":
            return ""
        value = self._parse_value(stops="")
        self._skip_spaces()
        if self.position != len(self.text):
            raise self._error("unexpected " + repr(self.text[self.position :]))
        return value

    def _error(self, what: str) -> ConfigError:
        shown = repr(self.source) if len(self.source) <= 500 else f"{self.source[:60]!r}..."
        return ConfigError(f"override {shown} cannot be read: {what}")

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
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._error(f"its lists and dictionaries are more than {MAX_DEPTH} levels deep")
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
        self.depth -= 1
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
