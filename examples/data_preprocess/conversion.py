"""What the scripts in this folder share: options, reading a folder, dropping rows by reason, two files and their card.

A script describes its data set (`DataSet`) and calls `run_script`. Nothing is downloaded, and nothing is written unless
both splits can be.
"""

import argparse
import hashlib
import io
import itertools
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl import __version__
from verl.data.data_files import FileRows, file_digest
from verl.utils import hadoop
from verl.utils.errors import DataError, VerlError
from verl.utils.paths import atomic_write_bytes, atomic_write_text, expand_home

Row = dict[str, Any]
SPLITS = ("train", "test")
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
CARD = "data_card.md"
EXAMPLE_LENGTH = 200  # characters of a dropped row on the card


class Dropped(Exception):
    """Raised for a row that cannot be used, with the reason."""


@dataclass(frozen=True)
class DataSet:
    """How a raw data set becomes rows.

    `convert(raw, split, number)` makes one row and raises `Dropped`; `number` counts the raw rows of the split.
    """

    name: str  # the folder below ~/data that is written by default
    home: str  # where to get the raw data
    columns: tuple[str, ...]  # the raw columns that are read
    convert: Callable[[Row, str, int], Row]
    raw_splits: Mapping[str, str] = field(
        default_factory=lambda: {split: split for split in SPLITS}
    )  # raw -> ours; a|b: either name
    splits_of: Callable[[Row], tuple[str, ...]] | None = None  # of a raw row, where the raw data has one split only
    notes: tuple[str, ...] = ()  # what a user of the files should know


@dataclass
class SplitRecord:
    """What became of the raw rows of one split."""

    read: int = 0
    rows: list[Row] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> rows
    examples: dict[str, str] = field(default_factory=dict)  # reason -> the first of them


