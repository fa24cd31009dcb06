"""Runs launch scripts without what they launch."""

import os
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path

from tests.conftest import ROOT


class LaunchedScripts:
    """Runs scripts with a python3, in `folder`, that only writes down how it was called."""

    def __init__(self, folder: Path):
        self.folder, stub = folder, folder / "bin" / "python3"
        stub.parent.mkdir()
        stub.write_text(
            "#!/bin/bash\n"
            f"test -e {folder}/arguments && exit\n"
            f'printf "%s\\0" "$@" >{folder}/arguments\nenv -0 >{folder}/environment\n'
            'programs="trainer.main_ppo|trainer.main_generation_server|experimental.fully_async_policy.fully_async_main"\n'
            '[[ "$1 $2" =~ ^-m\\ verl.($programs)$ ]]\n'
        )
        stub.chmod(stub.stat().st_mode | stat.S_IXUSR)

    def __call__(
        self, script: str, *extra: str, path: Iterable[Path] = (), **env: str
    ) -> tuple[list[str], dict[str, str]]:
        """(arguments, environment) of the first program of ours that the script starts."""
        (self.folder / "arguments").unlink(missing_ok=True)
        places = [*map(str, path), str(self.folder / "bin"), "/usr/bin", "/bin"]
        environment = {"HOME": str(self.folder), "PATH": os.pathsep.join(places), **env}
        subprocess.run(["bash", str(ROOT / script), *extra], env=environment, check=True, capture_output=True)
        arguments = (self.folder / "arguments").read_text().split("\0")[2:-1]
        lines = (self.folder / "environment").read_text().split("\0")
        return arguments, dict(line.split("=", 1) for line in lines if "=" in line)
