"""GSM8K as conversations to fine-tune on: train.parquet and test.parquet with a column `messages`.

    python3 examples/data_preprocess/gsm8k_multiturn_sft.py --local_dataset_path DIR [--local_save_dir ~/data/gsm8k_sft]

DIR is what examples/data_preprocess/gsm8k.py takes. Each row is a question and its worked answer; with --steps every
line of the answer is a separate assistant turn, and the user asks for the next one.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from gsm8k import INSTRUCTION, SPLITS, find_files, texts, write_table

from verl.data.data_files import FileRows
from verl.utils.errors import VerlError

NEXT = "Next step, please."


def main() -> None:
    """Read both splits, then write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", required=True, help="folder with the raw data (jsonl or parquet)")
    parser.add_argument("--local_save_dir", default="~/data/gsm8k_sft", help="where train.parquet and test.parquet go")
    parser.add_argument("--steps", action="store_true", help="one turn per line of the answer")
    options = parser.parse_args()
    source, target = Path(options.local_dataset_path).expanduser(), Path(options.local_save_dir).expanduser()
    tables = {}
    for split in SPLITS:
        rows = FileRows(find_files(source, split))
        conversations = [{"messages": messages(raw, rows.location(i), options.steps)} for i, raw in enumerate(rows)]
        tables[split] = pa.Table.from_pylist(conversations)
    for split, table in tables.items():
        write_table(table, target / f"{split}.parquet")


def messages(raw: dict[str, Any], where: str, steps: bool) -> list[dict[str, str]]:
    """The conversation of a raw row."""
    question, answer = texts(raw, where)
    out = []
    request = f"{question} {INSTRUCTION}"
    for turn in answer.splitlines() if steps else [answer]:
        out += [{"role": "user", "content": request}, {"role": "assistant", "content": turn}]
        request = NEXT
    return out


if __name__ == "__main__":
    try:
        main()
    except VerlError as error:
        sys.exit(f"error: {error}")
