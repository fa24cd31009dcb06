"""`verl completion`: what a shell offers at the end of a line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from verl.cli import VERBS
from verl.commands.completion import candidates, main, options_of


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("verl qui", ["quickstart"]),
        ("verl completion ", ["bash", "zsh"]),
        ("verl train trainer.total_tr", ["trainer.total_training_steps="]),
        ("verl train actor_ro", ["actor_rollout_ref."]),
        ("verl train +actor_ro", ["+actor_rollout_ref."]),
        ("verl sft trainer.device=c", []),
        ("verl train data.shuffle=", ["data.shuffle=false", "data.shuffle=true"]),
        (
            "verl train actor_rollout_ref.actor.use_prefix_grouper=a",
            ["actor_rollout_ref.actor.use_prefix_grouper=auto"],
        ),
        ("verl train data.truncation=le", ["data.truncation=left"]),
        ("verl train --config-name sft_trainer_e", ["sft_trainer_engine"]),
        ("verl sft engine.strat", ["engine.strategy="]),
        ("verl train engine.strat", []),
        ("verl config pr", ["print"]),
        ("verl config print df", []),
        ("verl config print dp", ["dpo"]),
        ("verl config print sft engine.strat", ["engine.strategy="]),
        ("verl serve --po", ["--port"]),
        ("verl serve rollout.max_num_s", ["rollout.max_num_seqs="]),
        ("verl check-data --ex", ["--examples"]),
        ("verl check-reward --ro", ["--rows"]),
        ("verl check-data --ro", []),
        ("verl merge --target", ["--target_dir"]),
        ("verl nonsense x", []),
    ],
)
def test_the_words_that_a_line_may_go_on_with(line: str, expected: list[str]):
    assert candidates(line) == expected


def test_every_verb_is_offered_and_has_help():
    assert candidates("verl ") == sorted(VERBS)
    assert all("--help" in options_of(verb) for verb in VERBS)


def test_a_word_is_completed_without_torch():
    code = "import sys; from verl.cli import main; from verl.commands.completion import options_of, VERBS; "
    code += "[options_of(verb) for verb in VERBS]; main(['completion', 'words', 'verl train data.']); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "data.train_files=" in done.stdout and done.stdout.endswith("False\n")


def in_bash(folder: Path, line: str) -> str:
    """What the script of bash offers at the end of `line`; words are split as bash splits them."""
    command = folder / "verl"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m verl.cli "$@"\n')
    command.chmod(0o755)
    program = f"""eval "$(verl completion bash)"
COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; COMP_WORDS=($COMP_LINE); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
complete -p verl
_verl; echo "${{COMPREPLY[@]}}" """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder}:{os.environ['PATH']}"}
    words = ["bash", "--norc", "-c", program]
    return subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
def test_bash_completes_a_key_and_the_value_behind_it(tmp_path: Path):
    assert in_bash(tmp_path, "verl train data.shuf") == "complete -o default -F _verl verl\ndata.shuffle=\n"
    assert in_bash(tmp_path, "verl train data.shuffle=t").endswith("verl\ntrue\n")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh on this machine")
def test_the_script_of_zsh_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["zsh"]) == 0
    subprocess.run(["zsh", "-n"], input=capsys.readouterr().out, text=True, check=True)
