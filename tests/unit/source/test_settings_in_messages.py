"""Every setting that a message tells the user to type is a key of some command, and has a value of its type."""

import ast
import re

import pytest

from tests.conftest import ROOT
from verl.config import DPOConfig, RewardModelConfig, RunConfig, SFTConfig
from verl.config.evaluation import EvalConfig
from verl.config.load import _put_override
from verl.config.overrides import parse_override
from verl.config.settings import ConfigBuilder
from verl.utils.errors import ConfigError

ROOTS = (RunConfig, SFTConfig, DPOConfig, RewardModelConfig, EvalConfig)
DOTTED = re.compile(r"(?<![\w.\x00/-])(\+{0,2}[a-z_]+(?:\.[a-z_0-9]+)+)=(\[[^\]]*\]|[^\s;,)`:]*)")
AFTER_SET = re.compile(r"\b[Ss]et (\+{0,2}[a-z_]+)=([^\s;,)`]*)")
NOT_OURS = ("hydra.searchpath",)
GAP = "\0"  # a value that the message fills in


def texts_of_the_code() -> list[tuple[str, str]]:
    """(file, text) of every string in verl/ that is no docstring."""
    found = []
    for path in sorted((ROOT / "verl").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        skipped = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        skipped |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = None
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(v.value) if isinstance(v, ast.Constant) else GAP for v in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            if text is not None and id(node) not in skipped:
                found.append((str(path.relative_to(ROOT)), text))
    return found


SETTINGS = sorted(
    {
        (match[1], match[2].strip(".'\""), file)
        for file, text in texts_of_the_code()
        for match in (*DOTTED.finditer(text), *AFTER_SET.finditer(text))
        if match[1] not in NOT_OURS
    }
)


def accepts(root: type, key: str, value: str) -> bool:
    builder = ConfigBuilder(root)
    try:
        _put_override(builder, parse_override(f"{key}={'null' if GAP in value or not value else value}"))
    except ConfigError as error:
        return "unknown key" not in str(error) and (GAP in value or not value or value.isupper() or "=N" in key)
    return not any("no key of the library" in line for line in builder.warnings)


def test_the_messages_hold_settings():
    assert len(SETTINGS) > 150


@pytest.mark.parametrize(("key", "value", "file"), SETTINGS, ids=lambda value: str(value)[:60].replace(GAP, "_"))
def test_a_setting_in_a_message_can_be_typed(key: str, value: str, file: str):
    assert any(accepts(root, key, value) for root in ROOTS), f"{file} tells to type {key}={value}"
