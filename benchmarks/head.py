"""The head (log-prob and entropy, forward and backward) against the eager logits path: time and peak extra memory.

    python benchmarks/head.py                       # V=152k, d=896 and 128, float32
    python benchmarks/head.py --dtype bfloat16 --tokens 1024

Times are medians of interleaved rounds in this process. Memory is the high-water mark of a fresh process per case, less
what it held before and less the gradients of weight and hidden states. Shapes: T tokens, V vocabulary, D hidden.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from verl.models.heads import token_logprobs, token_loss_one_pass

PATHS = ("eager", "chunked", "one pass")
MATMUL_COLUMNS = 16384


class Case:
    """One shape with random inputs; `run(path)` is a forward and backward that leaves gradients behind."""

    def __init__(self, vocab_size: int, hidden_size: int, num_tokens: int, with_entropy: bool, dtype: torch.dtype):
        generator = torch.Generator().manual_seed(0)
        total = num_tokens + 1  # the first token has nothing before it
        self.hidden_TD = torch.randn(total, hidden_size, generator=generator).to(dtype).requires_grad_()
        weight_VD = torch.empty(vocab_size, hidden_size, dtype=dtype).normal_(0, hidden_size**-0.5, generator=generator)
        self.weight_VD = weight_VD.requires_grad_()
        self.where = (
            torch.randint(vocab_size, (total,), generator=generator),
            torch.tensor([0, total]),
            torch.ones(total, dtype=torch.bool),
        )
        self.columns = {"w": torch.rand(total, generator=generator) / num_tokens}
        self.with_entropy = with_entropy

    def loss(self, outputs: dict[str, Tensor], columns: dict[str, Tensor], _: None = None):
        losses = -columns["w"] * outputs["logprobs"]
        if self.with_entropy:
            losses = losses - 0.01 * columns["w"] * outputs["entropy"]
        return losses, {}

    def run(self, path: str, chunk_size: int | None = None) -> None:
        self.hidden_TD.grad = self.weight_VD.grad = None
        inputs = (self.hidden_TD, self.weight_VD, *self.where)
        options = {"chunk_size": chunk_size, "with_entropy": self.with_entropy}
        if path == "one pass":
            total = token_loss_one_pass(*inputs, self.loss, self.columns, **options)[0]
        else:
            total = self.loss(token_logprobs(*inputs, mode=path, **options), self.columns)[0].sum()
        total.backward()

    @torch.no_grad()
    def forward(self) -> None:
        token_logprobs(self.hidden_TD, self.weight_VD, *self.where, with_entropy=self.with_entropy)

    @torch.no_grad()
    def matmul(self) -> None:
        """Part of hidden @ weight.T into memory that is already there."""
        if not hasattr(self, "product"):
            self.product = torch.empty(
                min(1024, len(self.columns["w"])), MATMUL_COLUMNS // 4, dtype=self.weight_VD.dtype
            )
        rows_RD = self.hidden_TD[: self.product.shape[0]]
        for start in range(0, MATMUL_COLUMNS, self.product.shape[1]):
            torch.mm(rows_RD, self.weight_VD[start : start + self.product.shape[1]].T, out=self.product)

    def matmul_scale(self) -> float:
        """Times `matmul` gives one whole (T, D) @ (D, V)."""
        vocab_size, num_tokens = self.weight_VD.shape[0], len(self.columns["w"]) - 1
        return vocab_size / MATMUL_COLUMNS * num_tokens / self.product.shape[0]


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def time_case(case: Case, rounds: int, kept_rows: int) -> dict[str, float]:
    """Median seconds of each path, of the forward alone, and of one matmul; the first round warms up."""
    works: dict[str, Callable[[], None]] = {path: lambda path=path: case.run(path) for path in PATHS}
    works["one pass, logits kept"] = lambda: case.run("one pass", kept_rows)
    works["forward"] = case.forward
    works["matmul"] = case.matmul
    samples: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            samples[name].append(seconds(work))
    medians = {name: statistics.median(values[1:]) for name, values in samples.items()}
    return medians | {"matmul": medians["matmul"] * case.matmul_scale()}


def peak_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak() -> None:
    """Peak := now, where the system can; elsewhere the inputs made last are the peak so far."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def measure_memory(case: Case, path: str, chunk_size: int | None) -> float:
    """Megabytes above inputs and gradients, in this process, for one forward and backward."""
    Case(64, 16, 8, case.with_entropy, case.weight_VD.dtype).run(path)  # load code, start threads
    reset_peak()
    before = peak_bytes()
    case.run(path, chunk_size)
    gradients = sum(t.grad.numel() * t.grad.element_size() for t in (case.hidden_TD, case.weight_VD))
    return (peak_bytes() - before - gradients) / 1e6


