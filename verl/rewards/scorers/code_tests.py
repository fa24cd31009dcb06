"""The tests of a program, read from the ground truth, and the verdict on what a program gave for one.

Both happen outside the sandbox: a program gets `stdin` or `call` of one test, and never what is expected.
"""

import ast
import builtins
import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.rewards.sandbox.inside.program import plain

TOLERANCE = 1e-6  # absolute or relative, where a decimal number is expected
SPARE_BYTES = 1 << 20  # that a program may write beyond four times what is expected
_DECIMAL = re.compile(rb"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?")
_NUMBER = re.compile(rb"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_FORMS = "E == literal, E != literal, E in literal, E, not E, abs(E - number) < number, math.isclose(E, number)"


@dataclass(frozen=True)
class CodeTest:
    """One input, and which bytes that come back are right."""

    accepts: Callable[[bytes], bool]
    output_bytes: int  # that may be written: enough for what is expected
    stdin: bytes = b""
    call: Mapping[str, Any] | None = None  # {function, arguments} or {expression}; None is a whole program


def read_tests(ground_truth: Any) -> list[CodeTest]:
    """The tests of {inputs, outputs[, fn_name]} or {assert_case}, also as JSON text; ValueError where they are none."""
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    if not isinstance(tests, Mapping):
        raise ValueError(f"the tests of a program are {type(tests).__name__}, expected a dict: {str(tests)!r:.80}")
    asserts = tests.get("assert_case")
    if asserts is not None and len(asserts):
        return [test for text in asserts for test in _read_assert(text)]
    inputs, outputs, name = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name")
    if inputs is None or outputs is None or len(inputs) != len(outputs) or not len(inputs):
        raise ValueError(
            f"the tests of a program need `inputs` and as many `outputs`, or `assert_case`: {str(tests)!r:.200}"
        )
    read = _program_test if name is None else lambda given, expected: _function_test(name, given, expected)
    return [read(given, expected) for given, expected in zip(inputs, outputs, strict=True)]


def _program_test(given: Any, expected: Any) -> CodeTest:
    given, expected = (one if isinstance(one, str) else "\n".join(map(str, one)) for one in (given, expected))
    wanted = expected.encode(errors="surrogatepass")
    return CodeTest(
        lambda stdout: is_same_output(stdout, wanted),
        SPARE_BYTES + 4 * len(wanted),
        stdin=given.encode(errors="surrogatepass"),
    )


def _function_test(name: str, given: Any, expected: Any) -> CodeTest:
    if isinstance(given, str):  # a line of JSON for each argument
        given = [json.loads(line) for line in given.splitlines() if line.strip()]
        with contextlib.suppress(ValueError, TypeError):  # a text without quotes, or a value already
            expected = json.loads(expected)
    arguments = list(given) if isinstance(given, list | tuple) else [given]
    wanted = [plain(expected)]
    if isinstance(expected, list | tuple) and len(expected) == 1:
        wanted.append(plain(expected[0]))
    return CodeTest(
        _of_value(lambda value: any(is_same_value(value, one) for one in wanted)),
        SPARE_BYTES + 4 * len(json.dumps(wanted)),
        call={"function": name, "arguments": arguments},
    )


def _of_value(accepts: Callable[[Any], bool]) -> Callable[[bytes], bool]:
    def accepts_bytes(stdout: bytes) -> bool:
        try:
            return accepts(json.loads(stdout))
        except (ValueError, TypeError, RecursionError):  # not what `plain` makes: the program wrote there itself
            return False

    return accepts_bytes


def is_same_output(stdout: bytes, expected: bytes) -> bool:
    """The same words in every line, where a decimal number that is expected is met within 1e-6.

    ASCII white space separates words, and empty lines at both ends do not count.
    """
    lines, wanted = ([line.split() for line in text.strip(b" \t\r\n").split(b"\n")] for text in (stdout, expected))
    return len(lines) == len(wanted) and all(
        len(line) == len(other) and all(map(_is_same_word, line, other))
        for line, other in zip(lines, wanted, strict=True)
    )


def _is_same_word(word: bytes, expected: bytes) -> bool:
    if word == expected:
        return True
    if len(word) > 100 or not (_DECIMAL.fullmatch(expected) and _NUMBER.fullmatch(word)):
        return False
    return math.isclose(float(word), float(expected), rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def is_same_value(value: Any, expected: Any) -> bool:
    """Equality of two values in the form of `plain`, as Python has it, with these differences: a tuple equals the list,
    keys of dicts are compared as text, a float on either side is met within 1e-6 (not in a set), and objects equal
    nothing."""
    if isinstance(value, int | float) and isinstance(expected, int | float):
        if isinstance(value, float) or isinstance(expected, float):
            return _is_close(value, expected, TOLERANCE, TOLERANCE)
        return value == expected
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(is_same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return _is_same_collection(value, expected)
    return type(value) is type(expected) and value == expected


def _is_same_collection(value: dict, expected: dict) -> bool:
    if value.keys() != expected.keys() or "type" in expected:
        return False
    if "set" in expected:
        return set(map(_as_member, value["set"])) == set(map(_as_member, expected["set"]))
    one, other = ({_as_key(key): item for key, item in side["dict"]} for side in (value, expected))
    return one.keys() == other.keys() and all(is_same_value(one[key], other[key]) for key in other)


def _as_member(value: Any) -> Any:
    """An element of a set, equal and hashed as it was in the program: 1 is 1.0, and a tuple holds its parts."""
    if isinstance(value, list):
        return tuple(map(_as_member, value))
    if isinstance(value, dict):
        return frozenset(map(_as_member, value["set"])) if "set" in value else json.dumps(value)
    return value


def _as_key(key: Any) -> str:
    key = int(key) if isinstance(key, float) and key.is_integer() else key
    return key if isinstance(key, str) else json.dumps(key)


def _is_close(value: Any, expected: float, relative: float, absolute: float) -> bool:
    try:
        return math.isclose(value, expected, rel_tol=relative, abs_tol=absolute)
    except (OverflowError, TypeError):  # an integer beyond every float, or no number
        return False


def _read_assert(text: str) -> list[CodeTest]:
    """The tests of `assert ...` statements: the program gets E, and the literal stays here."""
    try:
        statements = ast.parse(text.strip()).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"the test {text!r:.200} is no Python: {error}") from error
    tests = []
    for statement in statements:
        if not isinstance(statement, ast.Assert):
            raise ValueError(f"the test {text!r:.200} has a statement that is no assert")
        test = statement.test
        parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        for part in parts:
            found = _read_condition(part)
            if found is None:
                raise ValueError(f"the verdict of the test {text!r:.200} cannot be taken outside; allowed: {_FORMS}")
            expression, accepts = found
            tests.append(
                CodeTest(_of_value(accepts), SPARE_BYTES + 4 * len(text), call={"expression": ast.unparse(expression)})
            )
    return tests


def _read_condition(test: ast.expr) -> tuple[ast.expr, Callable[[Any], bool]] | None:
    """(E, which of its values are right); None where the condition has another form."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return (test.operand, lambda value: not _truth(value)) if _is_call(test.operand) else None
    if isinstance(test, ast.Call):
        return _read_isclose(test) if _name(test).endswith("isclose") else (test, _truth) if _is_call(test) else None
    if not (isinstance(test, ast.Compare) and len(test.ops) == 1):
        return None
    operator, left, right = test.ops[0], test.left, test.comparators[0]
    if isinstance(operator, ast.Lt | ast.LtE):
        return _read_distance(left, right)
    if _literal(right) is None and isinstance(operator, ast.Eq | ast.NotEq):
        left, right = right, left
    wanted = _literal(right)
    if wanted is None or _literal(left) is not None:
        return None
    if isinstance(operator, ast.In) and isinstance(wanted[0], list):
        return left, lambda value: any(is_same_value(value, one) for one in wanted[0])
    if isinstance(operator, ast.Eq | ast.Is):
        return left, lambda value: is_same_value(value, wanted[0])
    if isinstance(operator, ast.NotEq | ast.IsNot):
        return left, lambda value: not is_same_value(value, wanted[0])
    return None


def _literal(node: ast.expr) -> tuple[Any] | None:
    """The value of a literal in the form of `plain`, in a tuple."""
    try:
        value = plain(ast.literal_eval(node))
    except (ValueError, TypeError, RecursionError):
        return None
    return None if '{"type": ' in json.dumps(value) else (value,)


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _is_call(node: ast.expr) -> bool:
    """A call of a function of the program: what a built-in makes of it would be decided inside."""
    return isinstance(node, ast.Call) and not hasattr(builtins, _name(node))


def _truth(value: Any) -> bool:
    return bool(next(iter(value.values()), None) if isinstance(value, dict) else value)


def _read_distance(left: ast.expr, right: ast.expr) -> tuple[ast.expr, Callable[[Any], bool]] | None:
    """abs(E - number) < number"""
    limit = _literal(right)
    if not (isinstance(left, ast.Call) and _name(left) == "abs" and len(left.args) == 1 and limit):
        return None
    inner = left.args[0]
    if not (isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub)):
        return None
    one, other = inner.left, inner.right
    expression, expected = (other, _literal(one)) if _literal(one) else (one, _literal(other))
    if expected is None or _literal(expression):
        return None
    return expression, lambda value: _is_close(value, expected[0], 0.0, limit[0])


def _read_isclose(test: ast.Call) -> tuple[ast.expr, Callable[[Any], bool]] | None:
    """math.isclose(E, number, rel_tol=..., abs_tol=...)"""
    limits = {word.arg: _literal(word.value) for word in test.keywords}
    if len(test.args) != 2 or not limits.keys() <= {"rel_tol", "abs_tol"} or None in limits.values():
        return None
    one, other = test.args
    expression, expected = (other, _literal(one)) if _literal(one) else (one, _literal(other))
    if expected is None or _literal(expression):
        return None
    relative, absolute = (limits.get("rel_tol") or (1e-9,))[0], (limits.get("abs_tol") or (0.0,))[0]
    return expression, lambda value: _is_close(value, expected[0], relative, absolute)
