"""Scores the arithmetic of an answer: every <<expression=value>>, and the final `#### answer` line.

Score in [0, 1]: 0.8 x the share of right expressions + 0.2 if the last value is right and the final line repeats it.
Zero with fewer than two counted expressions: one counts once, and only if `uses_known_number` and `is_nontrivial`.
`acc` is 1 when the final answer is the true one. Model text is parsed here, never evaluated as code.
"""

import re
from fractions import Fraction

NOTE = re.compile(r"<<([^<>=]{1,60})=([^<>=]{1,30})>>")
FINAL = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")
TOKEN = re.compile(r"\s*(\d+\.?\d*|\.\d+|[-+*/()])")
NUMBER = re.compile(r"\d+\.?\d*|\.\d+")


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The reward function's usual signature; `extra_info["question"]` is the text that the numbers come from."""
    notes = NOTE.findall(solution_str)
    known, scored = set(numbers_in(extra_info["question"])), {}
    for expression, value in notes:
        if not uses_known_number(expression, known):
            continue
        right = verdict(expression, value)
        if is_nontrivial(expression):
            scored.setdefault(expression.replace(" ", ""), right)
        if right:
            known.add(number(value))
    share = sum(scored.values()) / len(scored) if len(scored) >= 2 else 0.0
    final = FINAL.search(solution_str.strip())
    answer = number(final.group(1)) if final else None
    agrees = bool(notes) and verdict(*notes[-1]) and answer is not None and answer == number(notes[-1][1])
    return {
        "score": 0.8 * share + 0.2 * agrees if len(scored) >= 2 else 0.0,
        "arithmetic": share,
        "expressions": len(scored),
        "acc": float(answer is not None and answer == number(str(ground_truth))),
    }


def uses_known_number(expression, known):
    """Whether `expression` has two or more numbers, at least one `known` (from the question or a right result)."""
    numbers = numbers_in(expression)
    return len(numbers) >= 2 and not known.isdisjoint(numbers)


def is_nontrivial(expression):
    """Whether none of its numbers is 0 or 1, and its value is not 0, 1 or one of its numbers.

    This excludes 2/2, 7-7 and 5-3+3.
    """
    numbers, value = numbers_in(expression), evaluate(expression)
    return {0, 1}.isdisjoint(numbers) and value not in {0, 1, *numbers}


def numbers_in(text):
    """All numbers of a text, without their signs."""
    return [Fraction(n) for n in NUMBER.findall(text.replace(",", ""))]


def verdict(expression, value):
    """Whether `expression` has the value `value`, rounded to its written decimals."""
    actual, written = evaluate(expression), number(value)
    if actual is None or written is None:
        return False
    decimals = len(value.strip().partition(".")[2])
    tolerance = Fraction(1, 2 * 10**decimals) if decimals else Fraction(0)
    return abs(actual - written) <= tolerance


def number(text):
    """A decimal number as a fraction; None for anything else."""
    text = text.strip().replace(",", "").lstrip("$")
    return Fraction(text) if re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", text) else None


def evaluate(expression):
    """The value of an expression of decimal numbers, + - * / and parentheses; None for any other text."""
    tokens, position = [], 0
    expression = expression.strip().replace(",", "")
    while position < len(expression):
        match = TOKEN.match(expression, position)
        if not match:
            return None
        tokens.append(match.group(1))
        position = match.end()
    try:
        value, rest = parse_sum(tokens)
    except (IndexError, ValueError, ZeroDivisionError):
        return None
    return value if not rest else None


def parse_sum(tokens):
    value, tokens = parse_product(tokens)
    while tokens and tokens[0] in "+-":
        right, rest = parse_product(tokens[1:])
        value, tokens = (value + right if tokens[0] == "+" else value - right), rest
    return value, tokens


def parse_product(tokens):
    value, tokens = parse_atom(tokens)
    while tokens and tokens[0] in "*/":
        right, rest = parse_atom(tokens[1:])
        value, tokens = (value * right if tokens[0] == "*" else value / right), rest
    return value, tokens


def parse_atom(tokens):
    head, rest = tokens[0], tokens[1:]
    if head == "-":
        value, rest = parse_atom(rest)
        return -value, rest
    if head == "(":
        value, rest = parse_sum(rest)
        if rest[0] != ")":
            raise ValueError("unbalanced")
        return value, rest[1:]
    return Fraction(head), rest
