"""The help of a command comes before the libraries that the command needs."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from verl.cli import main
try:
    main(sys.argv[1:])
finally:
    print(sorted({"torch", "transformers"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("verb", "option"),
    [
        ("merge", "{merge,test}"),
        ("check-template", "--conversations"),
        ("check-data", "--examples"),
        ("check-reward", "--gold-key"),
    ],
)
def test_help_loads_no_slow_library(verb: str, option: str):
    done = subprocess.run([sys.executable, "-c", SCRIPT, verb, "--help"], capture_output=True, text=True, check=False)
    assert option in done.stdout and done.stderr == "[]\n", done.stderr
