"""What a newcomer mistypes: one line that says what to type, never a traceback or a page of names."""

import errno
from pathlib import Path

import pytest

from verl import cli
from verl.commands.quickstart.small_model import make_tokenizer
from verl.utils.command_line import run_command
from verl.utils.suggest import did_you_mean


def test_a_few_names_are_listed_and_many_are_not():
    assert did_you_mean("zzz", ["b", "a"]) == "known: a, b" and did_you_mean("zzz", []) == "known: none"
    assert did_you_mean("grpoo", ["grpo", "rloo", "gdpo"]) == "did you mean 'grpo'?"
    assert did_you_mean("gxpo", ["grpo", "rloo", "gdpo"]) == "did you mean 'grpo' or 'gdpo'?"
    said = did_you_mean("zzz", [f"name{number:03}" for number in range(500)])
    assert said.startswith("known: name000, name001") and said.endswith(" and 476 more") and len(said) < 300
    assert did_you_mean("nome007", [f"name{number:03}" for number in range(9)]).startswith("did you mean 'name007'")


def test_a_full_disk_is_one_line_whatever_was_written(capsys: pytest.CaptureFixture[str]):
    def run(error: OSError) -> int:
        def write(_: list[str]) -> None:
            raise error

        return run_command([], "", write)

    assert run(OSError(errno.ENOSPC, "No space left on device", "/data/step.parquet")) == 2
    assert "no room is left on the disk: [Errno 28] No space left on device: '/data/step" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        run(FileNotFoundError(errno.ENOENT, "No such file"))


def test_many_copies_of_a_run_that_starts_its_ranks_itself_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", "actor_rollout_ref.model.path=nowhere"]) == 2
    assert "torchrun started this program 2 times" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serve"], "no model is named; give its folder: verl serve model=DIR"),
        (["serve", "model=nowhere", "--port", "0", "rollout.response_length=8"], "model.path=nowhere is not a folder"),
        (["check-template", "nowhere"], "model.path=nowhere is not a folder"),
        (["check-template", "tokenizer", "--chat-template", "nowhere"], "--chat-template nowhere: No such file"),
        (["eval", "data.path=nowhere.parquet"], "nowhere.parquet does not exist"),
        (["train", "data.train_batch_sise=3"], "did you mean 'data.train_batch_size'"),
        (["merge", "--local_dir", "nowhere"], "nowhere has neither manifest.json nor"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_one_line_says_what_is_wrong(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    make_tokenizer("0123456789").save_pretrained(tmp_path / "tokenizer")
    assert cli.main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert said in lines[-1] and [line for line in lines if not line.endswith("loading libraries")] == lines[-1:]
