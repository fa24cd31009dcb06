"""A process with its own Python environment, stopped by a signal except while it serves a request."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.jobs import GRPOCase

PEER_ENVIRONMENT = """\
The peer was not run. An environment for it, on the torch and transformers of this one (nothing is installed here):
  python3 -m venv peer
  python -c "import site; print(site.getsitepackages()[0])" > "$(echo peer/lib/python3*/site-packages)/base.pth"
  peer/bin/pip install 'trl==1.16.*'
  python benchmarks/<name>.py --peer-python peer/bin/python"""


class RequestProcess:
    """A script under another Python: one JSON line in, one JSON line out; it runs only between the two."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]):
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.log = log.open("w+")
        self.process = subprocess.Popen(
            [str(Path(command[0]).absolute()), *command[1:]],  # the folder is another than ours
            cwd=log.parent, env=inherited | {"HF_HUB_OFFLINE": "1"} | environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, start_new_session=True,
        )  # fmt: skip
        self.read()

    def read(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"the peer ended early:\n{self.log.read()[-2000:]}")
        return json.loads(line)

    def request(self, message: dict[str, Any]) -> Any:
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        reply = self.read()
        os.killpg(self.process.pid, signal.SIGSTOP)  # none of its threads spins while others run
        return reply

    def close(self) -> None:
        """End the process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.log.close()


class Peer(RequestProcess):
    """TRL's trainer, run in blocks of steps."""

    def __init__(self, python: str, folder: Path, case: GRPOCase, threads: int):
        script = Path(__file__).resolve().parent / "trl_steps.py"
        settings = json.dumps({**dataclasses.asdict(case), "threads": threads})
        environment = {"OMP_NUM_THREADS": str(threads), "WANDB_MODE": "disabled"}
        super().__init__([python, str(script), str(folder), settings], folder / f"trl_{case.name}.log", environment)

    def steps(self, count: int) -> list[tuple[float, int]]:
        """(seconds, completion tokens) of each step."""
        return [(seconds, tokens) for seconds, tokens in self.request({"steps": count})]


@contextlib.contextmanager
def peer(python: str | None, folder: Path, case: GRPOCase, threads: int) -> Iterator[Peer | None]:
    process = Peer(python, folder, case, threads) if python else None
    try:
        yield process
    finally:
        if process is not None:
            process.close()
