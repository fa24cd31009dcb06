"""How many cores a process uses, how its threads wait, and what the header says of a busy machine."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.utils import cores

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
NEVER = {"cpu.max": "max 100000"}


@pytest.mark.parametrize(
    ("own", "limits", "wanted"),
    [
        ("0::/", {"cpu.max": "400000 100000"}, 4),
        ("0::/", {"cpu.max": "350000 100000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", NEVER, 16),
        ("0::/", {}, 16),
        ("0::/job/step", {"job/cpu.max": "200000 100000", "job/step/cpu.max": "max 100000"}, 2),
        ("0::/job/step", {"job/cpu.max": "max 100000", "job/step/cpu.max": "600000 200000", "other/cpu.max": "1 1"}, 3),
        ("4:cpu,cpuacct:/job", {"cpu,cpuacct/job/cpu.cfs": "500000 100000"}, 5),
        ("4:cpu:/job\n1:name=systemd:/", {"cpu/cpu.cfs": "-1 100000", "cpu/job/cpu.cfs": "600000 100000"}, 6),
        ("4:cpu,cpuacct:/docker/1f", {"cpu/cpu.cfs": "700000 100000"}, 7),  # a name that only the host sees
        ("4:cpu:/\n0::/", {"cpu/cpu.cfs": "-1 100000"}, 16),
        ("6:memory:/job", {"memory/job/cpu.cfs": "100000 100000"}, 16),
        ("0::/", {"cpu.max": "9900000 100000"}, 16),
    ],
)
def test_cores_are_those_of_the_affinity_within_the_time_of_the_cgroups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, limits: dict[str, str], wanted: int
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    files = {"proc/self/cgroup": own}
    for name, text in limits.items():
        if name.endswith("cpu.cfs"):  # version 1 has a file for each of the two numbers
            parts = zip(("_quota_us", "_period_us"), text.split(), strict=True)
            files |= {f"sys/fs/cgroup/{name}{part}": number for part, number in parts}
        else:
            files[f"sys/fs/cgroup/{name}"] = text
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert cores.num_cores(tmp_path) == wanted


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_a_process_bound_to_one_core_uses_one():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    assert output(code + "from verl.utils.cores import num_cores; print(num_cores())") == "1"


def output(code: str, **variables: str) -> str:
    """What a fresh Python prints, whose environment does not say how threads wait unless `variables` do."""
    environment = {name: value for name, value in os.environ.items() if name not in (*CHOICES, "OMP_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | variables, capture_output=True, text=True, check=True
    )
    return (done.stdout + done.stderr).strip()


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, "PASSIVE None None"),
        ({"OMP_WAIT_POLICY": "active"}, "active None None"),
        ({"GOMP_SPINCOUNT": "1000"}, "None 1000 None"),
        ({"KMP_BLOCKTIME": "1"}, "None None 1"),
    ],
)
def test_threads_of_this_process_and_its_children_sleep_unless_the_user_chose(variables: dict[str, str], wanted: str):
    show = f"import os; print(*map(os.environ.get, {CHOICES}))"
    assert (
        output(f"import verl, subprocess, sys; subprocess.run([sys.executable, '-c', {show!r}])", **variables) == wanted
    )


def test_the_library_of_torch_sees_it():
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent
    found = sorted([*folder.glob("lib/libgomp*.so*"), *folder.parent.glob("torch.libs/libgomp*.so*")])
    if not found:
        pytest.skip("this torch has another OpenMP than GNU's")
    shown = output(f"import ctypes, verl; ctypes.CDLL({str(found[0])!r})", OMP_DISPLAY_ENV="verbose")
    assert "GOMP_SPINCOUNT = '0'" in shown


@pytest.mark.parametrize(
    ("loaded_first", "variables", "said"),
    [
        ("torch", {}, True),
        ("json", {}, False),
        ("torch", {"OMP_NUM_THREADS": "1"}, False),  # nothing waits
        ("torch", {"OMP_WAIT_POLICY": "PASSIVE"}, False),
        ("torch", {"GOMP_SPINCOUNT": "0"}, False),
    ],
)
def test_a_run_in_a_program_that_loaded_torch_first_says_that_its_threads_spin(
    loaded_first: str, variables: dict[str, str], said: bool
):
    code = f"""if True:
        import os, sys, types
        sys.modules[{loaded_first!r}] = types.ModuleType({loaded_first!r})
        os.getloadavg = lambda: (0.0, 0.0, 0.0)
        os.sched_getaffinity = lambda process: {{0, 1}}
        import verl
        from verl.utils import cores
        cores._cgroup_limits = lambda root: []
        print(*cores.machine_lines(), sep="\\n")"""
    lines = output(code, **variables).splitlines()
    assert len(lines) == said and all("import verl first" in line for line in lines)


@pytest.mark.parametrize(("more_than_cores", "is_busy"), [(0.1, True), (0.0, False), (-1.0, False)])
def test_the_header_says_when_more_programs_want_to_run_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, more_than_cores: float, is_busy: bool
):
    load = (os.cpu_count() or 1) + more_than_cores
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 99.0, 99.0))
    monkeypatch.setattr(cores, "_spin", False)
    wanted = f"busy: load {load:.1f} on {os.cpu_count()} cores"
    assert [wanted in line for line in cores.machine_lines()] == [True] * is_busy
