"""Paths of command-line options: a home folder is expanded, one of nobody is one sentence and makes no folder."""

import pytest

from verl.agent.agent_runner import load_agent_loops
from verl.agent.tools import load_tools
from verl.cli import main
from verl.utils.errors import ConfigError
from verl.utils.external_code import load_object

NOBODY = "~nouser-here/x"


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["merge", "--local_dir", NOBODY],
        ["merge", "--local_dir", ".", "--target_dir", NOBODY],
        ["merge", "test", "--local_dir", ".", "--test_hf_dir", NOBODY],
        ["check-template", NOBODY],
        ["check-template", ".", "--chat-template", NOBODY],
        ["report", NOBODY],
        ["show", NOBODY],
        ["quickstart", "--out", NOBODY],
        ["serve", f"model={NOBODY}"],
        ["certify", f"actor_rollout_ref.model.path={NOBODY}"],
    ],
    ids=" ".join,
)
def test_an_option_with_the_home_folder_of_nobody_is_one_sentence(words, run_folder, capsys):
    assert main(words) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.endswith(": loading libraries")]
    assert len(said) == 1 and said[0].startswith("error: ")
    assert "'nouser-here'" in said[0] and "write the path in full" in said[0]
    assert list(run_folder.iterdir()) == []


def test_files_of_tools_and_of_code_of_others_name_the_key_and_the_user(run_folder):
    for read in (
        lambda: load_tools(NOBODY, None),
        lambda: load_agent_loops(NOBODY),
        lambda: load_object(NOBODY, "score", "reward.custom_reward_function"),
        lambda: load_object(f"file://{NOBODY}", "score", "reward.custom_reward_function"),
    ):
        with pytest.raises(ConfigError, match=r"(path|_path)=~nouser-here/x: there is no user 'nouser-here'"):
            read()
