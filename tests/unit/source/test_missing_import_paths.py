"""Names of the reference that are not provided say what to use instead."""

import importlib

import pytest


@pytest.mark.parametrize(
    ("module", "instead"),
    [("verl.protocol", "compute_score"), ("verl.single_controller", "verl.runtime.group.WorkerGroup")],
)
def test_importing_it_names_the_replacement(module: str, instead: str):
    with pytest.raises(ImportError, match=instead):
        importlib.import_module(module)


def test_data_proto_names_the_replacement():
    with pytest.raises(ImportError, match=r"verl\.data\.batch\.Batch"):
        from verl import DataProto  # noqa: F401


def test_other_names_are_ordinary_attribute_errors():
    import verl

    with pytest.raises(AttributeError, match="nonsense"):
        verl.nonsense  # noqa: B018
