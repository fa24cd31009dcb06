"""The process that compares two formulas: frames of JSON in and out. Started by `equivalence_pool`.

    {"gold": "x^2-1", "answer": "(x-1)(x+1)"}  ->  {"equal": true}

`equal` is null where memory or the depth of a formula ended the comparison. The text is parsed by a grammar
(latex2sympy2_extended) and never evaluated as Python. This file imports nothing of verl, so that it starts quickly.
"""

import contextlib
import json
import resource
import signal
import sys
from multiprocessing.connection import Connection

MEMORY_BYTES = 1 << 30
LAST_RESORT_S = 30  # a child whose parent is gone ends itself
FLOAT_DIGITS = 12  # decimals that must agree where one side is a decimal number
PRECISION = 40  # digits in which two formulas without variables are computed
CLEAR_EVERY = 500  # comparisons; sympy keeps results for ever otherwise
WARM_UP = (  # the first use of a rule of the grammar takes a hundred times as long as later ones
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    ("(x+1)^{2}", "x^{2}+2x+1"),
    (r"y=2x-\frac{3}{4}\pi", "4y-8x=-3"),
    (r"(-\infty,3)\cup[5,7)", r"\sin(x)<3"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&x\\3&4\end{pmatrix}"),
    (r"2^{10}-\log_{2}8", r"1.5\times10^{3}"),
)


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    try:
        compare = load_comparison()
    except ImportError as error:
        connection.send_bytes(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    connection.send_bytes(b'{"ready": true}')
    with contextlib.suppress(EOFError):
        while True:
            request = json.loads(connection.recv_bytes())
            signal.alarm(LAST_RESORT_S)  # its default action ends the process
            equal = compare(request["gold"], request["answer"])
            signal.alarm(0)
            connection.send_bytes(json.dumps({"equal": equal}).encode())


def load_comparison():
    """The function (gold, answer) -> True, False or None, warmed up; ImportError without math-verify."""
    import logging

    from latex2sympy2_extended import latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify import verify
    from sympy.core import random
    from sympy.core.cache import clear_cache

    logging.disable()
    case_counts = ConversionConfig(lowercase_symbols=False)
    num_compared = 0

    def parse(text):
        return latex2sympy(text, is_real=True, normalization_config=None, conversion_config=case_counts)

    def compare(gold, answer):
        nonlocal num_compared
        num_compared += 1
        if num_compared % CLEAR_EVERY == 0:
            clear_cache()
        random.seed(0)  # sympy tries formulas at random points
        try:
            return bool(
                verify(
                    parse(gold), parse(answer), float_rounding=FLOAT_DIGITS, numeric_precision=PRECISION,
                    allow_set_relation_comp=True, timeout_seconds=None, raise_on_error=True,
                )
            )  # fmt: skip
        except (MemoryError, RecursionError):
            return None
        except Exception:  # the parser has no common error: what it cannot read equals nothing
            return False

    for gold, answer in WARM_UP:
        compare(gold, answer)
    return compare


if __name__ == "__main__":
    main()
