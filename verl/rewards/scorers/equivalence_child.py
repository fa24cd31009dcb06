"""The process that compares two formulas: JSON lines in, JSON lines out. Started by `equivalence_pool`.

    {"gold": "x^2-1", "answer": "(x-1)(x+1)"}  ->  {"equal": true}

`equal` is null where memory or the depth of a formula ended the comparison. The text is parsed by a grammar
(latex2sympy2_extended) and never evaluated as Python. This file imports nothing of verl, so that it starts quickly.
"""

import json
import os
import resource
import signal
import sys

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
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no reply
    try:
        compare = load_comparison()
    except ImportError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=replies, flush=True)
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(LAST_RESORT_S)  # its default action ends the process
        equal = compare(request["gold"], request["answer"])
        signal.alarm(0)
        print(json.dumps({"equal": equal}), file=replies, flush=True)


def load_comparison():
    """The function (gold, answer) -> True, False or None, warmed up; ImportError without math-verify."""
    import logging

    from latex2sympy2_extended import latex2sympy
    from math_verify import verify
    from sympy.core import random
    from sympy.core.cache import clear_cache

    logging.disable()
    num_compared = 0

    def parse(text):
        return latex2sympy(text, is_real=True, normalization_config=None)

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
