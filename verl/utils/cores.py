"""The processor cores of this process: how many it may use, who else uses them, and how its threads wait."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_CHOOSE_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_spin = False  # whether the threads of this process spin, though nobody has chosen that


def let_threads_sleep() -> None:
    """Make threads that wait for each other sleep, in this process and in those that it starts, unless the environment
    says how they wait. A torch that is loaded already has read it: the run says so (`machine_lines`)."""
    global _spin
    if not any(name in os.environ for name in _CHOOSE_WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        _spin = "torch" in sys.modules


def machine_lines() -> list[str]:
    """The header's lines about what slows down a run on this machine from its start; often none."""
    lines, cores = [], os.cpu_count() or 1  # the load is that of the whole machine
    if (load := os.getloadavg()[0]) > cores:
        lines.append(f"machine      busy: load {load:.1f} on {cores} cores in the last minute; steps take longer")
    if _spin and num_cores() > 1 and os.environ.get("OMP_NUM_THREADS") != "1":
        lines.append(
            "threads      spin while they wait, which is slow beside other programs: torch was loaded before verl; "
            "import verl first, or start Python with OMP_WAIT_POLICY=PASSIVE"
        )
    return lines


def num_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: those of its affinity and cpuset, within its cgroups' time, rounded down."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *map(int, _cgroup_limits(root))]))


def _cgroup_limits(root: Path) -> Iterator[float]:
    """Cores' worth of time that the cgroups of this process, and those around them, may use; of either version."""
    mounts = root / "sys/fs/cgroup"
    for line in _read(root, "proc/self/cgroup").splitlines():
        controllers, _, place = line.partition(":")[2].partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        inside = Path(place.lstrip("/"))
        for up in (inside, *inside.parents):  # in a container the file may name folders that only the host sees
            for here in (mounts / up, mounts / controllers / up, mounts / "cpu" / up):
                text = _read(here, "cpu.max") or _read(here, "cpu.cfs_quota_us") + _read(here, "cpu.cfs_period_us")
                match text.split():  # "max" and "-1" are no limit
                    case [quota, period] if quota.isdigit() and int(period) > 0:
                        yield int(quota) / int(period)


def _read(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text()
    except OSError:
        return ""  # other systems have no such file
