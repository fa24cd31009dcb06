"""The command under `python -m`, into a pipe that closes, and the search for a key."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl import cli
from verl.commands.show import WHITE, style_of
from verl.config import explain

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "verl", "config"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def test_python_m_verl_is_the_command():
    done = subprocess.run(
        [*COMMAND, "explain", "algorithm.gamma"], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("algorithm.gamma: Discount per token.")


@pytest.mark.parametrize("words", [["config", "print"], ["--help"], ["plan", "--help"]])
def test_a_pipe_that_closes_ends_the_output_without_a_traceback(words: list[str]):
    with subprocess.Popen(
        [sys.executable, "-m", "verl", *words],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    ) as process:
        process.stdout.close()  # before the first line is written
        assert process.stderr.read() == b"" and process.wait() == 0


def test_a_command_that_loads_libraries_first_says_so_also_into_a_pipe_but_not_beside_json():
    done = subprocess.run(
        [sys.executable, "-m", "verl", "show", "nowhere"], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.stderr.startswith("verl show: loading libraries\nerror: 'nowhere' names no run")
    assert cli.main(["report", "nowhere"]) == 2


@pytest.mark.parametrize("words", [["doctor", "--help"], ["doctor", "--json"], ["config", "explain", "trainer.seed"]])
def test_help_json_and_quick_commands_say_nothing_of_libraries(words: list[str], monkeypatch, capsys):
    module, _, function = cli.VERBS[words[0]][0].partition(":")
    monkeypatch.setattr(importlib.import_module(module), function, lambda arguments: 0)
    assert cli.main(words) == 0 and capsys.readouterr().err == ""


@pytest.mark.parametrize("color", ["advantage", "logprob"])
def test_coloured_tokens_have_a_text_colour_for_their_background(color: str):
    styles = {style_of(value, 1.0, color) for value in (-8.0, -3.0, -1.0, -0.5, 0.0, 1.0)}
    assert len(styles) > 2 and all(style == "" or style.startswith(f"{WHITE} on rgb(") for style in styles)


def test_explain_lists_the_keys_with_a_word_in_their_name_or_meaning(capsys):
    assert explain.main(["explain", "Entropy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "actor_rollout_ref.actor.entropy_coeff: Weight of the entropy bonus." in lines
    assert "engine.entropy_checkpointing (sft_trainer): " in "\n".join(lines)
    assert all("entropy" in line.lower() for line in lines)
    assert explain.main(["explain", "trainer"]) == 0  # a section is explained as before
    assert capsys.readouterr().out.startswith("trainer: section; The training loop.\n")
    assert explain.main(["explain", "zzzz"]) == explain.main(["explain", "algorithm.gama"]) == 2


def test_ctrl_c_while_a_verb_loads_is_one_line(capsys, monkeypatch):
    def load(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", load)
    assert cli.main(["serve"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "error: stopped by Ctrl-C"
