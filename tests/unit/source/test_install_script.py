"""`make install` says how long it takes, what it does without uv, and what to type next."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT


@pytest.mark.parametrize(("installer", "between"), [("pip", []), ("uv", ["uv could not install this; pip does, "])])
def test_the_install_script_says_how_long_it_takes_and_what_to_type_next(
    tmp_path: Path, installer: str, between: list[str]
) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")  # installs nothing, so there is no uv
    python.chmod(0o755)
    command = [ROOT / "scripts" / "install.sh", tmp_path / "venv"]
    env = {**os.environ, "TORCH": "skip", "INSTALLER": installer}
    said = subprocess.run(command, env=env, text=True, check=True, capture_output=True).stdout.splitlines()
    first, *middle, last = said
    assert "takes some minutes" in first
    assert [line[: len(text)] for line, text in zip(middle, between, strict=True)] == between
    assert re.search(rf"in \d+ s\. .* \. {tmp_path}/venv/bin/activate$", last)
