"""docs/reference/environment.md names every environment variable that the code reads or sets, and no other as read."""

import ast
import re

from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "reference" / "environment.md").read_text(encoding="utf-8")
READ, UNREAD = PAGE.split("## Variables of the reference system that nothing reads")
NAME = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|RANK")
OTHERS = {  # constants in capitals that are no variables
    "ADV_ESTIMATOR_REGISTRY",
    "CAUSAL_LM",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "HDFS_PREFIX",
    "IMPORT_FROM",
    "POLICY_LOSSES",
    "POLICY_LOSS_REGISTRY",
    "SC_CLK_TCK",
    "SEQ_CLS",
    "STD_EPSILON",
    "STRICT_SPREAD",
    "TOKEN_CLS",
}


def named(text: str) -> set[str]:
    return {name for name in re.findall(r"`([A-Z0-9_]+)`", text) if NAME.fullmatch(name)}


def constants(source: str) -> set[str]:
    """Every string of a program that could be the name of a variable."""
    strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return {text for text in strings if isinstance(text, str) and NAME.fullmatch(text)}


def test_the_page_names_the_variables_of_the_code():
    found = set().union(*(constants(path.read_text(encoding="utf-8")) for path in (ROOT / "verl").rglob("*.py")))
    assert found - OTHERS == named(READ), "a variable came or went: docs/reference/environment.md (no variable: OTHERS)"


def test_nothing_reads_the_variables_that_it_calls_unread():
    assert named(UNREAD) and not named(UNREAD) & named(READ)


def test_a_new_variable_is_found():
    assert constants("import os\nos.environ.get('VERL_NEW')\nNAME = 'VERL_OTHER'") == {"VERL_NEW", "VERL_OTHER"}