def script_parser(doc: str, name: str) -> argparse.ArgumentParser:
    """The options of every script; `name` is the default folder below ~/data."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", help="folder with the raw data (parquet, jsonl, json, or these as .gz)")
    parser.add_argument("--local_save_dir", default=f"~/data/{name}", help="where both files go (default: %(default)s)")
    parser.add_argument("--local_dir", help="old name of --local_save_dir")
    parser.add_argument("--hdfs_dir", help="also copy what is written to this folder (hdfs://…, or a path)")
    return parser


def run_script(data_set: DataSet, options: argparse.Namespace) -> None:
    """Convert the folder that the options name; exit code 1 and one line where that cannot be done."""
    if options.local_dataset_path is None:
        sys.exit(f"error: --local_dataset_path is required: nothing is downloaded here. Get it from {data_set.home}")
    if options.local_dir is not None:
        print("--local_dir is the old name of --local_save_dir; please use the new one", file=sys.stderr)
        options.local_save_dir = options.local_dir
    try:
        source = expand_home(options.local_dataset_path, "--local_dataset_path")
        target = expand_home(options.local_save_dir, "--local_save_dir")
        write_files(convert_folder(data_set, source), data_set, source, target)
        if options.hdfs_dir is not None:
            copy_files(target, options.hdfs_dir)
    except (VerlError, OSError) as error:
        sys.exit(f"error: {error}")


def find_files(folder: Path, split: str) -> list[Path]:
    """The files of a raw split: `train.jsonl`, `train-00000-of-00002.parquet`, `…_train.jsonl`, here or in a folder.

    A split may go by several names: `validation|val`.
    """
    below = ("", "data/", "main/", "default/", "*/")
    for place, name, suffix in itertools.product(below, split.split("|"), SUFFIXES):
        for pattern in (f"{name}{suffix}", f"{name}-*{suffix}", f"*_{name}{suffix}"):
            if files := sorted(folder.glob(place + pattern)):
                return files
    split = split.partition("|")[0]
    raise DataError(
        f"{folder} holds no {split}.jsonl, {split}.parquet or {split}-*.parquet (also looked for in its folders, and "
        f"with .json and .gz); --local_dataset_path must be the folder with the raw data"
    )


def convert_folder(data_set: DataSet, source: Path) -> dict[str, SplitRecord]:
    """The rows of both splits; DataError where a split has none, or where the columns are those of other data."""
    records = {split: SplitRecord() for split in SPLITS}
    for raw_split, split in data_set.raw_splits.items():
        rows = FileRows(find_files(source, raw_split))
        started = last = time.monotonic()
        for number, raw in enumerate(rows):
            if number == 0 and (missing := [name for name in data_set.columns if name not in raw]):
                found = ", ".join(sorted(raw))
                raise DataError(f"{rows.location(0)} has no column {missing[0]!r}, so it is other data; it has {found}")
            for place in data_set.splits_of(raw) if data_set.splits_of else (split,):
                add_row(records[place], data_set, raw, place, number, rows)
            if (now := time.monotonic()) - last >= 2.0:
                last = now
                print(f"{raw_split}: {number + 1:,} of {len(rows):,} rows, {now - started:.0f} s", file=sys.stderr)
    for split, record in records.items():
        if not record.rows:
            why = "; ".join(f"{count} x {reason}, as {record.examples[reason]}" for reason, count in reasons(record))
            raise DataError(f"no row is left for {split}.parquet: {why or 'there are none'}")
    return records


def add_row(record: SplitRecord, data_set: DataSet, raw: Row, split: str, number: int, rows: FileRows) -> None:
    """Convert one raw row into `record`, or count why it is dropped."""
    record.read += 1
    try:
        record.rows.append(data_set.convert(raw, split, number))
    except Dropped as reason:
        record.dropped[str(reason)] = record.dropped.get(str(reason), 0) + 1
        if str(reason) not in record.examples:
            shown = " ".join(repr({name: raw.get(name) for name in data_set.columns}).split())
            cut = "…" if len(shown) > EXAMPLE_LENGTH else ""
            record.examples[str(reason)] = f"{rows.location(number)}: {shown[:EXAMPLE_LENGTH]}{cut}"


def reasons(record: SplitRecord) -> list[tuple[str, int]]:
    """(reason, dropped rows), the most frequent one first."""
    return sorted(record.dropped.items(), key=lambda item: -item[1])


def write_files(records: Mapping[str, SplitRecord], data_set: DataSet, source: Path, target: Path) -> None:
    """Write train.parquet, test.parquet and the card, each whole or not at all."""
    raw_files = list(dict.fromkeys(path for split in data_set.raw_splits for path in find_files(source, split)))
    tables = {target / f"{split}.parquet": to_table(records[split].rows) for split in SPLITS}
    for path in tables:
        if any(path.resolve() == raw.resolve() for raw in raw_files):
            raise DataError(f"{path} is raw data, and would be written over; give another --local_save_dir")
    lines = card(records, data_set, source, raw_files, next(iter(tables.values())).schema)
    for path, table in tables.items():
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        atomic_write_bytes(path, buffer.getvalue())
    atomic_write_text(target / CARD, "\n".join(lines) + "\n")
    for path in tables:
        record = records[path.stem]
        print(f"{path}: {len(record.rows):,} rows, of {record.read:,} that were read")
        for reason, count in reasons(record):
            print(f"  dropped {count:,}: {reason} (the first: {record.examples[reason]})")
    for note in data_set.notes:
        print(f"note: {note}")
    print(f"{target / CARD}: what was kept, what was dropped, and from which files")


def to_table(rows: list[Row]) -> pa.Table:
    try:
        return pa.Table.from_pylist(rows)
    except pa.ArrowException as error:
        raise DataError(
            f"the rows do not fit one parquet file ({error}): a column has values of several types"
        ) from error


def card(
    records: Mapping[str, SplitRecord], data_set: DataSet, source: Path, raw_files: list[Path], schema: pa.Schema
) -> list[str]:
    """The lines of the card. It has no date, so that the same files give the same card."""
    script = Path(sys.argv[0])
    out = [f"# {data_set.name}", "", f"Written by `{script.name}` of verl {__version__}, SHA-256 of the script:"]
    out += [f"`{file_digest(script)}`", ""]
    out += [f"{note}\n" for note in data_set.notes]
    out += ["| file | rows read | kept | dropped |", "|---|--:|--:|--:|"]
    for split, record in records.items():
        out.append(f"| {split}.parquet | {record.read:,} | {len(record.rows):,} | {record.read - len(record.rows):,} |")
    out += ["", "## Dropped", ""]
    for split, record in records.items():
        for reason, count in reasons(record):
            example = record.examples[reason].replace(f"{source}/", "").replace("`", "'")
            out.append(f"- {split}: {count:,} x {reason}. The first: `{example}`")
    if not any(record.dropped for record in records.values()):
        out.append("No row.")
    out += ["", "## Columns", "", *(f"- `{column.name}`: `{column.type}`" for column in schema)]
    out += ["", "## Raw files", "", "| file | bytes | SHA-256 |", "|---|--:|---|"]
    return out + [f"| {raw.relative_to(source)} | {raw.stat().st_size:,} | `{file_digest(raw)}` |" for raw in raw_files]


def copy_files(folder: Path, target: str) -> None:
    """Copy both files and the card to a folder in HDFS or on this machine."""
    hadoop.makedirs(target, exist_ok=True)
    for name in (*(f"{split}.parquet" for split in SPLITS), CARD):
        hadoop.copy(str(folder / name), f"{target.rstrip('/')}/{name}")
    print(f"copied to {target}")


def text_of(raw: Row, column: str) -> str:
    """A column that must hold text, as it is; Dropped without it."""
    value = raw.get(column)
    if not isinstance(value, str) or not value.strip():
        raise Dropped(f"no text in {column!r}")
    return value


def last_boxed(text: str) -> str:
    r"""What the last \boxed{} or \fbox{} of a text holds; Dropped where there is none, or where it is not closed."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start < 0:
        raise Dropped(r"no \boxed answer in the solution")
    rest = text[start:].removeprefix(r"\boxed").removeprefix(r"\fbox")
    if rest.startswith(" "):  # \boxed 5: the next word
        inner = re.split(r"[$\s]", rest.strip())[0]
    else:
        inner = rest[1 : closing_brace(rest)].strip() if rest.startswith("{") else ""
    if not inner:
        raise Dropped(r"the last \boxed answer is empty or not closed")
    return inner


def closing_brace(text: str) -> int:
    """Where the brace closes that `text` begins with; 0 where it does not."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return place
    return 0


def share_of(text: str) -> float:
    """A number in [0, 1) from the text alone, so that a row lands in the same split whatever surrounds it."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64


def with_tool(extra_info: dict[str, Any], tool: str, **create_kwargs: Any) -> dict[str, Any]:
    """`extra_info` of a row whose conversation needs `tool`, which is created with these arguments."""
    return {**extra_info, "need_tools_kwargs": True, "tools_kwargs": {tool: {"create_kwargs": create_kwargs}}}
