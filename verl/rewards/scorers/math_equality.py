"""Whether two mathematical answers are equal: by normal form, as numbers, part by part, and last by symbols.

The written rule is docs/rewards/scorers.md.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from verl.rewards.scorers.equivalence_pool import shared_pool
from verl.rewards.scorers.math_answer import MARKED_WORDS, is_name, normal_form, without_name

MAX_LENGTH = 1000  # characters of an answer that is compared as a formula
MAX_PARTS = 32  # of a list whose order does not count
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)(?:(?P<start>\d*\.\d*)\\overline\{{(?P<repeated>\d+)\}}"
    rf"|(?P<whole>\d+)?\\frac\{{(?P<minus>-?)(?P<top>{_DECIMAL})\}}\{{(?P<bottom>{_DECIMAL})\}}|(?P<number>{_DECIMAL})"
    rf"(?:(?:[eE]|(?:\\times|\\cdot)10\^\{{)(?P<exponent>[-+]?\d{{1,2}})\}}?)?)",
    re.ASCII,
)
_OPENING, _CLOSING = ("(", "[", r"\{"), (")", "]", r"\}")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|in|cup|cap|setminus)(?![a-zA-Z])")
_GEOMETRY = re.compile(r"\\(?:(?:measured)?angle|triangle|over\w+|wide\w+|odot|parallel|perp|cong|sim)(?![a-zA-Z])")
_POINT = re.compile(r"(?<!\d)(\d+)\.(\d+)", re.ASCII)


class Parts(NamedTuple):
    """A tuple, interval, set or list: its brackets ("" for a list without) and its parts."""

    brackets: str
    items: list[str]


def is_equal(gold: str, answer: str) -> bool | None:
    """Whether `answer` equals `gold`; None where the symbolic comparison was killed.

    ConfigError where a symbolic comparison is needed and math-verify is not installed.
    """
    first, second = normal_form(gold), normal_form(answer)
    if not first.text or not second.text:
        return False
    if first.unit and second.unit and not _is_same_unit(first.unit, second.unit):
        return False
    return _compare(first.marked, second.marked, first.percent, second.percent)


def _is_same_unit(first: str, second: str) -> bool:
    return any(first + plural == second or second + plural == first for plural in ("", "s", "es"))


def _compare(gold: str, answer: str, gold_percent: bool = False, answer_percent: bool = False) -> bool | None:
    if "=" not in answer:
        gold = without_name(gold)
    elif "=" not in gold:
        answer = without_name(answer)
    if gold == answer:
        return True
    first, second = exact_number(gold), exact_number(answer)
    if first is not None and second is not None:
        if gold_percent == answer_percent:
            return first == second
        percent, other = (first, second) if gold_percent else (second, first)
        return other in (percent, percent / 100)
    if max(len(gold), len(answer)) > MAX_LENGTH:
        return False
    gold_parts = parts_of(gold) if first is None else None  # `1,234` is one number
    answer_parts = parts_of(answer) if second is None else None
    if gold_parts and answer_parts:
        return _compare_parts(gold_parts, answer_parts)
    if (gold_parts or answer_parts) and not _RELATION.search(gold + answer):
        return False
    if "=" in gold + answer and not re.search(r"[<>!]=|\\begin", gold + answer):
        return _compare_equations(gold, answer)
    return _compare_formulas(gold, answer)


def _compare_formulas(gold: str, answer: str) -> bool | None:
    if _are_words(gold, answer):
        return _spelled(gold) == _spelled(answer)
    if not _is_formula(gold) or not _is_formula(answer) or gold.lower() == answer.lower():
        return False
    return shared_pool().compare(_to_parse(gold), _to_parse(answer))


def _compare_equations(gold: str, answer: str) -> bool | None:
    """Equality of texts of which one at least has an equals sign.

    Two equations are compared as formulas, and a chain `x=2+1=3` as its last member, if its members are equal.
    """
    chains = [_split(re.sub(":?=+", "=", text), "=") for text in (gold, answer)]
    if (len(chains[0]) == len(chains[1]) <= 2 and chains[0][:-1] != chains[1][:-1]) or max(map(len, chains)) == 1:
        return _compare_formulas(gold, answer)
    names = [chain.pop(0) if len(chain) > 1 and (is_name(chain[0]) or not chain[0]) else "" for chain in chains]
    if all(names) and names[0] != names[1]:
        return False
    pairs = [(member, chain[-1]) for chain in chains for member in chain[:-1]] + [(chains[0][-1], chains[1][-1])]
    verdicts = (_compare(*pair) for pair in pairs)
    return next((verdict for verdict in verdicts if not verdict), True)


def exact_number(text: str) -> Fraction | None:
    r"""The value of a normal form that is a number: `-1,234.5`, `\frac{3}{4}`, `1\frac{1}{2}`, `0.1\overline{6}`."""
    found = _NUMBER.fullmatch(text) if len(text) <= MAX_LENGTH else None
    if found is None:
        return None
    sign = -1 if found["sign"] == "-" else 1
    if found["number"]:
        return sign * _decimal(found["number"]) * Fraction(10) ** int(found["exponent"] or 0)
    if found["repeated"]:
        whole, _, digits = found["start"].partition(".")
        period = Fraction(int(found["repeated"]), (10 ** len(found["repeated"]) - 1) * 10 ** len(digits))
        return sign * (_decimal(f"{whole or 0}.{digits or 0}") + period)
    bottom = _decimal(found["bottom"])
    if bottom == 0:
        return None
    part = _decimal(found["top"]) / bottom * (-1 if found["minus"] else 1)
    return sign * (int(found["whole"] or 0) + part)


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", ""))


def parts_of(text: str) -> Parts | None:
    r"""The parts of `(1,2]`, `\{1,2\}` or `1,2`, with `2\pm1` as two parts; None for anything else."""
    opening = next((bracket for bracket in _OPENING if text.startswith(bracket)), "")
    closing = next((bracket for bracket in _CLOSING if text.endswith(bracket)), "")
    brackets = ""
    if opening and closing and _spans(text, len(opening), len(closing)):
        brackets, text = opening + closing, text[len(opening) : len(text) - len(closing)]
    items = [choice for item in _split(text) for choice in _signs(item)]
    if len(items) < 2 and brackets != r"\{\}":
        return None
    return Parts(brackets, items)


def _spans(text: str, opening: int, closing: int) -> bool:
    """Whether the first bracket is closed by the last one."""
    depth = 0
    for character in text[opening : len(text) - closing]:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0


def _split(text: str, marks: str = ",;") -> list[str]:
    """The text between marks (commas and semicolons) that are in no bracket."""
    items, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character in marks and depth == 0:
            items.append("")
        else:
            items[-1] += character
    return items


def _signs(item: str) -> list[str]:
    if item.count(r"\pm") != 1:
        return [item]
    return [item.replace(r"\pm", sign).removeprefix("+") for sign in "+-"]


def _compare_parts(gold: Parts, answer: Parts) -> bool | None:
    """The first part that is unequal or undecided decides, so that one answer costs one killed comparison at most."""
    if len(gold.items) != len(answer.items):
        return False
    if {gold.brackets, answer.brackets} <= {"", r"\{\}"}:
        return _compare_unordered(gold.items, answer.items)
    if gold.brackets != answer.brackets:
        return False
    verdicts = (_compare(*pair) for pair in zip(gold.items, answer.items, strict=True))
    return next((verdict for verdict in verdicts if not verdict), True)


def _compare_unordered(gold: list[str], answer: list[str]) -> bool | None:
    """Every part of one is equal to a part of the other that no part before it has taken."""
    if len(gold) > MAX_PARTS:
        return False
    left = list(answer)
    for item in gold:
        for other in sorted(left, key=item.__ne__):  # the same text first: it needs no comparison
            verdict = _compare(item, other)
            if verdict is None:
                return None
            if verdict:
                left.remove(other)
                break
        else:
            return False
    return True


def _are_words(gold: str, answer: str) -> bool:
    r"""Whether letters spell words or names of points: in `\text{}`, beside `\angle`, or alone on both sides."""
    if any(
        MARKED_WORDS.search(text) or (_GEOMETRY.search(text) and re.search("[A-Z]{2}", text)) for text in (gold, answer)
    ):
        return True
    return all(re.fullmatch("[a-zA-Z]{3,}|[A-Z]{2}", text) for text in (gold, answer))


def _spelled(text: str) -> str:
    """The text with its words, or letters that are alone, in lower case and without spaces and punctuation."""
    text = MARKED_WORDS.sub(lambda found: re.sub(r"[^\w/]", "", found[1]).lower(), text)
    return text.lower() if re.fullmatch("[a-zA-Z]+", text) else text


def _is_formula(text: str) -> bool:
    r"""Whether it is something that the grammar reads right: no number with a base (`1010_{2}`), which it ignores."""
    return re.search(r"\d_", text) is None and re.search(r"[\w\\]", text) is not None


def _to_parse(text: str) -> str:
    """The normal form for the grammar: exact decimals, and the imaginary unit as (I), as I^{2} would lose its power."""
    text = _POINT.sub(lambda found: rf"(\frac{{{found[1]}{found[2]}}}{{1{'0' * len(found[2])}}})", text)
    text = re.sub(r"(?<=\d)\(", r"\\cdot(", text)  # the grammar adds 2 and 3 in 2(3), as in a mixed number
    if re.search(r"\\(?:sum|prod)|_\{i", text):  # an index
        return text
    return re.sub(r"(?<![\\a-zA-Z])i(?![a-zA-Z])", "(I)", text)
