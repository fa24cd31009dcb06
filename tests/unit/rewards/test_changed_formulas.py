"""Random formulas and chains of equations with one operator, sign or digit changed are judged as SymPy judges them."""

import random
from typing import NamedTuple

import pytest

from tests.conftest import import_or_skip
from tests.tiers import soak
from verl.rewards.scorers.math_equality import is_equal

SYMBOLS = "xyzabcAB"
SUMS, PRODUCTS = ("+", "-"), ("", r"\cdot ", "*")


class Formula(NamedTuple):
    """A tree: an operator or sign with its parts, or a number or symbol without."""

    head: str
    parts: tuple["Formula", ...] = ()


def drawn(generator: random.Random, depth: int) -> Formula:
    """A random formula; products of several letters are frequent."""
    kind = generator.random()
    if depth == 0 or kind < 0.1:
        return Formula(generator.choice(SYMBOLS) if generator.random() < 0.6 else str(generator.randint(1, 120)))
    if kind < 0.35:
        letters = "".join(generator.sample(SYMBOLS, generator.randint(2, 4)))
        factors = tuple(map(Formula, ([str(generator.randint(2, 9))] if kind < 0.25 else []) + list(letters)))
        return Formula("", factors)
    if kind < 0.45:
        return Formula("neg", (drawn(generator, depth - 1),))
    if kind < 0.55:
        return Formula("^", (drawn(generator, 0), Formula(str(generator.randint(2, 4)))))
    head = generator.choice(("+", "-", "+", "-", *PRODUCTS, "/"))
    return Formula(head, (drawn(generator, depth - 1), drawn(generator, depth - 1)))


def latex(formula: Formula) -> str:
    head, parts = formula
    if not parts:
        return head
    texts = [latex(part) for part in parts]
    if head == "/":
        return rf"\frac{{{texts[0]}}}{{{texts[1]}}}"
    if head == "^":
        return f"({texts[0]})^{{{texts[1]}}}" if parts[0].parts else f"{texts[0]}^{{{texts[1]}}}"
    for place, part in enumerate(parts):
        first_in_sum = head in SUMS and place == 0
        is_number_behind = head == "" and place > 0 and texts[place][0].isdigit()
        if (part.head in (*SUMS, "neg") and part.parts and not first_in_sum) or is_number_behind:
            texts[place] = (
                rf"\cdot {texts[place]}" if is_number_behind else f"({texts[place]})"
            )  # z(15) is a function's value
    return f"-{texts[0]}" if head == "neg" else head.join(texts)


def value(formula: Formula, sympy):
    head, parts = formula
    if not parts:
        return sympy.Integer(head) if head.isdigit() else sympy.Symbol(head, positive=True)
    values = [value(part, sympy) for part in parts]
    if head in SUMS:
        return values[0] + values[1] if head == "+" else values[0] - values[1]
    if head == "/":
        return values[0] / values[1]
    if head == "^":
        return values[0] ** values[1]
    return -values[0] if head == "neg" else sympy.prod(values)


def changed(generator: random.Random, formula: Formula) -> Formula:
    """The formula with one operator, sign or digit changed, at a random place."""
    head, parts = formula
    if parts and generator.random() < 0.7:
        place = generator.randrange(len(parts))
        return Formula(head, (*parts[:place], changed(generator, parts[place]), *parts[place + 1 :]))
    if not parts:
        if head.isdigit() and generator.random() < 0.7:
            place = generator.randrange(len(head))
            digit = generator.choice([d for d in "123456789" if d != head[place]])
            return Formula(head[:place] + digit + head[place + 1 :])
        return Formula("neg", (formula,))
    if head == "neg":
        return parts[0]
    if head == "^" or len(parts) > 2:
        return Formula("+", (Formula(head, parts[:-1]) if len(parts) > 2 else parts[0], parts[-1]))
    return Formula(generator.choice([other for other in ("+", "-", "", "/") if other != head]), parts)


def is_same(first: Formula, second: Formula, sympy) -> bool:
    """Whether SymPy finds their difference to be zero."""
    return sympy.simplify(value(first, sympy) - value(second, sympy)) == 0


@pytest.mark.parametrize("count", [40, *soak([2000])])
def test_a_changed_formula_is_judged_as_by_sympy(count: int):
    import_or_skip("math_verify")
    import sympy

    generator, wrong, num_equal = random.Random(count), [], 0
    for number in range(count):
        gold = drawn(generator, 2)
        answer = gold if number % 8 == 0 else changed(generator, gold)
        expected = is_same(gold, answer, sympy)
        num_equal += expected
        text = latex(answer).replace("+", " + ") if number % 2 else latex(answer)
        pairs = [(latex(gold), text), (text, latex(gold))]
        if number % 4 == 0:  # as the last member of a chain of which the first is the ground truth
            pairs = [(latex(answer), f"t={latex(gold)}={text}"), (f"t={text}", f"t={latex(gold)}={text}")]
        wrong += [(*pair, expected) for pair in pairs if is_equal(*pair) is not expected]
    assert num_equal > count // 20
    assert wrong == []
