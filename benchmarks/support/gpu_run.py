"""What every part of `gpu.py` is given: the device, the sizes to use, a place for results, and the time left."""

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from support.gpu_lines import tell


class Skipped(Exception):
    """A measurement that cannot be made here; the text says why."""


@dataclass
class Run:
    """One part that runs. Results leave the process as they are added, so that a part cut short keeps them."""

    part: str
    device: torch.device
    tiny: bool  # shapes for a CPU
    limit_s: float
    results: dict[str, dict[str, Any]] = field(default_factory=dict)  # of all parts so far
    started: float = field(default_factory=time.monotonic)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def left(self) -> float:
        """Seconds until the part is cut."""
        return self.limit_s - (time.monotonic() - self.started)

    def add(self, name: str, value: Any) -> None:
        self.results.setdefault(self.part, {})[name] = value
        tell({"part": self.part, "name": name, "value": value})
        print(f"  {self.part}: {name}: {short(value)}", flush=True)

    def attempt(self, name: str, measure: Callable[[], Any], seconds: float = 0.0) -> Any:
        """Add what `measure` returns; why not, if it raises or if fewer than `seconds` are left. None then."""
        if self.left() < seconds:
            self.add(name, {"skipped": f"{seconds:.0f} s are needed, {self.left():.0f} s are left"})
            return None
        try:
            value = measure()
        except Skipped as reason:
            self.add(name, {"skipped": str(reason)})
            return None
        except Exception as error:
            if is_fatal(error):
                raise
            self.add(name, {"error": f"{type(error).__name__}: {str(error)[:600]}"})
            return None
        finally:
            self.free()
        self.add(name, value)
        return value

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # after a fatal error every call raises
                torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], repeats: int, warm: int = 1) -> float:
        """Median seconds of a call that is waited for."""
        samples = []
        for number in range(warm + repeats):
            self.synchronize()
            started = time.perf_counter()
            work()
            self.synchronize()
            if number >= warm:
                samples.append(time.perf_counter() - started)
        return statistics.median(samples)

    def ceiling(self, name: str) -> float:
        """`bytes_per_s` or `flops`, as the part `ceilings` measured them on this device."""
        value = self.results.get("ceilings", {}).get(name)
        if value is None:
            raise Skipped(f"shares need the part ceilings, which has no {name} yet")
        return float(value)


def short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(rounded(value))[:400]


def rounded(value: Any) -> Any:
    """`value` with every float in it at four digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


def is_fatal(error: BaseException) -> bool:
    """Whether the process can no longer use the device."""
    text = str(error)
    return not isinstance(error, torch.OutOfMemoryError) and ("CUDA error" in text or "illegal memory" in text)


def ceilings(run: Run) -> None:
    """The card, and what it reaches: bytes a second of a copy (read and written), FLOP/s of a large product."""
    run.add("device", torch.cuda.get_device_name() if run.device.type == "cuda" else "cpu")
    run.add("versions", {"torch": torch.__version__, "cuda": torch.version.cuda, **_versions()})
    source = torch.ones((1 << 16 if run.tiny else 1 << 32) // 4, device=run.device)
    target = torch.empty_like(source)
    seconds = run.seconds(partial(target.copy_, source), 10, warm=2)
    run.add("bytes_per_s", 2 * source.nbytes / seconds)
    del source, target
    size = 128 if run.tiny else 8192
    a = torch.randn(size, size, device=run.device, dtype=run.dtype)
    seconds = run.seconds(lambda: a @ a, 20, warm=3)
    run.add("flops", 2 * size**3 / seconds)


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("triton", "transformers", "liger-kernel", "trl"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
