"""A calculator tool. Its input is model text, so it is parsed into a syntax tree, never evaluated as code."""

import ast
import operator
from fractions import Fraction

from verl.tools.function_tool import function_tool

LONGEST = 100  # characters of an expression
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@function_tool(timeout=5.0)
def calculator(expression: str) -> str:
    """Calculate. What it cannot read is an error, which the policy gets as the reply.

    Args:
        expression: numbers with + - * / and parentheses
    """
    if not isinstance(expression, str) or len(expression) > LONGEST:
        raise ValueError(f"expression must be text of at most {LONGEST} characters")
    value = value_of(ast.parse(expression.strip(), mode="eval").body)
    return str(value) if value.denominator == 1 else f"{float(value):.6g}"


def value_of(node: ast.expr) -> Fraction:
    """The exact value of a parsed expression; ValueError for anything but numbers, + - * / and signs."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = value_of(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    raise ValueError("only numbers, + - * / and parentheses")
