r"""Mathematical answers as text: which part of a solution is the answer, and its normal form.

The normal form drops what says nothing (spaces, `\left`, `$`, a full stop, `\boxed`), and writes what is the same in one
way (`\dfrac`, `\frac12` and `1/2`; `−` and `-`; `½`). docs/scorers.md is the written rule.
"""

# ruff: noqa: RUF001 (signs that look like others)
import re
from typing import NamedTuple

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
_REWRITES = [  # (pattern, replacement), in this order
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
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|\\circ(?![a-zA-Z])", ""),
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
]
_REWRITES = [(re.compile(pattern, re.ASCII), replacement) for pattern, replacement in _REWRITES]
_UNIT = re.compile(
    rf"(?P<number>.*[\d}})\]a-zA-Z])\s*{_TEXT}\s*\{{\s*(?P<unit>[^{{}}]*?)\.?\s*\}}(?P<power>\^\s*\{{?\d\}}?)?$"
)
_PLAIN_UNIT = re.compile(
    r"(?P<number>-?[\d.,]*\d|-?\\frac\{\d+\}\{\d+\})\s+(?P<unit>[a-zA-Z][a-zA-Z ]{1,30}?)(?P<power>\^\{\d\})?\.?$"
)
_SLASH = re.compile(r"(-?)(\d+)/(\d+)", re.ASCII)
_BRACED = re.compile(rf"{_TEXT}\s*\{{([^{{}}]*)\}}")
_NAMED = re.compile(r"(?:[a-zA-Z]|\\[a-z]+)(?:_\{\w+\}|\([a-zA-Z]\))?(?:=|\\in(?![a-z]))(.+)")


class NormalForm(NamedTuple):
    """An answer's text, the unit after it ("" for none), and whether a percent sign was there."""

    text: str
    unit: str = ""
    percent: bool = False


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
    for position, character in enumerate(rest):
        if character in "{}" and rest[position - 1 : position] != "\\":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return rest[1:position]
    return None


def without_name(text: str) -> str:
    r"""`5` of the normal form `x=5`, `[1,2]` of `x\in[1,2]`; the text itself where no short name is before it."""
    named = _NAMED.fullmatch(text)
    return named[1] if named and not re.search("[=<>]", named[1]) else text


def normal_form(answer: str) -> NormalForm:
    """The normal form of an answer, without spaces."""
    text = answer.translate(_CHARACTERS).replace("\n", " ").strip(" *")
    if text.startswith((r"\boxed", r"\fbox")):
        text = last_boxed(text) or text
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)  # type: ignore[arg-type]
    text = text.strip().rstrip(".,;: ")
    unit = ""
    if found := _UNIT.fullmatch(text) or _PLAIN_UNIT.fullmatch(text):
        text, unit = found["number"], re.sub(r"[\s{}]", "", found["unit"] + (found["power"] or "")).lower()
    percent = "%" in text + unit
    text = _BRACED.sub(r"\1", text.replace("%", ""))
    text = re.sub(r"(\\[a-zA-Z]+) +(?=[a-zA-Z])|\s+", lambda match: match[1] + " " if match[1] else "", text)
    text = _SLASH.sub(r"\1\\frac{\2}{\3}", text) if _SLASH.fullmatch(text) else text
    if re.fullmatch(r"\(?[a-zA-Z]\)", text):  # the letter of a choice
        text = text.strip("()")
    return NormalForm(text, "" if percent else unit, percent)
