"""The head (log-prob and entropy, forward and backward) against the eager logits path: time and peak extra memory.

    python benchmarks/head.py                       # V=152k, d=896 and 128, float32
    python benchmarks/head.py --dtype bfloat16 --tokens 1024 --json benchmarks/results/head.json

Times are medians of rounds in this process, interleaved except for eager, and ratios are medians over the rounds. The
necessary products of a path are timed in the same rounds in two forms: as calls on whole matrices, which return new
tensors as in autograd, and as products of blocks into memory that is already mapped, with the fastest width and order.
Memory is the peak of a fresh process per case, minus its memory before the case and minus the gradients of weight and
hidden states.
Shapes: T tokens, V vocabulary, D hidden.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.record import save
from torch import Tensor

from verl.models.head.token_outputs import OutputHead, token_logprobs, token_loss_one_pass

PATHS = ("eager", "chunked", "one pass")
STORED_LOGITS = "one pass, logits kept"
PRODUCTS = ("logits", "hidden gradient", "weight gradient")
FORWARD = "logits of a forward"
WIDTHS = (512, 2048, 8192)  # columns of a block in the products
ORDERS = ("rows", "columns")  # row-major or column-major blocks of logits
CASE_KEYS = ("d", "tokens", "entropy", "path")


class Case:
    """One shape with random inputs; `run(path)` is a forward and backward that leaves gradients behind."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_tokens: int,
        with_entropy: bool,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ):
        device = device or torch.device("cpu")
        generator, at = torch.Generator(device).manual_seed(0), dict[str, Any](device=device)
        total = num_tokens + 1  # the first token has no prefix
        self.hidden_TD = torch.randn(total, hidden_size, generator=generator, **at).to(dtype).requires_grad_()
        weight_VD = torch.empty(vocab_size, hidden_size, dtype=dtype, **at)
        weight_VD.normal_(0, hidden_size**-0.5, generator=generator)
        self.weight_VD = weight_VD.requires_grad_()
        self.where = (
            torch.randint(vocab_size, (total,), generator=generator, **at),
            torch.tensor([0, total], **at),
            torch.ones(total, dtype=torch.bool, **at),
        )
        self.columns = {"w": torch.rand(total, generator=generator, **at) / num_tokens}
        self.with_entropy = with_entropy

    def loss(self, outputs: dict[str, Tensor], columns: dict[str, Tensor], _: None = None):
        losses = -columns["w"] * outputs["logprobs"]
        if self.with_entropy:
            losses = losses - 0.01 * columns["w"] * outputs["entropy"]
        return losses, {}

    def run(self, path: str, chunk_size: int | None = None, kernels: str = "torch") -> None:
        self.hidden_TD.grad = self.weight_VD.grad = None
        mode = "chunked" if path == "one pass" else path
        inputs = (self.hidden_TD, *self.where, OutputHead(self.weight_VD, 1.0, None, mode, kernels, chunk_size))
        if path == "one pass":
            total = token_loss_one_pass(*inputs, self.loss, self.columns, self.with_entropy)[0]
        else:
            total = self.loss(token_logprobs(*inputs, self.with_entropy), self.columns)[0].sum()
        total.backward()

    @torch.no_grad()
    def forward(self) -> None:
        token_logprobs(self.hidden_TD, *self.where, OutputHead(self.weight_VD), self.with_entropy)

    @torch.no_grad()
    def product(self, name: str, width: int, order: str) -> None:
        """One product of forward and backward, over the whole vocabulary, into memory that is already mapped."""
        if not hasattr(self, "grads"):
            self.grads = torch.zeros_like(self.hidden_TD[1:]), torch.zeros_like(self.weight_VD)
            self.blocks = {w: torch.randn(w * len(self.grads[0])).to(self.weight_VD.dtype) for w in WIDTHS}
        hidden_TD = self.hidden_TD[1:]
        for weight_CD, grad_CD in zip(self.weight_VD.split(width), self.grads[1].split(width), strict=True):
            shape = (len(hidden_TD), len(weight_CD)) if order == "rows" else (len(weight_CD), len(hidden_TD))
            block = self.blocks[width][: shape[0] * shape[1]].view(shape)
            logits = block if order == "rows" else block.T
            if name == "logits" and order == "rows":
                torch.mm(hidden_TD, weight_CD.T, out=block)
            elif name == "logits":
                torch.mm(weight_CD, hidden_TD.T, out=block)
            elif name == "hidden gradient":
                torch.mm(logits, weight_CD, out=self.grads[0])
            else:
                torch.mm(logits.T, hidden_TD, out=grad_CD)

    @torch.no_grad()
    def plain_product(self, name: str) -> None:
        """The same product as one call on whole matrices; the result is a new tensor."""
        hidden_TD = self.hidden_TD[1:]
        if not hasattr(self, "logits"):
            self.logits = hidden_TD @ self.weight_VD.T
        if name == "logits":
            hidden_TD @ self.weight_VD.T
        elif name == "hidden gradient":
            self.logits @ self.weight_VD
        else:
            self.logits.T @ hidden_TD


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def fastest(case: Case) -> tuple[tuple[int, str], tuple[int, str]]:
    """The (width, order) of blocks with the least time for the logits alone, and for all products together."""
    forms = [(width, order) for order in ORDERS for width in WIDTHS]
    case.product(PRODUCTS[0], *forms[0])  # allocates the memory
    taken = {form: [seconds(partial(case.product, name, *form)) for name in PRODUCTS] for form in forms}
    return min(forms, key=lambda form: taken[form][0]), min(forms, key=lambda form: sum(taken[form]))


