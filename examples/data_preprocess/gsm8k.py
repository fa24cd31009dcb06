"""GSM8K as train.parquet and test.parquet in the row format of verl.

    python3 examples/data_preprocess/gsm8k.py --local_dataset_path DIR [--local_save_dir ~/data/gsm8k]

DIR holds the original train.jsonl and test.jsonl, or parquet files as the Hugging Face hub lays them out
(main/train-*.parquet, train-*.parquet or train.parquet, and the same for test).
"""

import argparse
import io
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.data_files import FileRows
from verl.utils.errors import DataError, VerlError
from verl.utils.paths import atomic_write_bytes

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Work it out step by step, and finish with a line that holds "####" followed by the final number.'
SPLITS = ("train", "test")
PATTERNS = ("{split}.jsonl", "{split}.parquet", "{split}-*.parquet", "main/{split}-*.parquet", "main/{split}.parquet")


def main(arguments: list[str] | None = None) -> None:
    """Read both splits, then write both files: a broken row leaves the old files as they are."""
    options = parse_arguments(arguments)
    source, target = Path(options.local_dataset_path).expanduser(), Path(options.local_save_dir).expanduser()
    tables = {split: convert(find_files(source, split), split) for split in SPLITS}
    for split, table in tables.items():
        write_table(table, target / f"{split}.parquet")


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", help="folder with the raw data (jsonl or parquet)")
    parser.add_argument("--local_save_dir", default="~/data/gsm8k", help="where train.parquet and test.parquet go")
    parser.add_argument("--local_dir", help="old name of --local_save_dir")
    parser.add_argument("--hdfs_dir", help="not supported: copy the two files yourself")
    options = parser.parse_args(arguments)
    if options.hdfs_dir is not None:
        parser.error("--hdfs_dir is not supported; write to --local_save_dir and copy with `hdfs dfs -put`")
    if options.local_dataset_path is None:
        parser.error(
            "--local_dataset_path is required: nothing is downloaded here. Get GSM8K from "
            "github.com/openai/grade-school-math (grade_school_math/data) or the Hugging Face hub (openai/gsm8k)"
        )
    if options.local_dir is not None:
        print("--local_dir is the old name of --local_save_dir; please use the new one", file=sys.stderr)
        options.local_save_dir = options.local_dir
    return options


def find_files(folder: Path, split: str) -> list[Path]:
    """The files of a split: those of the first pattern in PATTERNS that matches."""
    for pattern in PATTERNS:
        files = sorted(folder.glob(pattern.format(split=split)))
        if files:
            return files
    looked_for = ", ".join(pattern.format(split=split) for pattern in PATTERNS)
    raise DataError(f"{folder} holds none of {looked_for}; --local_dataset_path must be the folder with the raw data")


def write_table(table: pa.Table, path: Path) -> None:
    """Write one parquet file atomically."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    atomic_write_bytes(path, buffer.getvalue())
    print(f"{path}: {table.num_rows} rows")


def convert(files: list[Path], split: str) -> pa.Table:
    """All rows of a split in verl's format."""
    rows = FileRows(files)
    return pa.Table.from_pylist([convert_row(raw, split, i, rows.location(i)) for i, raw in enumerate(rows)])


def texts(raw: dict[str, Any], where: str) -> tuple[str, str]:
    """(question, answer) of a raw row."""
    for column in ("question", "answer"):
        if not isinstance(raw.get(column), str) or not raw[column].strip():
            raise DataError(f"{where}: column {column!r} must be a non-empty string, found {raw.get(column)!r}")
    return raw["question"], raw["answer"]


def convert_row(raw: dict[str, Any], split: str, index: int, where: str) -> dict[str, Any]:
    question, answer = texts(raw, where)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_number(answer, where)},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def final_number(answer: str, where: str) -> str:
    """The number after the last ####, without thousands separators."""
    found = re.search(r"####\s*(-?[\d,]*\.?\d+)\s*$", answer)
    if found is None:
        raise DataError(f"{where}: the answer does not end in '#### number': {answer[-60:]!r}")
    return found.group(1).replace(",", "")


if __name__ == "__main__":
    try:
        main()
    except VerlError as error:
        sys.exit(f"error: {error}")
