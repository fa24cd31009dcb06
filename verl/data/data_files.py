"""Rows of data files with their location, so that every error can name the file and the row.

A data file is parquet (.parquet), JSON lines (.jsonl, .json), one JSON array (.json) or a table of texts with a line of
names (.csv, .tsv); all but parquet may be compressed. Needs neither torch nor a tokenizer.
"""

import bisect
import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from verl.config import DataConfig
from verl.data.file_places import KNOWN, data_paths, source_of, suffix_of
from verl.data.prompt_rows import complete_row
from verl.utils.errors import DataError

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
    """The rows of one or several files in the order given, as they are, or completed as `config` says."""

    def __init__(self, files: str | Path | Sequence[str | Path], config: DataConfig | None = None):
        self._files, self._config = [open_data_file(path) for path in data_paths(files)], config
        self._starts = [0]
        for file in self._files:
            self._starts.append(self._starts[-1] + len(file))
        if len(self) == 0:
            raise DataError(f"{self.file_names()}: no rows")
        contents = [file.digest for file in self._files]
        if config is not None:  # what makes other prompts of the same files
            contents += [f"{name}={config[name]}" for name in ("answer_key", "system_prompt") if config[name]]
        self.digest = hashlib.sha256("".join(contents).encode()).hexdigest()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, row = self._locate(index)
        return self._complete(file.row(row), file)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for file in self._files:
            for row in file.rows():
                yield self._complete(row, file)

    def _complete(self, row: dict[str, Any], file: "ParquetFile | TextFile") -> dict[str, Any]:
        return complete_row(row, self._config, self._source(file, self._config.reward_fn_key)) if self._config else row

    def _source(self, file: "ParquetFile | TextFile", column: str) -> str | None:
        return None if column in file.columns else source_of(file.path)

    def source(self, index: int, column: str) -> str | None:
        """The name of a row's file, which is its data source where the file has no `column` that says it; else None."""
        return self._source(self._locate(index)[0], column)

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
        names = [str(file.path) for file in self._files]
        return ", ".join(names) if len(names) < 6 else f"{', '.join(names[:3])} and {len(names) - 3} more"

    def _locate(self, index: int) -> "tuple[ParquetFile | TextFile, int]":
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} rows")
        number = bisect.bisect_right(self._starts, index) - 1
        return self._files[number], index - self._starts[number]


def open_data_file(path: Path) -> "ParquetFile | TextFile":
    """The file, opened by the class of its suffix; DataError for an unknown suffix."""
    suffix = suffix_of(path)
    if suffix is None:
        raise DataError(f"{path} has an unknown suffix {path.suffix!r}; known: {KNOWN}")
    return ParquetFile(path) if suffix == ".parquet" else TextFile(path, suffix)


class ParquetFile:
    """One parquet file, in memory as an Arrow table."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read as parquet: {error}") from error
        self.columns, self.digest = self.table.column_names, file_digest(path)

    def __len__(self) -> int:
        return self.table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        return self.table.slice(index, 1).to_pylist()[0]

    def rows(self) -> Iterator[dict[str, Any]]:
        for batch in self.table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()

    def row_label(self, index: int) -> str:
        return f"row {index} (the first is 0)"


class TextFile:
    """One file of JSON objects (one per line, or all of them in one array), or of lines of texts below their names."""

    def __init__(self, path: Path, suffix: str):
        self.path, self._is_array = path, False
        try:
            with _open_text(path) as file:
                text = file.read()
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8 text: {error}") from error
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise DataError(
                f"{path} cannot be {'unpacked' if path.suffix.lower() != suffix else 'read'}: {error}"
            ) from error
        self._has_surrogate_escapes = _SURROGATE.search(text) is not None
        if suffix in (".csv", ".tsv"):
            self._numbers, self._rows = self._parse_table(text, "\t" if suffix == ".tsv" else ",")
        else:
            self._is_array = text.lstrip()[:1] == "["
            self._numbers, self._rows = self._parse_array(text) if self._is_array else self._parse_lines(text)
        self.columns, self.digest = {name for row in self._rows for name in row}, file_digest(path)

    def _parse_table(self, text: str, delimiter: str) -> tuple[list[int], list[dict[str, Any]]]:
        csv.field_size_limit(2**31 - 1)  # a text may be longer than the 128 KiB of the default
        reader, numbers, rows = csv.DictReader(io.StringIO(text), delimiter=delimiter, strict=True), [], []
        try:
            names = list(reader.fieldnames or ())
            for row in reader:
                if None in row or None in row.values():
                    raise csv.Error(f"more or fewer values than the {len(names)} columns {', '.join(names)}")
                numbers.append(reader.line_num)
                rows.append(row)
            if twice := [name for name in names if names.count(name) > 1]:
                raise csv.Error(f"two columns are named {twice[0]!r}")
        except csv.Error as error:
            raise DataError(f"{self.path} line {reader.line_num}: {error}") from error
        return numbers, rows

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


def _open_text(path: Path) -> IO[str]:
    """The file as text, unpacked; a mark of byte order is dropped."""
    suffix, newline = path.suffix.lower(), "" if suffix_of(path) in (".csv", ".tsv") else None
    if suffix == ".zst":
        return io.TextIOWrapper(pa.input_stream(str(path), compression="zstd"), "utf-8-sig", newline=newline)
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}.get(suffix, open)
    file: IO[str] = opener(path, "rt", encoding="utf-8-sig", newline=newline)
    return file
