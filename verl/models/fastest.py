"""Chooses the fastest of several ways to compute the same numbers, by a short measurement on this machine.

Ways differ by rounding, so a choice is made once: ranks of a machine take turns at its file, and a run stores its own
choices in its folder, where a resumed run finds them. Each file maps machine and shapes to the name of a way.
"""

import contextlib
import fcntl
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch

from verl.config.special_files import refuse_special
from verl.utils.errors import ConfigError
from verl.utils.paths import atomic_write_text

logger = logging.getLogger(__name__)

BUDGET_S = 0.25  # for one choice; a run makes at most three
ROUNDS, ENOUGH_ROUNDS = 15, 3
MIN_GAIN = 1.05  # the plain way is taken unless another is faster by this factor

# Each makes the function that is timed. The plain way comes first.
Ways = Mapping[str, Callable[[], Callable[[], object]]]

_run_file: Path | None = None


def keep_choices_in(folder: Path) -> None:
    """Make this process read the choices of a run from its folder, and write them there."""
    global _run_file
    _run_file = Path(folder) / "fastest.json"


def fastest(timing_key: str, ways: Ways) -> str:
    """The name of the fastest way; the first one unless another is clearly faster.

    `timing_key` is a text with everything that the speed depends on but the machine: shapes, dtypes.

    From the run's file, else the machine's, else measured; a measurement cut short counts for the run only. A file that
    cannot be used is reported and passed over.
    """
    if len(ways) == 1:
        return next(iter(ways))
    with _locked_if_possible(_machine_file()):
        return kept_choice(timing_key, ways, lambda: measure(ways))


def kept_choice(timing_key: str, ways: Collection[str], choose: Callable[[], tuple[str, bool]]) -> str:
    """`fastest` where `choose` measures, and says whether it is certain: for a process that nobody asks beside."""
    key, machine_file = " | ".join((machine(), timing_key)), _machine_file()
    known = [_read(file).get(key) for file in (_run_file, machine_file) if file is not None]
    choice, is_certain = next((way for way in known if way in ways), None), True
    if choice is None:
        choice, is_certain = choose()
    for file in (_run_file, machine_file if is_certain else None):
        if file is not None:
            _store(file, key, choice)
    return choice


def _machine_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verl" / "fastest.json"


def measure(ways: Ways) -> tuple[str, bool]:
    """The fastest way by its smallest time, in interleaved rounds; and whether there was time for enough of them.

    One thread, by its processor time: what else runs on the machine must not decide. The first round warms up; its
    times count only if there is no time for another.
    """
    deadline, num_rounds, num_threads = time.perf_counter() + BUDGET_S, 0, torch.get_num_threads()
    best = first = dict.fromkeys(ways, float("inf"))
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            functions = {name: make() for name, make in ways.items()}
            first = _round(functions)
            while num_rounds < ROUNDS and time.perf_counter() < deadline:
                best = {name: min(best[name], seconds) for name, seconds in _round(functions).items()}
                num_rounds += 1
    finally:
        torch.set_num_threads(num_threads)
    return pick(best if num_rounds else first), num_rounds >= ENOUGH_ROUNDS


def _round(functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Processor time in seconds of one call of each."""
    times = {}
    for name, function in functions.items():
        started = time.thread_time()
        function()
        times[name] = time.thread_time() - started
    return times


def pick(seconds: Mapping[str, float]) -> str:
    """The fastest; the first one, the plain way, unless the gain is clear."""
    plain, quickest = next(iter(seconds)), min(seconds, key=seconds.__getitem__)
    return quickest if seconds[plain] > MIN_GAIN * seconds[quickest] else plain


def machine() -> str:
    """Processor, torch and threads: what a choice holds for."""
    made = ", ".join(processor().values())
    return f"{made}, torch {torch.__version__}, {torch.get_num_threads()} threads"


def processor() -> dict[str, str]:
    """Vendor, name, family and model of the processor as far as the system reports them, and torch's instructions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    reported = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    names = {"vendor": "vendor_id", "name": "model name", "family": "cpu family", "model": "model"}
    found = {ours: reported[theirs] for ours, theirs in names.items() if theirs in reported}
    found.setdefault("name", platform.processor() or platform.machine())
    return found | {"instructions": torch.backends.cpu.get_cpu_capability()}


@contextlib.contextmanager
def _locked_if_possible(file: Path) -> Iterator[None]:
    """Processes take turns; without a lock where the folder cannot be written."""
    with contextlib.ExitStack() as stack:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(refuse_special(file.with_suffix(".lock"), "a lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except (OSError, ConfigError) as error:
            logger.warning("%s cannot be locked (%s): ranks may choose different kernels", file, error)
        yield


def _read(file: Path) -> dict[str, str]:
    try:
        content = json.loads(refuse_special(file, "chosen kernels").read_text())
        return {key: way for key, way in content.items() if isinstance(way, str)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, RecursionError, ConfigError) as error:
        logger.warning("%s cannot be read (%s): kernels are measured anew", file, error)
        return {}


def _store(file: Path, key: str, choice: str) -> None:
    content = _read(file)
    if content.get(key) == choice:
        return
    try:
        atomic_write_text(file, json.dumps({**content, key: choice}, indent=1) + "\n")
    except OSError as error:
        logger.warning("%s cannot be written (%s): kernels are measured again at the next start", file, error)
