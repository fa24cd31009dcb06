"""Rows of data files with their location, so that every error can name the file and the row.

A data file is parquet (.parquet), JSON lines (.jsonl, .json) or one JSON array (.json); JSON may be compressed (.gz).
Needs neither torch nor a tokenizer.
"""

import bisect
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from verl.utils.errors import DataError
from verl.utils.paths import expand_home
from verl.utils.suggest import did_you_mean

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # an escaped surrogate: half of a pair, or part of a pair

MAX_DEPTH = 100  # of lists and objects in a row; what reads rows later is recursive
_TOO_DEEP = f"nests lists or objects more than {MAX_DEPTH} deep; flatten it, or store the inner part as text"


class DataRows(Protocol):
    """Numbered rows; `digest` changes if their content or order changes."""

    digest: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def __iter__(self) -> Iterator[dict[str, Any]]: ...

    def location(self, index: int) -> str:
        """The file and row number (or item) to name in an error message."""
        ...


class FileRows:
    """The rows of one or several files, one file after the other, in the order given."""

    def __init__(self, files: str | Path | Sequence[str | Path]):
        self._files = [open_data_file(path) for path in data_paths(files)]
        self._starts = [0]
        for file in self._files:
            self._starts.append(self._starts[-1] + len(file))
        if len(self) == 0:
            raise DataError(f"{self.file_names()}: no rows")
        self.digest = hashlib.sha256("".join(file.digest for file in self._files).encode()).hexdigest()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, row = self._locate(index)
        return file.row(row)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for file in self._files:
            yield from file.rows()

    def location(self, index: int) -> str:
        file, row = self._locate(index)
        return f"{file.path} {file.row_label(row)}"

    def arrow_table(self) -> pa.Table | None:
        """All rows with the types of their files; None if a file is not parquet, or types do not go together."""
        tables = [file.table for file in self._files if isinstance(file, ParquetFile)]
        if len(tables) < len(self._files):
            return None
        try:
            return pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException:
            return None

    def file_names(self) -> str:
        """The files, for messages."""
        return ", ".join(str(file.path) for file in self._files)

    def _locate(self, index: int) -> "tuple[ParquetFile | JsonFile, int]":
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} rows")
        number = bisect.bisect_right(self._starts, index) - 1
        return self._files[number], index - self._starts[number]


def data_paths(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files as a list of existing paths; DataError names the first that cannot be used."""
    paths = [files] if isinstance(files, str | Path) else list(files)
    if not paths:
        raise DataError(
            "no data files were given; set data.train_files and data.val_files to a path or a list of paths"
        )
    return [_existing_file(path) for path in paths]


def _existing_file(raw_path: str | Path) -> Path:
    if "://" in str(raw_path):
        raise DataError(f"{raw_path}: remote files are not supported; copy the file to a local disk and give that path")
    path = expand_home(raw_path, "data file")
    if path.is_dir():
        data_files = sorted(p.name for p in path.iterdir() if _suffix(p) in _FILE_CLASSES)
        listing = ", ".join(data_files[:5]) if data_files else "none"
        raise DataError(f"{path} is a folder; give the data files inside it (there: {listing})")
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.*") if _suffix(p) in _FILE_CLASSES]
        if siblings:
            raise DataError(f"{path} does not exist; {did_you_mean(path.name, siblings)}")
        hint = "holds no data file" if path.parent.is_dir() else "does not exist"
        raise DataError(f"{path} does not exist; the folder {path.parent} {hint}")
    return path


def open_data_file(path: Path) -> "ParquetFile | JsonFile":
    """The file, opened by the class of its suffix; DataError for an unknown suffix."""
    file_class = _FILE_CLASSES.get(_suffix(path))
    if file_class is None:
        raise DataError(f"{path} has an unknown suffix {path.suffix!r}; known: {', '.join(sorted(_FILE_CLASSES))}")
    return file_class(path)


def _suffix(path: Path) -> str:
    """ ".jsonl.gz" of a compressed file, else the last suffix."""
    return "".join(path.suffixes[-2:] if path.suffix.lower() == ".gz" else path.suffixes[-1:]).lower()


class ParquetFile:
    """One parquet file, in memory as an Arrow table."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as parquet: {error}") from error
        self.digest = file_digest(path)

    def __len__(self) -> int:
        return self.table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        return self.table.slice(index, 1).to_pylist()[0]

    def rows(self) -> Iterator[dict[str, Any]]:
        for batch in self.table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def row_label(self, index: int) -> str:
        return f"row {index} (the first is 0)"


class JsonFile:
    """One file of JSON objects: one per line, or all of them in one array."""

    def __init__(self, path: Path):
        self.path = path
        try:
            with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rt", encoding="utf-8") as file:
                text = file.read()
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text: {error}") from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{path} cannot be unpacked: {error}") from error
        self._has_surrogate_escapes = _SURROGATE.search(text) is not None
        self._is_array = text.lstrip()[:1] == "["
        self._numbers, self._rows = self._parse_array(text) if self._is_array else self._parse_lines(text)
        self.digest = file_digest(path)

    def _parse_array(self, text: str) -> tuple[list[int], list[dict[str, Any]]]:
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{self.path} line {error.lineno}: not valid JSON ({error.msg})") from error
        except RecursionError as error:
            raise DataError(f"{self.path}: a row {_TOO_DEEP}") from error
        for number, row in enumerate(rows):
            self._check(row, f"row {number} (the first is 0)")
        return list(range(len(rows))), rows

    def _parse_lines(self, text: str) -> tuple[list[int], list[dict[str, Any]]]:
        numbers, rows = [], []
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{self.path} line {number}: not valid JSON ({error.msg}): {_short(line)}") from error
            except RecursionError as error:
                raise DataError(f"{self.path} line {number} {_TOO_DEEP}") from error
            self._check(row, f"line {number}")
            numbers.append(number)
            rows.append(row)
        return numbers, rows

    def _check(self, row: object, location: str) -> None:
        if _is_deeper(row, MAX_DEPTH):
            raise DataError(f"{self.path} {location} {_TOO_DEEP}")
        if not isinstance(row, dict):
            raise DataError(f"{self.path} {location}: expected an object, found {_short(row)}")
        if not self._has_surrogate_escapes:
            return
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            surrogate = error.object[error.start]
            raise DataError(
                f"{self.path} {location}: {surrogate!a} is half of a surrogate pair, which is not valid text; write "
                "the whole character when creating the file, or leave it out"
            ) from error

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        return self._rows[index]

    def rows(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def row_label(self, index: int) -> str:
        number = self._numbers[index]
        return f"row {number} (the first is 0)" if self._is_array else f"line {number}"


def _is_deeper(value: object, limit: int) -> bool:
    """Whether lists and objects are nested more than `limit` deep, without recursion."""
    level = [value]
    for _ in range(limit):
        nested = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [inner for items in nested for inner in items if isinstance(inner, dict | list)]
        if not level:
            return False
    return True


def file_digest(path: Path) -> str:
    """SHA-256 of the file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


_FILE_CLASSES: dict[str, type[ParquetFile] | type[JsonFile]] = {
    ".parquet": ParquetFile,
    ".json": JsonFile,
    ".jsonl": JsonFile,
    ".json.gz": JsonFile,
    ".jsonl.gz": JsonFile,
}
