"""How many parameters a function has: what belongs together travels together."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MOST = 8
BOUND = ("self", "cls", "ctx")  # ctx: of an autograd function
SET_BY_OTHERS = {  # signatures that others call, and kernels, which take numbers and pointers only
    "verl/models/attention/packed.py packed_attention": "transformers' attention interface",
    "verl/commands/certify/plain_gradient.py naive_attention": "transformers' attention interface",
    "verl/doors/core_algos.py compute_value_loss": "imported by published code",
    "verl/models/head/triton_kernels.py _accumulate": "a Triton kernel",
    "verl/models/head/triton_kernels.py _to_gradient": "a Triton kernel",
}


def crowded(text: str) -> list[tuple[str, int]]:
    """Functions of the source `text` with more than MOST parameters, and how many."""
    out = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(argument.arg not in BOUND for argument in arguments)
            out += [(node.name, count)] if count > MOST else []
    return out


def test_no_function_has_more_parameters_than_a_caller_can_keep_apart():
    found = {
        f"{path.relative_to(ROOT)} {name}": count
        for path in sorted((ROOT / "verl").rglob("*.py"))
        for name, count in crowded(path.read_text())
    }
    assert found.keys() == SET_BY_OTHERS.keys(), f"group some in a dataclass: {found}"


def test_every_kind_of_parameter_counts_except_the_bound_one():
    assert crowded("def f(self, a, /, b, c, d, e, g, h, *, i, j): ...") == [("f", 9)]
    assert crowded("class C:\n    async def f(self, a, b, c, d, e, g, h, i, *rest, **more): ...") == []
