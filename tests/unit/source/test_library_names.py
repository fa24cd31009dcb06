"""Every allowed release of transformers and vLLM has the names that we import and takes the arguments that we give."""

import json

import pytest

from scripts.library_names import RECORD, WHEELS, calls_of, imported_names

LIBRARY = json.loads(RECORD.read_text())
RELEASES = [(package, release.partition("==")[2]) for package, releases in WHEELS.items() for release in releases]
# What verl/plugin/library_versions.py does without where a release lacks it.
LATER = {("vllm.model_executor.layers.fused_moe.experts", "cpu_moe")}


@pytest.mark.parametrize(("package", "release"), RELEASES)
def test_a_release_has_the_names_that_we_import_and_the_arguments_that_we_give(package: str, release: str):
    record = LIBRARY[package].get(release, {})
    missing = [
        f"{module}:{name}"
        for module, names in imported_names(package).items()
        for name in sorted(names)
        if name not in record.get(module, {}) and (module, name) not in LATER
    ]
    assert not missing, f"{package} {release} lacks {missing}, or run python -m scripts.library_names"
    refused = []
    for place, module, name, keywords in calls_of(package):
        parameters = record[module].get(name)
        if parameters is not None and "**" not in parameters:
            refused += [f"{place}: {name}({keyword}=)" for keyword in keywords if keyword not in parameters]
    assert not refused, f"{package} {release} refuses {refused}"