def memory_in_new_process(args: argparse.Namespace, path: str, hidden_size: int, tokens: int, chunk: int) -> float:
    command = [sys.executable, __file__, "--measure", path, "--hidden", str(hidden_size), "--tokens", str(tokens)]
    command += ["--vocab", str(args.vocab), "--dtype", args.dtype, "--threads", str(args.threads)]
    command += ["--kept-rows", str(chunk)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def print_times(args: argparse.Namespace) -> None:
    print(f"\nforward + backward, {args.dtype}, V={args.vocab}, {args.threads} threads, median of {args.rounds} rounds")
    print(
        f"kept: one pass with whole logits of {args.kept_rows} rows; matmuls: 1 for the forward alone, 4 recomputing,"
    )
    print("3 with kept logits, at the rate of a plain matmul in the same rounds\n")
    print("| d | tokens | entropy | path | seconds | x eager | x its matmuls |\n|--:|--:|---|---|--:|--:|--:|")
    matmuls = {"eager": 3, "chunked": 4, "one pass": 4, "one pass, logits kept": 3, "forward": 1}
    for hidden_size in args.hidden:
        for tokens in args.time_tokens:
            for entropy in (False, True):
                case = Case(args.vocab, hidden_size, tokens, entropy, getattr(torch, args.dtype))
                medians = time_case(case, args.rounds, args.kept_rows)
                for name, count in matmuls.items():
                    taken, eager, ideal = medians[name], medians["eager"], count * medians["matmul"]
                    ratio = "" if name == "forward" else f"{taken / eager:.2f}"
                    row = (hidden_size, tokens, "yes" if entropy else "no", name, f"{taken:.3f}", ratio)
                    print("|", " | ".join(map(str, row)), f"| {taken / ideal:.2f} |", flush=True)
                del case


def print_memory(args: argparse.Namespace) -> None:
    print(f"\npeak extra memory, forward + backward of log-prob and entropy, {args.dtype}, MB (gradients excluded)\n")
    print("| d | tokens | " + " | ".join((*PATHS, "one pass, logits kept")) + " |\n|--:|--:|--:|--:|--:|--:|")
    for hidden_size in args.hidden:
        for tokens in args.tokens:
            cells = []
            for path, chunk in [*((path, 0) for path in PATHS), ("one pass", args.kept_rows)]:
                skip = path == "eager" and tokens > args.eager_tokens
                cells.append("-" if skip else f"{memory_in_new_process(args, path, hidden_size, tokens, chunk):.1f}")
            print(f"| {hidden_size} | {tokens} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, nargs="+", default=[896, 128])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096], help="for memory")
    parser.add_argument("--time-tokens", type=int, nargs="+", default=[256, 1024])
    parser.add_argument(
        "--eager-tokens", type=int, default=1024, help="eager memory is measured up to this (3 MB each)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--kept-rows", type=int, default=256)
    parser.add_argument("--measure", choices=PATHS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.measure:
        case = Case(args.vocab, args.hidden[0], args.tokens[0], True, getattr(torch, args.dtype))
        print(measure_memory(case, args.measure, args.kept_rows or None))
        return
    print_memory(args)
    print_times(args)


if __name__ == "__main__":
    main()
