"""`make install` says how long it takes, and what to type next."""

import os
import re
import subprocess
from pathlib import Path

from tests.conftest import ROOT


def test_the_install_script_says_how_long_it_takes_and_what_to_type_next(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")  # installs nothing
    python.chmod(0o755)
    command, env = [ROOT / "scripts" / "install.sh", tmp_path / "venv"], {**os.environ, "TORCH": "skip"}
    first, last = subprocess.run(command, env=env, text=True, check=True, stdout=subprocess.PIPE).stdout.splitlines()
    assert "takes some minutes" in first
    assert re.search(rf"in \d+ s\. .* \. {tmp_path}/venv/bin/activate$", last)
