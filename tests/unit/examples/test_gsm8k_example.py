"""The GSM8K preparation script, run as printed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "data_preprocess" / "gsm8k.py"
RAW = {
    "train": [{"question": "1+1?", "answer": "<<1+1=2>>2\n#### 2"}, {"question": "600*2?", "answer": "ok\n#### 1,200"}],
    "test": [{"question": "0-4?", "answer": "\n#### -4"}],
}


def run(*arguments, **env):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, check=False)


def write_jsonl(folder, raw=RAW):
    for split, rows in raw.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(folder, split):
    return pq.read_table(folder / f"{split}.parquet").to_pylist()


def test_the_original_jsonl_becomes_rows_in_verls_format(tmp_path):
    write_jsonl(tmp_path)
    result = run("--local_dataset_path", tmp_path, "--local_save_dir", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    second = read(tmp_path / "out", "train")[1]
    assert second["data_source"] == "openai/gsm8k" and second["ability"] == "math"
    assert second["reward_model"] == {"style": "rule", "ground_truth": "1200"}
    assert second["extra_info"] == {"split": "train", "index": 1, **RAW["train"][1]}
    (message,) = second["prompt"]
    assert message["role"] == "user" and message["content"].startswith("600*2? ") and '"####"' in message["content"]
    assert read(tmp_path / "out", "test")[0]["reward_model"]["ground_truth"] == "-4"


@pytest.mark.parametrize(
    "layout", ["{split}.parquet", "{split}-00000-of-00001.parquet", "main/{split}-00000-of-00001.parquet"]
)
def test_a_parquet_folder_gives_the_same_rows(tmp_path, layout):
    write_jsonl(tmp_path)
    for split, rows in RAW.items():
        path = tmp_path / "hub" / layout.format(split=split)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    run("--local_dataset_path", tmp_path, "--local_save_dir", tmp_path / "a")
    result = run("--local_dataset_path", tmp_path / "hub", "--local_save_dir", tmp_path / "b")
    assert result.returncode == 0, result.stderr
    assert all(read(tmp_path / "a", split) == read(tmp_path / "b", split) for split in RAW)


def test_a_broken_row_is_dropped_and_named_and_no_row_at_all_leaves_the_old_files_alone(tmp_path):
    write_jsonl(tmp_path, {**RAW, "test": [*RAW["test"], {"question": "?", "answer": "no number"}]})
    result = run("--local_dataset_path", tmp_path, "--local_save_dir", tmp_path)
    assert result.returncode == 0 and "1 rows, of 2 that were read" in result.stdout
    assert "dropped 1: the answer does not end in '#### number'" in result.stdout
    assert f"{tmp_path / 'test.jsonl'} line 2" in result.stdout
    before = (tmp_path / "train.parquet").read_bytes()
    write_jsonl(tmp_path, {"train": RAW["train"][:1], "test": [{"question": "?", "answer": "no number"}]})
    result = run("--local_dataset_path", tmp_path, "--local_save_dir", tmp_path)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "no row is left for test.parquet" in result.stderr
    assert (tmp_path / "train.parquet").read_bytes() == before


def test_options_that_cannot_work_are_refused_with_the_way_out(tmp_path):
    assert "--local_dataset_path is required: nothing is downloaded" in run().stderr
    assert "must be the folder with the raw data" in run("--local_dataset_path", tmp_path).stderr
    write_jsonl(tmp_path)
    copied = ("--local_save_dir", tmp_path / "out", "--hdfs_dir", "hdfs://nowhere/x")
    result = run("--local_dataset_path", tmp_path, *copied, PATH="")
    assert result.returncode == 1 and "need the command `hdfs`" in result.stderr


def test_the_old_name_of_the_target_folder_works_with_a_hint(tmp_path):
    write_jsonl(tmp_path)
    result = run("--local_dataset_path", tmp_path, "--local_dir", tmp_path / "out")
    assert "old name of --local_save_dir" in result.stderr and len(read(tmp_path / "out", "train")) == 2


def test_it_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch must not be imported here')")
    write_jsonl(tmp_path)
    result = run("--local_dataset_path", tmp_path, "--local_save_dir", tmp_path / "out", PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr


def test_all_of_gsm8k_is_converted(tmp_path, test_data):
    result = run("--local_dataset_path", test_data / "gsm8k", "--local_save_dir", tmp_path)
    assert result.returncode == 0, result.stderr
    assert [len(read(tmp_path, split)) for split in ("train", "test")] == [7473, 1319]
