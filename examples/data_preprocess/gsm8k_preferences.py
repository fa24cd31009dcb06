"""GSM8K as preference pairs: train.parquet and test.parquet with columns `prompt`, `chosen` and `rejected`.

    python3 examples/data_preprocess/gsm8k_preferences.py --local_dataset_path DIR [--local_save_dir ~/data/gsm8k_pairs]

DIR is what examples/data_preprocess/gsm8k.py takes. The chosen answer is the worked one; in the rejected one the last
two numbers before the end are wrong: each is larger by one.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from gsm8k import INSTRUCTION, SPLITS, find_files, texts, write_table

from verl.data.data_files import FileRows
from verl.utils.errors import VerlError

LAST_TWO_NUMBERS = re.compile(r"(\d+)(\D+)(\d+)(\D*)$")


def main() -> None:
    """Read both splits, then write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", required=True, help="folder with the raw data (jsonl or parquet)")
    parser.add_argument("--local_save_dir", default="~/data/gsm8k_pairs", help="where both files go")
    options = parser.parse_args()
    source, target = Path(options.local_dataset_path).expanduser(), Path(options.local_save_dir).expanduser()
    tables = {}
    for split in SPLITS:
        rows = FileRows(find_files(source, split))
        tables[split] = pa.Table.from_pylist([pair(raw, rows.location(i)) for i, raw in enumerate(rows)])
    for split, table in tables.items():
        write_table(table, target / f"{split}.parquet")


def pair(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The preference row of a raw row."""
    question, answer = texts(raw, where)
    wrong = LAST_TWO_NUMBERS.sub(lambda m: f"{int(m[1]) + 1}{m[2]}{int(m[3]) + 1}{m[4]}", answer)
    return {
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "chosen": answer,
        "rejected": wrong if wrong != answer else f"{answer}0",
    }


if __name__ == "__main__":
    try:
        main()
    except VerlError as error:
        sys.exit(f"error: {error}")