def time_case(case: Case, rounds: int, stored_rows: int) -> dict[str, list[float]]:
    """Seconds of each path, of the forward alone, and of the products, round by round; the first warms up.

    Eager runs after the others: the system needs the same cores for seconds to reclaim the gigabytes that eager frees.
    """
    works: dict[str, Callable[[], None]] = {path: partial(case.run, path) for path in PATHS[1:]}
    works[STORED_LOGITS] = lambda: case.run("one pass", stored_rows)
    works["forward"] = case.forward
    alone, together = fastest(case)
    works[FORWARD] = lambda: case.product("logits", *alone)
    works |= {product: partial(case.product, product, *together) for product in PRODUCTS}
    works |= {f"plain {product}": partial(case.plain_product, product) for product in PRODUCTS}
    samples: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            samples[name].append(seconds(work))
    samples["eager"] = [seconds(partial(case.run, "eager")) for _ in range(rounds + 1)]
    return {name: values[1:] for name, values in samples.items()}


def logit_products(path: str, tokens: int, hidden_size: int) -> float:
    """How often a path multiplies hidden states by the weight. One pass stores the logits of its first rows only."""
    stored_share = {"eager": 1.0, "chunked": 0.0, "one pass": min(tokens, hidden_size) / tokens, STORED_LOGITS: 1.0}
    return 1.0 if path == "forward" else 2.0 - stored_share[path]


def ratios(path: str, samples: dict[str, list[float]], tokens: int, hidden_size: int) -> dict[str, float]:
    """Median seconds of a path, and ratios to eager and to its necessary products in the same rounds."""
    count = logit_products(path, tokens, hidden_size)
    others = PRODUCTS[1:] if path != "forward" else ()
    out = {"seconds": statistics.median(samples[path]), "products": count + len(others)}
    for kind in ("plain ", ""):
        logits = samples[FORWARD if path == "forward" and not kind else kind + "logits"]
        parts = [[count * x for x in logits], *(samples[kind + other] for other in others)]
        needed = [sum(part) for part in zip(*parts, strict=True)]
        name = "x plain products" if kind else "x fastest products"
        out[name] = statistics.median(a / b for a, b in zip(samples[path], needed, strict=True))
    if path != "forward":
        out["x eager"] = out["seconds"] / statistics.median(samples["eager"])
    return out


