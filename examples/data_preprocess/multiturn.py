"""Conversations of several turns to fine-tune on: train.parquet and test.parquet with columns `messages` and `tools`.

    python3 examples/data_preprocess/multiturn.py --local_dataset_path DIR [--local_save_dir ~/data/multiturn]

DIR holds train.jsonl (or parquet) and perhaps test.jsonl. A row has `messages` [{role, content}], or `conversations`
[{from, value}] as ShareGPT writes them, and perhaps `tools`. Without test.jsonl a share of the conversations, chosen by
their text, becomes test.parquet.
"""

import json
from pathlib import Path

from conversion import SPLITS, DataSet, Dropped, Row, find_files, run_script, script_parser, share_of

from verl.data.chat import read_messages
from verl.utils.errors import DataError

ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}  # ShareGPT's names


def main() -> None:
    parser = script_parser(__doc__, "multiturn")
    parser.add_argument("--test_share", type=float, default=0.05, help="share of test rows (default: %(default)s)")
    options = parser.parse_args()
    if not 0 < options.test_share < 1:
        parser.error(f"--test_share {options.test_share} must be above 0 and below 1")

    def splits_of(raw: Row) -> tuple[str, ...]:
        text = json.dumps(raw.get("messages") or raw.get("conversations"), default=str, sort_keys=True)
        return ("test" if share_of(text) < options.test_share else "train",)

    home = "a set of conversations on the Hugging Face hub, or your own"
    whole = options.local_dataset_path is not None and not has_test(Path(options.local_dataset_path).expanduser())
    raw_splits = {"train": "train"} if whole else {split: split for split in SPLITS}
    run_script(DataSet("multiturn", home, (), convert, raw_splits, splits_of if whole else None), options)


def has_test(folder: Path) -> bool:
    try:
        return bool(find_files(folder, "test"))
    except DataError:
        return False


def convert(raw: Row, split: str, index: int) -> Row:
    turns = raw.get("messages") or [
        {"role": ROLES.get(turn.get("from"), turn.get("from")), "content": turn.get("value")}
        for turn in raw.get("conversations") or []
    ]
    try:
        messages = read_messages(turns)
    except ValueError as error:
        raise Dropped(str(error)) from error
    if messages[0]["role"] == "assistant":
        raise Dropped("the conversation begins with an answer")
    if messages[-1]["role"] != "assistant":
        raise Dropped("the conversation does not end with an answer")
    tools = raw.get("tools") or None
    return {"messages": messages, "tools": tools if tools is None or isinstance(tools, str) else json.dumps(tools)}


if __name__ == "__main__":
    main()
