"""Where data files are found: patterns, folders of shards, the local Hugging Face cache."""

import os
from pathlib import Path

import pytest

from verl.data.data_files import FileRows
from verl.data.file_places import data_paths, source_of, suffix_of
from verl.utils.errors import ConfigError, DataError


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"a": 1}\n')
    return folder


def names(given: str | Path) -> list[str]:
    return [path.name for path in data_paths(given)]


def cached(home: Path, *files: str) -> Path:
    """A data set openai/gsm8k as `hf download` stores one: a snapshot of links to blobs, and the commit it is of."""
    root = home / "hub" / "datasets--openai--gsm8k"
    touch(root, "refs/main")
    (root / "refs" / "main").write_text("c0ffee")
    for number, name in enumerate(files):
        touch(root, f"blobs/{number}")
        link = root / "snapshots" / "c0ffee" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(root / "blobs" / str(number))
    return root


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def test_patterns_are_the_files_that_they_match_in_order_and_leave_out_what_is_no_data(tmp_path: Path):
    touch(tmp_path, "b.jsonl", "a.csv", "c.txt", "in/d.parquet")
    assert names(f"{tmp_path}/*") == ["a.csv", "b.jsonl"]
    assert names(f"{tmp_path}/**/[ad].*") == ["a.csv", "d.parquet"]
    touch(tmp_path, "odd[1].jsonl", "odd1.jsonl")
    assert names(f"{tmp_path}/odd[1].jsonl") == ["odd[1].jsonl"]
    with pytest.raises(DataError, match=r"z\*\.jsonl does not exist"):
        data_paths(f"{tmp_path}/z*.jsonl")


def test_a_folder_is_its_shards_of_one_split(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    shards = [f"data/train-0000{i}-of-00002.parquet" for i in range(2)]
    folder = touch(tmp_path, *shards, "data/test-00000-of-00001.parquet", "README.md", "dataset_infos.json")
    touch(folder, ".cache/huggingface/train.parquet", "notes.jsonl")
    assert names(folder) == [Path(shard).name for shard in shards] and "train is read" in caplog.text
    assert names(f"{folder}:test") == ["test-00000-of-00001.parquet"]
    with pytest.raises(DataError, match=r"without a split 'dev': it holds the splits test, train; give one as"):
        data_paths(f"{folder}:dev")
    (folder / shards[0]).unlink()
    with pytest.raises(DataError, match="holds 1 of 2 shards of the split train; download it again"):
        data_paths(folder)


def test_a_folder_of_one_split_needs_no_name_and_other_folders_say_what_to_give(tmp_path: Path):
    assert names(touch(tmp_path / "one", "dev.jsonl.gz")) == ["dev.jsonl.gz"]
    assert names(touch(tmp_path / "numbers", "train/0000.parquet", "train/0001.parquet")) == [
        "0000.parquet",
        "0001.parquet",
    ]
    with pytest.raises(DataError, match=r"holds no data file \(\.parquet"):
        data_paths(touch(tmp_path / "none", "a.txt"))
    with pytest.raises(DataError, match=r"the splits dev, test; give one as .*two:SPLIT"):
        data_paths(touch(tmp_path / "two", "dev.csv", "test.csv"))
    touch(tmp_path / "sets", "main/train.parquet", "socratic/train.parquet")
    with pytest.raises(DataError, match=r"several times; give one of .*sets/main, .*sets/socratic"):
        data_paths(tmp_path / "sets")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ConfigError, match="is a pipe or a device"):
        data_paths(tmp_path / "pipe.jsonl")


def test_a_data_set_of_the_local_cache_is_found_by_its_name(hub: Path):
    cached(hub, "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet", "README.md")
    for given in ("openai/gsm8k", "openai/gsm8k:train", "openai/gsm8k/main:train"):
        assert names(given) == ["train-00000-of-00001.parquet"]
    (test,) = data_paths("openai/gsm8k:test")
    assert test.name.startswith("test-") and source_of(test) == "openai/gsm8k"


def test_a_data_set_that_is_not_in_the_cache_says_what_to_download(hub: Path):
    for given in ("openai/gsm8k", "openai/gsm8k:train"):
        with pytest.raises(DataError, match=r"run `hf download openai/gsm8k --repo-type dataset` first"):
            data_paths(given)
    with pytest.raises(DataError, match=r"folder .*nowhere does not exist$"):
        data_paths(str(hub / "nowhere" / "x.jsonl"))


@pytest.mark.parametrize(
    ("name", "suffix", "source"),
    [
        ("train.jsonl", ".jsonl", "train"),
        ("my.sums.CSV.gz", ".csv", "my.sums"),
        ("train-00000-of-00012-0f3a.parquet", ".parquet", "train"),
        ("train/0003.parquet", ".parquet", "train"),
        ("train/part-00000-a1.snappy.parquet", ".parquet", "train"),
        ("2024_math.json.zst", ".json", "2024_math"),
        ("a.parquet.gz", None, None),
        ("a.gz", None, None),
        ("csv", None, None),
    ],
)
def test_the_name_of_a_file_says_what_it_is_and_where_its_rows_are_from(name: str, suffix: str, source: str | None):
    assert suffix_of(Path(name)) == suffix
    if source:
        assert source_of(Path("/data") / name) == source


def test_many_files_are_not_all_named(tmp_path: Path):
    touch(tmp_path, *(f"{i}.jsonl" for i in range(9)))
    assert FileRows(f"{tmp_path}/*").file_names().endswith("2.jsonl and 6 more")
