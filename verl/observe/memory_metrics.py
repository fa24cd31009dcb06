"""Memory metrics of this process and, from numbers the platform reports, of its device."""

import os
from pathlib import Path
from typing import NamedTuple

GIB = 1024**3


def memory_metrics(
    max_allocated_bytes: int = 0, max_reserved_bytes: int = 0, device_bytes: int = 0
) -> dict[str, float]:
    """perf/cpu_memory_used_gb, perf/cpu_max_memory_used_gb, and if they are known the peaks of this process on the
    device, and what all processes use of it."""
    resident = resident_memory_bytes()
    out = {"perf/cpu_memory_used_gb": resident.current / GIB, "perf/cpu_max_memory_used_gb": resident.peak / GIB}
    if max_reserved_bytes or max_allocated_bytes:
        out["perf/max_memory_allocated_gb"] = max_allocated_bytes / GIB
        out["perf/max_memory_reserved_gb"] = max_reserved_bytes / GIB
    if device_bytes:
        out["perf/device_memory_used_gb"] = device_bytes / GIB
    return out


class ResidentMemory(NamedTuple):
    current: int
    peak: int


def resident_memory_bytes(pid: int | str = "self") -> ResidentMemory:
    """Memory of a process; on a system without /proc, of this one, and the peak stands for both."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        if "VmRSS" in fields and "VmHWM" in fields:
            return ResidentMemory(parse_kilobytes(fields["VmRSS"]), parse_kilobytes(fields["VmHWM"]))
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if os.uname().sysname == "Darwin" else peak * 1024
    return ResidentMemory(peak_bytes, peak_bytes)


def parse_kilobytes(text: str) -> int:
    """'  1234 kB' -> bytes."""
    return int(text.split()[0]) * 1024
