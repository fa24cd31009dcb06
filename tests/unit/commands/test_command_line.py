"""The command under `python -m`, into a pipe that closes, and the search for a key."""

import os
import subprocess
import sys
from pathlib import Path

from verl.config import explain

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "verl", "config"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_python_m_verl_is_the_command():
    done = subprocess.run(
        [*COMMAND, "explain", "algorithm.gamma"], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("algorithm.gamma: Discount per token.")


def test_a_pipe_that_closes_ends_the_output_without_a_traceback():
    with subprocess.Popen(
        [*COMMAND, "print"], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    ) as process:
        process.stdout.close()  # before the first line is written
        assert process.stderr.read() == b"" and process.wait() == 0


def test_explain_lists_the_keys_with_a_word_in_their_name_or_meaning(capsys):
    assert explain.main(["explain", "Entropy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "actor_rollout_ref.actor.entropy_coeff: Weight of the entropy bonus." in lines
    assert "engine.entropy_checkpointing (sft_trainer): " in "\n".join(lines)
    assert all("entropy" in line.lower() for line in lines)
    assert explain.main(["explain", "trainer"]) == 0  # a section is explained as before
    assert capsys.readouterr().out.startswith("trainer: section\n")
    assert explain.main(["explain", "zzzz"]) == explain.main(["explain", "algorithm.gama"]) == 2
