"""How well an answer calculates: the arithmetic inside every <<expression=value>>, and the final `#### answer` line.

Score in [0, 1]: 0.8 x the share of right expressions + 0.2 if the final line repeats the last right value. Zero with
fewer than two different non-trivial expressions, so that writing little, or the same sum again, earns nothing.
`acc` is 1 when the final answer is the true one. Model text is parsed here, never evaluated as code.
"""

import re
from fractions import Fraction

NOTE = re.compile(r"<<([^<>=]{1,60})=([^<>=]{1,30})>>")
FINAL = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")
TOKEN = re.compile(r"\s*(\d+\.?\d*|\.\d+|[-+*/()])")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The reward function's usual signature; see the module's text."""
    notes = NOTE.findall(solution_str)
    right = [verdict(expression, value) for expression, value in notes]
    distinct = {expression.replace(" ", "") for expression, _ in notes if is_non_trivial(expression)}
    final = FINAL.search(solution_str.strip())
    answer = number(final.group(1)) if final else None
    result = {"arithmetic": sum(right) / len(right) if right else 0.0, "expressions": len(notes)}
    result["acc"] = float(answer is not None and answer == number(str(ground_truth)))
    agrees = bool(notes) and right[-1] and answer is not None and answer == number(notes[-1][1])
    result["score"] = 0.8 * result["arithmetic"] + 0.2 * agrees if len(distinct) >= 2 else 0.0
    return result


def verdict(expression, value):
    """Whether `expression` has `value`, to the digits that are written."""
    actual, written = evaluate(expression), number(value)
    if actual is None or written is None:
        return False
    decimals = len(value.strip().partition(".")[2])
    tolerance = Fraction(1, 2 * 10**decimals) if decimals else Fraction(0)
    return abs(actual - written) <= tolerance


def is_non_trivial(expression):
    """Two numbers or more, and neither 0 nor 1 among them."""
    numbers = [number(n) for n in re.findall(r"\d+\.?\d*|\.\d+", expression)]
    return len(numbers) >= 2 and all(n not in (0, 1) for n in numbers)


def number(text):
    """A decimal number as a fraction; None for anything else."""
    text = text.strip().replace(",", "").lstrip("$")
    return Fraction(text) if re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", text) else None


def evaluate(expression):
    """The value of + - * / and parentheses over decimal numbers; None where it is not such an expression."""
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
