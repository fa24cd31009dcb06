"""Files and data sets as published scripts and recipes use them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.rollout_adapters import letters_tokenizer
from verl.config import CustomClassConfig, DataConfig
from verl.data.prompts import load_prompts
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.errors import ConfigError, DataError
from verl.utils.fs import copy_to_local, is_non_local
from verl.utils.hdfs_io import copy, exists, makedirs
from verl.utils.rollout_trace import RolloutTraceConfig, rollout_trace_op

HDFS = """#!/bin/sh
echo "$@" >> {log}
case "$2 $4" in
  "-test hdfs://there"*) exit 0;;
  "-test"*) exit 1;;
  "-mkdir hdfs://full") echo "no space" >&2; exit 1;;
esac
if [ "$2" = -get ]; then cp {log} "$5"; fi
"""


@pytest.fixture
def hdfs(tmp_path: Path, monkeypatch) -> Path:
    """A command `hdfs` that writes down how it was called."""
    log, command = tmp_path / "log", tmp_path / "bin" / "hdfs"
    command.parent.mkdir()
    command.write_text(HDFS.format(log=log))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    return log


def test_local_paths_are_copied_and_made_as_python_does(tmp_path: Path):
    makedirs(str(tmp_path / "a" / "b"))
    with pytest.raises(FileExistsError):
        makedirs(str(tmp_path / "a" / "b"))
    makedirs(name=str(tmp_path / "a" / "b"), exist_ok=True)
    (tmp_path / "a" / "x").write_text("1")
    assert copy(src=str(tmp_path / "a"), dst=str(tmp_path / "c")) == str(tmp_path / "c")
    assert (tmp_path / "c" / "x").read_text() == "1" and exists(str(tmp_path / "c" / "b"))
    copy(str(tmp_path / "a" / "x"), str(tmp_path / "c"), follow_symlinks=True)
    assert (
        not exists(str(tmp_path / "nothing"))
        and copy_to_local("m/x", use_shm=True) == "m/x"
        and not is_non_local("m/x")
    )


def test_paths_in_hdfs_go_to_the_command(hdfs: Path, tmp_path: Path):
    assert exists("hdfs://there/x") and not exists("hdfs://missing/x")
    makedirs("hdfs://new/x")
    copy("local", "hdfs://new/x")
    assert hdfs.read_text().splitlines()[-2:] == ["dfs -mkdir -p hdfs://new/x", "dfs -put -f local hdfs://new/x"]
    copied = copy_to_local("hdfs://there/data.parquet", cache_dir=str(tmp_path))
    before = hdfs.read_text()
    assert Path(copied).name == "data.parquet" and Path(copied).read_text() == before
    assert copy_to_local("hdfs://there/data.parquet", cache_dir=str(tmp_path)) == copied and hdfs.read_text() == before
    with pytest.raises(FileExistsError):
        makedirs("hdfs://there/x")
    with pytest.raises(DataError, match=r"-mkdir -p hdfs://full` failed: no space"):
        makedirs("hdfs://full")


def test_a_copy_without_a_cache_folder_is_in_one_that_others_cannot_reach(hdfs: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    folder = tmp_path / "temporary" / f"verl-{os.getuid()}"
    folder.parent.mkdir()
    assert Path(copy_to_local("hdfs://there/data.parquet")).is_relative_to(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match=r"drwxrwx--- of user .* must be a folder, drwx------"):
        copy_to_local("hdfs://there/data.parquet")
    folder.rename(tmp_path / "moved")
    (tmp_path / "moved").chmod(0o700)
    folder.symlink_to(tmp_path / "moved")
    with pytest.raises(PermissionError, match="is lrwxrwxrwx"):
        copy_to_local("hdfs://there/data.parquet")
    folder.unlink()
    (tmp_path / "moved").rename(folder)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    folder.rename(folder.with_name(f"verl-{os.getuid()}"))
    with pytest.raises(PermissionError, match="remove it, or pass cache_dir"):
        copy_to_local("hdfs://there/data.parquet")


def test_paths_in_hdfs_without_the_command_are_an_error_that_says_so(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="hdfs:// paths need the command `hdfs`"):
        exists("hdfs://a/b")


def test_a_traced_method_keeps_its_name_and_an_unknown_backend_is_refused():
    assert rollout_trace_op(test_local_paths_are_copied_and_made_as_python_does).__name__.startswith("test_local")
    RolloutTraceConfig.init("project", "experiment", None)
    with pytest.raises(ConfigError, match=r"trace\.backend='mlfow' is unknown; .*mlflow"):
        RolloutTraceConfig.init("project", "experiment", "mlfow")
    assert RolloutTraceConfig.get_instance().get_backend() is None


PUBLISHED_DATASET = """
from verl.utils.dataset import RLHFDataset

class Doubled(RLHFDataset):
    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = [dict(row, data_source="mine") for row in self.dataframe for _ in range(2)]

    def _build_messages(self, example):
        messages = super()._build_messages(example)
        return [dict(message, content=message["content"] + "!") for message in messages]
"""


@pytest.mark.parametrize("arguments", ["example", "example, key", "example: dict, key: str"])
def test_a_published_data_set_derives_from_ours_and_is_run(tmp_path: Path, arguments: str):
    names = arguments.replace(": dict", "").replace(": str", "")
    text = PUBLISHED_DATASET.replace("(self, example)", f"(self, {arguments})")
    (tmp_path / "mine.py").write_text(text.replace("._build_messages(example)", f"._build_messages({names})"))
    row = {"prompt": [{"role": "user", "content": "ab"}], "data_source": "x", "reward_model": {"ground_truth": "1"}}
    rows = [dict(row, extra_info={"index": i, "tools_kwargs": {"t": {}}}) for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(custom_cls=CustomClassConfig(path=str(tmp_path / "mine.py"), name="Doubled"), shuffle=False)
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompts = load_prompts(str(tmp_path / "rows.jsonl"), config, tokenizer, max_samples=2)
    assert len(prompts) == 4 and prompts[0].text == "ab!" and prompts[3].data_source == "mine"
    assert prompts[3].extra_info["index"] == 1


def test_a_row_without_messages_is_named_through_a_published_data_set(tmp_path: Path):
    (tmp_path / "mine.py").write_text(PUBLISHED_DATASET)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"data_source": "x"}) + "\n")
    config = DataConfig(custom_cls=CustomClassConfig(path=str(tmp_path / "mine.py"), name="Doubled"))
    with pytest.raises(DataError, match="Doubled item 0: there is no column 'prompt'"):
        load_prompts(str(tmp_path / "rows.jsonl"), config, letters_tokenizer())


def test_items_are_collated_by_column():
    batch = collate_fn([{"t": torch.tensor([1]), "m": [1]}, {"t": torch.tensor([2]), "m": [2, 3]}])
    assert torch.equal(batch["t"], torch.tensor([[1], [2]]))
    assert isinstance(batch["m"], np.ndarray) and batch["m"].tolist() == [[1], [2, 3]]
