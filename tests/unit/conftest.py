"""Fixtures of the tests of agents."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.agent_cases import TOOLS


@pytest.fixture(scope="session")
def tokenizer(test_data: Path) -> PreTrainedTokenizerBase:
    """Qwen3's own."""
    return AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen3")


@pytest.fixture
def tool_file(tmp_path: Path) -> Path:
    """Functions that a policy may call."""
    path = tmp_path / "my_tools.py"
    path.write_text(TOOLS)
    return path
