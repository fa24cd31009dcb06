"""A pipe where a file is expected is refused wherever a path of the user is opened; nothing waits for it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.agent.tools import read_yaml
from verl.commands import check_template
from verl.config.load import load_config
from verl.config.special_files import refuse_special
from verl.data.data_files import FileRows
from verl.models.fastest import _read
from verl.models.model_place import existing_folder
from verl.observe.trackers import FileBackend, RunInfo
from verl.utils.errors import VerlError
from verl.utils.external_code import check_user_object, load_object

OPENERS: list[tuple[str, Callable[[Path], Any]]] = [
    ("rows.jsonl", lambda path: FileRows(path)),
    ("rows.parquet", lambda path: FileRows([path])),
    ("config.json", lambda path: existing_folder(path.parent, "path")),
    ("tokenizer.json", lambda path: existing_folder(path.parent, "tokenizer_path")),
    ("model.safetensors", lambda path: existing_folder(path.parent, "path")),
    ("reward.py", lambda path: load_object(str(path), "compute_score", "reward.custom_reward_function")),
    ("reward.py", lambda path: check_user_object(str(path), "compute_score", "reward.custom_reward_function")),
    ("mine.yaml", lambda path: load_config(["--config-name", str(path)])),
    ("tools.yaml", lambda path: read_yaml(str(path), "multi_turn.tool_config_path")),
    ("template.jinja", lambda path: check_template.main([str(path.parent), "--chat-template", str(path)])),
    ("metrics.jsonl", lambda path: FileBackend(RunInfo("p", "e", {}), path)),
]


@pytest.mark.parametrize(("name", "opener"), OPENERS, ids=[f"{n}-{i}" for i, (n, _) in enumerate(OPENERS)])
def test_a_pipe_is_refused_by_name(name: str, opener: Callable[[Path], Any], tmp_path: Path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(VerlError, match=rf"{name} is a pipe or a device, which is never waited for; give a file"):
        opener(tmp_path / name)


def test_a_pipe_with_chosen_kernels_is_passed_over_with_a_line(tmp_path: Path, caplog):
    os.mkfifo(tmp_path / "fastest.json")
    assert _read(tmp_path / "fastest.json") == {} and "is a pipe" in caplog.records[0].getMessage()


def test_files_folders_links_and_what_is_not_there_pass(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "dangling").symlink_to("gone")
    for path in (tmp_path, tmp_path / "file", tmp_path / "link", tmp_path / "dangling", tmp_path / "gone"):
        assert refuse_special(path, "key") == path
