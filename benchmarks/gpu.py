"""One GPU: what it reaches, whether it computes the right numbers, and where decoding and training stand against it.

    python benchmarks/gpu.py [--json FILE] [--parts decode,update] [--skip done] [--seconds 520] [--device cpu]

Each part has a limit of its own: one that is over it is cut, and the next goes on. Results are written after each
measurement, under the part's name; `--skip done` leaves out the parts that an earlier run of the same file completed.
Weights are random. Without a GPU the same measurements run in tiny shapes, so that nothing but the speed is left to
try on one.

The parts run in one process that this one watches; it is started again after a part that was cut or broke the device.
"""

import argparse
import datetime
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from support.gpu_lines import parse, tell

HERE = Path(__file__).resolve().parent
START_S = 90  # imports and the first use of the device
# name: (limit in seconds, module, function)
PARTS = {
    "ceilings": (15, "support.gpu_run", "ceilings"),
    "correctness": (60, "support.gpu_checks", "correctness"),
    "profile": (25, "support.gpu_decode", "profile"),
    "decode": (90, "support.gpu_decode", "decode"),
    "rollout": (55, "support.gpu_decode", "rollout"),
    "update": (130, "support.gpu_update", "update"),
    "head": (25, "support.gpu_update", "head"),
    "one_gpu": (60, "support.gpu_peers", "one_gpu"),
    "peers": (80, "support.gpu_peers", "peers"),
}
DONE, FAILED, CUT, NOT_REACHED = "done", "failed", "cut", "not reached"


@dataclass
class Results:
    """The file of results: {part: {"status", "seconds", "results"}}, whole at any moment."""

    path: Path
    parts: dict[str, dict[str, Any]]

    @classmethod
    def at(cls, path: Path) -> "Results":
        return cls(path, json.loads(path.read_text())["parts"] if path.exists() else {})

    def done(self) -> list[str]:
        return [name for name, part in self.parts.items() if part.get("status") == DONE]

    def begin(self, name: str) -> None:
        self.parts[name] = {"status": "running", "date": datetime.datetime.now().isoformat(" ", "minutes")}
        self.parts[name]["results"] = {}

    def end(self, name: str, status: str, seconds: float = 0.0, error: str = "") -> None:
        part = self.parts.setdefault(name, {"results": {}})
        part |= {"status": status, "seconds": round(seconds, 1)} | ({"error": error} if error else {})
        self.write()
        print(f"== {name}: {status} after {seconds:.1f} s {error.strip().splitlines()[-1:] or ''}", flush=True)

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        half = self.path.with_name(self.path.name + ".tmp")
        half.write_text(json.dumps({"parts": self.parts}, indent=1) + "\n")
        half.replace(self.path)


class Worker:
    """The process that runs parts, with its lines as they come."""

    def __init__(self, names: list[str], device: str, path: Path):
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--parts", ",".join(names)]
        paths = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        self.process = subprocess.Popen(
            [*command, "--device", device, "--json", str(path)],
            stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        )  # fmt: skip
        self.lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def end(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self.process.wait()


def watch(names: list[str], device: str, results: Results, deadline: float) -> list[str]:
    """Run parts in one worker; returns the ones that are left when it had to end."""
    left, current, started, limit = list(names), "", time.monotonic(), float(START_S)
    worker = Worker(names, device, results.path)
    try:
        while left:
            remaining = min(started + limit, deadline) - time.monotonic()
            try:
                line = worker.lines.get(timeout=max(0.0, remaining))
            except queue.Empty:
                name = current or left[0]
                limit = min(limit, deadline - started)
                why = f"it was cut after {limit:.0f} s"
                results.end(name, CUT if current else FAILED, time.monotonic() - started, why)
                return left[1:]
            if line is None:
                name = current or left[0]
                code = worker.process.wait()
                results.end(name, FAILED, time.monotonic() - started, f"the process ended with {code}")
                return left[1:]
            message = parse(line)
            if message is None:
                print(line, end="", flush=True)
            elif message.get("event") == "begin":
                current, started, limit = message["part"], time.monotonic(), float(PARTS[message["part"]][0])
                results.begin(current)
                print(f"== {current}: at most {limit:.0f} s", flush=True)
            elif message.get("event") == "end":
                results.end(current, message["status"], time.monotonic() - started, message.get("error", ""))
                left, current = left[1:], ""
                started, limit = time.monotonic(), float(START_S)
                if message.get("fatal"):
                    return left
            else:
                results.parts[message["part"]]["results"][message["name"]] = message["value"]
                results.write()
    finally:
        worker.end()
    return left


def work(names: Iterable[str], device: str, path: Path) -> None:
    """Run parts in this process and tell the one that watches."""
    import torch
    from support.gpu_run import Run, is_fatal

    earlier = {name: part["results"] for name, part in Results.at(path).parts.items()}
    for name in names:
        limit, module, function = PARTS[name]
        tell({"event": "begin", "part": name})
        run = Run(name, torch.device(device), device == "cpu", limit, earlier)
        try:
            getattr(import_module(module), function)(run)
        except BaseException as error:
            traceback.print_exc()
            fatal = is_fatal(error)
            tell({"event": "end", "status": FAILED, "error": traceback.format_exc()[-3000:], "fatal": fatal})
            if fatal or not isinstance(error, Exception | SystemExit):
                return
        else:
            tell({"event": "end", "status": DONE})
        run.free()


def found_device() -> str:
    """ "cuda" if this machine has a GPU that torch can use. Asked in another process: this one stays small."""
    code = "import torch; print(torch.cuda.is_available())"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return "cuda" if asked.stdout.strip() == "True" else "cpu"


def chosen(parts: str, skip: str, results: Results) -> list[str]:
    """The parts to run, in the order of `PARTS`."""
    wanted = parts.split(",") if parts else list(PARTS)
    left_out = set(results.done()) if skip == "done" else set(filter(None, skip.split(",")))
    if unknown := sorted({*wanted, *left_out} - set(PARTS)):
        raise SystemExit(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    return [name for name in PARTS if name in wanted and name not in left_out]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=HERE / "results" / "gpu.json", help="the file of results")
    parser.add_argument("--parts", default="", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--skip", default="", help="parts to leave out, or: done")
    parser.add_argument("--seconds", type=float, default=520, help="of all parts together")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch finds one")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.worker:
        work(args.parts.split(","), args.device, args.json)
        return
    deadline = time.monotonic() + args.seconds
    results, device = Results.at(args.json), args.device or found_device()
    left = chosen(args.parts, args.skip, results)
    print(f"{device}: {', '.join(left)}", flush=True)
    while left and time.monotonic() < deadline:
        left = watch(left, device, results, deadline)
    for name in left:
        results.end(name, NOT_REACHED)


if __name__ == "__main__":
    main()
