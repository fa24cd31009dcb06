"""TRL in a process of its own, asleep except while a block of steps is asked for."""

import contextlib
import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from support.jobs import GRPOCase

PEER_ENVIRONMENT = """\
The peer was not run. An environment for it, on the torch and transformers of this one (nothing is installed here):
  python3 -m venv peer
  python -c "import site; print(site.getsitepackages()[0])" > "$(echo peer/lib/python3*/site-packages)/base.pth"
  peer/bin/pip install 'trl==1.16.*'
  python benchmarks/<name>.py --peer-python peer/bin/python"""


class Peer:
    """TRL in a process of its own; works only while a block is asked for."""

    def __init__(self, python: str, folder: Path, case: GRPOCase, threads: int):
        script = Path(__file__).resolve().parent / "trl_steps.py"
        settings = json.dumps({**dataclasses.asdict(case), "threads": threads})
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        self.log = (folder / f"trl_{case.name}.log").open("w+")
        self.process = subprocess.Popen(
            [python, str(script), str(folder), settings],
            cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"the peer ended early:\n{self.log.read()[-2000:]}")
        return json.loads(line)

    def steps(self, count: int) -> list[tuple[float, int]]:
        """(seconds, completion tokens) of each."""
        self.process.stdin.write(json.dumps({"steps": count}) + "\n")
        self.process.stdin.flush()
        return [(seconds, tokens) for seconds, tokens in self.read()]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()


@contextlib.contextmanager
def peer(python: str | None, folder: Path, case: GRPOCase, threads: int) -> Iterator[Peer | None]:
    it = Peer(python, folder, case, threads) if python else None
    try:
        yield it
    finally:
        if it is not None:
            it.close()
