r"""Mathematical answers as text: which part of a solution is the answer, and its normal form.

The normal form drops what says nothing (spaces, `\left`, `$`, a full stop, `\boxed`), and writes what is the same in
one way (`\dfrac`, `\frac12` and `1/2`; `−` and `-`; `½`). docs/rewards/scorers.md is the written rule.
"""

# ruff: noqa: RUF001 (signs that look like others)
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

MAX_LENGTH = 2000  # characters of an answer that is rewritten
FULL_WIDTH = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # for str.translate
# Signs that models write instead of LaTeX.
_CHARACTERS = FULL_WIDTH | {
    ord(character): latex
    for character, latex in {
        "\u3000": " ", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "−": "-", "–": "-", "—": "-", "‐": "-",
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ",
        "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ",
        "°": r"^{\circ}", "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "∅": r"\emptyset ", "θ": r"\theta ", "€": "", "£": "",
    }.items()
}  # fmt: skip
_FUNCTIONS = "sin|cos|tan|cot|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|exp|sqrt|pi|infty"  # not `5 sec`, `5 min`
_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mbox|mathrm|mathbf|mathit|mathsf|operatorname|rm)(?![a-zA-Z])"
_REWRITES: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [  # (pattern, replacement), in this order
    (r"(?<!\\)\\[][()]|\\?\$|\\displaystyle", ""),
    (r"\\(?:left|right|[bB]igg?[lr]?|mathopen|mathclose|limits)(?![a-zA-Z])\s*\.?", ""),
    (r"(?<=\d)(?:\{,\}|\\[,!;: ])(?=\d{3}(?!\d))", ","),
    (r"(?<!\\)\\[,!;: ]|~|\\q?quad(?![a-zA-Z])", " "),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:geq|geqslant|ge)(?![a-zA-Z])", r"\\ge "),
    (r"\\(?:leq|leqslant|le)(?![a-zA-Z])", r"\\le "),
    (r"\\(?:neq|ne)(?![a-zA-Z])", r"\\ne "),
    (r"\\(?:varnothing|emptyset)(?![a-zA-Z])", r"\\emptyset "),
    (r"\\[lr]brace(?![a-zA-Z])|\\([{}])", lambda match: "\\" + (match[1] or ("{" if match[0][1] == "l" else "}"))),
    (r"\\(?:lvert|rvert|vert|mid)(?![a-zA-Z])", "|"),
    (r"\\begin\{[bB]matrix\}", r"\\begin{pmatrix}"),
    (r"\\end\{[bB]matrix\}", r"\\end{pmatrix}"),
    (rf"{_TEXT}\s*\{{\s*(?:and|or)\s*\}}|(?<=[\d\s$}})])(?:and|or)(?=[\s\d$\\(])", ","),
    (r"(\\(?:sin|cos|tan|cot|sec|csc)\s*\(?\s*)(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ\s*\}?", r"\1(\\frac{\2\\pi}{180})"),
    (r"\^\s?\{?\s?\\circ\s?\}?|\\degree(?![a-zA-Z])|(?<=\d)\s?\\circ(?![a-zA-Z])", ""),
    (r"(?<![\\a-zA-Z])(?:percent|per cent)(?![a-zA-Z])|\\%", "%"),
    (r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
    (rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?![a-zA-Z])", r"\\\1"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}"),
    (r"\\frac\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
    (r"\\frac\s*([0-9a-zA-Z])\s*\{", r"\\frac{\1}{"),
    (r"(\\frac\s*\{[^{}]*\})\s*([0-9a-zA-Z])", r"\1{\2}"),
    (r"\*\*|\^\s*", "^"),
    (r"_\s*([0-9a-zA-Z])", r"_{\1}"),
    (r"\^\(([^()]*)\)|\^([+-]?\d+|[a-zA-Z])", lambda match: "^{" + (match[1] or match[2]) + "}"),
    (r"(?<![\d.])\.(?=\d)", "0."),
    (r"(?<=\d)\.(?!\d|\\overline|\\bar|\\dot)", ""),
    (r"\\(?:bar|dot)(?![a-zA-Z])", r"\\overline"),
    (r"\\overline\s*(\d)", r"\\overline{\1}"),
    (r"\\\{\s*\\\}", r"\\emptyset "),
    (r"(\d)\s+(\d+)/(\d+)", r"\1\\frac{\2}{\3}"),
    (r"(?<=\d)\s+(?=\d{3}(?!\d))", ""),
    (r"(?<=\d)\s+(?=\d)", ","),
]
_COMPILED = [(re.compile(pattern, re.ASCII), replacement) for pattern, replacement in _REWRITES]
_POWER = r"(?P<power>\^\s*\{?\d\}?)?"
_UNIT = re.compile(
    r"\\(?:text(?:rm|normal)?|mbox|mathrm|rm)\s?\{\s?(?P<unit>[^{}\d+*=<>-][^{}+*=<>]*)\}" + _POWER + r"\Z", re.ASCII
)
_PLAIN_UNIT = re.compile(
    r"(?P<number>-?[\d.,]*\d|-?\\frac\{\d+\}\{\d+\})\s(?P<unit>[a-zA-Z][a-zA-Z ]{1,30})" + _POWER, re.ASCII
)
_UNIT_LETTERS = frozenset("msghlLJKNWVACFTd")  # units of one letter; any other is a variable
_SHORT_UNITS = re.compile(
    "[cmkdn]m|[km]g|m[lL]|in|ft|yd|mi|lbs?|oz|hrs?|min|sec|rad|deg|[mkr]p[hm]|kmh|[kMG]?Hz|sq|cu|pt|qt|gal|day|m[ae]n|way"
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # with what a backslash escapes
_SLASH = re.compile(r"(-?)(\d+)/(\d+)", re.ASCII)
_BRACED = re.compile(rf"{_TEXT}\s*\{{([^{{}}]*)\}}")
_WORDS = re.compile(r"[^,;\\{}+*=<>^_]*[a-zA-Z]{2}[^,;\\{}+*=<>^_]*", re.ASCII)  # what a text command keeps together
MARKED_WORDS = re.compile(r"\\text\{([^{}]*)\}")
_NAME = r"(?:[fghFGHPE]\([-\w.]+\)|(?:[a-zA-Z]|\\(?!pi|infty)[a-z]+)(?:_\{\w+\}|\([a-zA-Z]\))?|\\text\{[^{}]+\})"
_NAMED = re.compile(rf"{_NAME}(?:=|\\in(?![a-z]))(.+)")


class NormalForm(NamedTuple):
    r"""An answer's text, the unit after it ("" for none), whether a percent sign was there, and words in `\text{}`."""

    text: str
    unit: str
    percent: bool
    marked: str  # the text with its words of text commands as `\text{words}`


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}`, `\fbox{...}` or `\boxed 5`; None without one, or where it has no end."""
    start, command = max((text.rfind(name), name) for name in (r"\boxed", r"\fbox"))
    if start < 0:
        return None
    rest = text[start + len(command) :].lstrip()
    if not rest.startswith("{"):
        word = re.match(r"[^\s$]+", rest)
        return word[0] if word else None
    depth = 0
    for brace in _BRACE.finditer(rest):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0 and brace[0] == "}":
            return rest[1 : brace.start()]
    return None


def is_name(text: str) -> bool:
    r"""Whether the text is a short name of a value: `x`, `x_{1}`, `f(2)`, `\theta`, `\text{Area}`."""
    return re.fullmatch(_NAME, text) is not None


def without_name(text: str) -> str:
    r"""`5` of the normal form `x=5`, `[1,2]` of `x\in[1,2]`; the text itself where no short name is before it."""
    named = _NAMED.fullmatch(text)
    return named[1] if named and not re.search("[=<>]", named[1]) else text


@functools.lru_cache(4096)  # a group has one ground truth
def normal_form(answer: str) -> NormalForm:
    """The normal form of an answer, without spaces; of a very long one the text as it is."""
    if len(answer) > MAX_LENGTH:
        return NormalForm(answer.strip(), "", False, answer.strip())
    text = re.sub(r"\s+", " ", answer.translate(_CHARACTERS)).strip(" *")
    if text.startswith((r"\boxed", r"\fbox")):
        text = last_boxed(text) or text
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, re.sub(" {2,}", " ", text))
    text = text.strip().rstrip(".,;:\\ ")
    text, unit = _without_unit(text)
    percent = "%" in text + unit
    marked = _BRACED.sub(lambda found: _words(found[1]), text.replace("%", ""))
    marked = re.sub(r"(\\[a-zA-Z]+) (?=[a-zA-Z])| ", lambda match: match[1] + " " if match[1] else "", marked)
    marked = _SLASH.sub(r"\1\\frac{\2}{\3}", marked) if _SLASH.fullmatch(marked) else marked
    if re.fullmatch(r"\(?[a-zA-Z]\)", marked):  # the letter of a choice
        marked = marked.strip("()")
    return NormalForm(MARKED_WORDS.sub(r"\1", marked), "" if percent else unit, percent, marked)


def _words(content: str) -> str:
    """Words stay in their text command; a letter, a number, a list or a formula does not."""
    return rf"\text{{{content}}}" if _WORDS.fullmatch(content) else content


def _without_unit(text: str) -> tuple[str, str]:
    """(the text before its unit, the unit in lower case without spaces); the whole text and "" where it has none."""
    start = max(text.rfind(command) for command in ("\\text", "\\mbox", "\\mathrm", "\\rm"))
    if found := _UNIT.match(text, start) if start > 0 else None:
        number = text[:start].rstrip()
        is_unit = re.search(r"[\d})\]a-zA-Z]\Z", number) and (len(found["unit"]) > 1 or found["unit"] in _UNIT_LETTERS)
    elif found := _PLAIN_UNIT.fullmatch(text):
        number, is_unit = found["number"], all(map(_is_word, re.findall("[a-zA-Z]+", found["unit"])))
    if not found or not is_unit:
        return text, ""
    return number, re.sub(r"[\s{}]", "", found["unit"].strip(" .") + (found["power"] or "")).lower()


def _is_word(letters: str) -> bool:
    """Whether letters behind a number and a space are a unit or a word, and not a product of variables."""
    if len(letters) < 4:
        return letters in _UNIT_LETTERS or _SHORT_UNITS.fullmatch(letters) is not None
    return re.search("[aeiou]", letters) is not None