def peak_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak() -> None:
    """Reset the peak to the present memory, where the system can; elsewhere the inputs determine the peak so far."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def measure_memory(case: Case, path: str, chunk_size: int | None) -> float:
    """Megabytes above inputs and gradients, in this process, for one forward and backward."""
    Case(64, 16, 8, case.with_entropy, case.weight_VD.dtype).run(path)  # load code, start threads
    reset_peak()
    before = peak_bytes()
    case.run(path, chunk_size)
    gradients = case.hidden_TD.nbytes + case.weight_VD.nbytes
    return (peak_bytes() - before - gradients) / 1e6


def memory_in_new_process(args: argparse.Namespace, path: str, hidden_size: int, tokens: int, chunk: int) -> float:
    command = [sys.executable, __file__, "--measure", path, "--hidden", str(hidden_size), "--tokens", str(tokens)]
    command += ["--vocab", str(args.vocab), "--dtype", args.dtype, "--threads", str(args.threads)]
    command += ["--stored-rows", str(chunk)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def print_times(args: argparse.Namespace) -> list[dict[str, Any]]:
    print(f"\nforward + backward, {args.dtype}, V={args.vocab}, {args.threads} threads, median of {args.rounds} rounds")
    print(
        f"logits kept: one pass with stored logits of {args.stored_rows} rows. Products: matmuls of the logits' size\n"
    )
    print("| d | tokens | entropy | path | seconds | x eager | products | x plain products | x fastest products |")
    print("|--:|--:|---|---|--:|--:|--:|--:|--:|")
    figures = []
    for hidden_size in args.hidden:
        for tokens in args.time_tokens:
            for entropy in args.entropy:
                case = Case(args.vocab, hidden_size, tokens, bool(entropy), getattr(torch, args.dtype))
                samples = time_case(case, args.rounds, args.stored_rows)
                for path in (*PATHS, STORED_LOGITS, "forward"):
                    result = ratios(path, samples, tokens, hidden_size)
                    case_values = {"d": hidden_size, "tokens": tokens, "entropy": bool(entropy), "path": path}
                    figures.append(case_values | {name: round(value, 4) for name, value in result.items()})
                    eager = f"{result['x eager']:.2f}" if "x eager" in result else ""
                    row: tuple[Any, ...] = (
                        hidden_size,
                        tokens,
                        "yes" if entropy else "no",
                        path,
                        f"{result['seconds']:.3f}",
                        eager,
                    )
                    row += tuple(f"{result[x]:.2f}" for x in ("products", "x plain products", "x fastest products"))
                    print("|", " | ".join(map(str, row)), "|", flush=True)
                del case
    return figures


def print_memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    print(f"\npeak extra memory, forward + backward of log-prob and entropy, {args.dtype}, MB (gradients excluded)\n")
    print("| d | tokens | " + " | ".join((*PATHS, STORED_LOGITS)) + " |\n|--:|--:|--:|--:|--:|--:|")
    figures = []
    for hidden_size in args.hidden:
        for tokens in args.tokens:
            row: dict[str, Any] = {"d": hidden_size, "tokens": tokens}
            paths = [*((path, path, 0) for path in PATHS), (STORED_LOGITS, "one pass", args.stored_rows)]
            for name, path, chunk in paths:
                skip = path == "eager" and tokens > args.eager_tokens
                row[name] = None if skip else round(memory_in_new_process(args, path, hidden_size, tokens, chunk), 1)
            figures.append(row)
            print("| " + " | ".join("-" if value is None else str(value) for value in row.values()) + " |", flush=True)
    return figures


def merged(path: Path, name: str, figures: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The contents of the file with these figures in place of earlier ones of the same cases."""
    content = json.loads(path.read_text())["head"] if path.exists() else {}
    for kind, rows in figures.items():
        earlier = content.setdefault(name, {}).get(kind, [])
        cases = [[row.get(key) for key in CASE_KEYS] for row in rows]
        content[name][kind] = [row for row in earlier if [row.get(key) for key in CASE_KEYS] not in cases] + rows
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, nargs="+", default=[896, 128])
    parser.add_argument("--tokens", type=int, nargs="*", default=[256, 1024, 4096], help="for memory")
    parser.add_argument("--time-tokens", type=int, nargs="*", default=[256, 1024])
    parser.add_argument(
        "--eager-tokens", type=int, default=1024, help="largest number of tokens for eager memory (3 MB each)"
    )
    parser.add_argument("--entropy", type=int, nargs="+", choices=(0, 1), default=[0, 1], help="time without, with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--stored-rows", type=int, default=256)
    parser.add_argument("--json", type=Path, help="write the figures here; other cases in the file stay")
    parser.add_argument("--measure", choices=PATHS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure:
        case = Case(args.vocab, args.hidden[0], args.tokens[0], True, getattr(torch, args.dtype))
        print(measure_memory(case, args.measure, args.stored_rows or None))
        return
    figures = {"memory_mb": print_memory(args), "times": print_times(args)}
    if args.json is not None:
        save(args.json, {"head": merged(args.json, f"{args.dtype}, V={args.vocab}", figures)})


if __name__ == "__main__":
    main()
