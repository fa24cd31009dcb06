"""Rows of data files: every format, and every complaint with its file and row."""

import bz2
import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.data.data_files import FileRows
from verl.utils.errors import DataError

ROWS = [{"a": i, "nested": {"x": [i, i + 1]}} for i in range(5)]


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows, indent=1))
    return path


@pytest.mark.parametrize("name", ["r.parquet", "r.jsonl", "r.json"])
def test_every_format_gives_the_same_rows_by_number_and_in_order(tmp_path, name):
    rows = FileRows(str(write(tmp_path / name, ROWS)))
    assert list(rows) == ROWS
    assert [rows[i] for i in range(len(rows))] == ROWS


def test_json_suffix_may_hold_one_object_per_line(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert list(FileRows(path)) == ROWS


def test_several_files_follow_each_other_and_rows_know_their_file(tmp_path):
    first, second = write(tmp_path / "a.parquet", ROWS[:3]), write(tmp_path / "b.jsonl", ROWS[3:])
    rows = FileRows([str(first), str(second)])
    assert list(rows) == ROWS and rows[3] == ROWS[3]
    assert rows.location(2) == f"{first} row 2 (the first is 0)"
    assert rows.location(4) == f"{second} line 2"


def test_line_numbers_count_blank_lines(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text('{"a": 1}\n\n\n{"a": 2}\n')
    assert FileRows(path).location(1) == f"{path} line 4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": 2,}\n', "line 2: not valid JSON"),
        ('{"a": 1}\n\n[1, 2]\n', "line 3: expected an object, found [1, 2]"),
        ('[{"a": 1},\n 7]', "row 1 (the first is 0): expected an object, found 7"),
        ('[{"a": 1},\n {]', "line 2: not valid JSON"),
        ("\n", "no rows"),
        ('{"a": 1}\n{"a": ' + "[" * 100 + "]" * 100 + "}", "line 2 nests lists or objects more than 100 deep"),
        ('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}", "line 1 nests lists or objects more than 100 deep"),
        ('[{"a": ' + '{"b":' * 10_000 + "1" + "}" * 10_000 + "}]", "a row nests lists or objects more than 100 deep"),
        ('{"a": "\\ud83d\\ude00"}\n{"a": ["\\uD83D"]}', r"line 2: '\ud83d' is half of a surrogate pair"),
        (r'[{"a": "\udc00"}]', r"row 0 (the first is 0): '\udc00' is half"),
    ],
)
def test_a_broken_json_file_is_named_with_the_place(tmp_path, text, message):
    path = tmp_path / "broken.jsonl"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        FileRows(path)
    assert str(path) in str(error.value) and message in str(error.value)


def test_a_torn_parquet_file_is_named(tmp_path):
    path = write(tmp_path / "r.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"r\.parquet cannot be read as parquet"):
        FileRows(path)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("train.parqet", r"does not exist; did you mean 'train.parquet'"),
        ("nowhere/x.jsonl", "folder .*nowhere does not exist"),
        ("notes.txt", r"unknown suffix '.txt'; known: .parquet; .json, .jsonl, .csv and .tsv, also as .gz, .bz2"),
    ],
)
def test_a_path_that_cannot_be_used_says_what_to_give_instead(tmp_path, given, message):
    write(tmp_path / "train.parquet", ROWS)
    (tmp_path / "notes.txt").write_text("hi")
    with pytest.raises(DataError, match=message):
        FileRows(tmp_path / given)


def test_remote_files_and_empty_lists_are_refused():
    with pytest.raises(DataError, match="remote files are not supported"):
        FileRows("hdfs://host/x.parquet")
    with pytest.raises(DataError, match="no data files"):
        FileRows([])


def test_the_digest_follows_content_and_order_but_not_the_place(tmp_path):
    (tmp_path / "moved").mkdir()
    a, b = write(tmp_path / "a.jsonl", ROWS[:2]), write(tmp_path / "b.jsonl", ROWS[2:])
    moved = write(tmp_path / "moved" / "c.jsonl", ROWS[:2])
    assert FileRows([a, b]).digest == FileRows([moved, b]).digest
    assert FileRows([a, b]).digest != FileRows([b, a]).digest
    write(moved, ROWS[1:3])
    assert FileRows([a, b]).digest != FileRows([moved, b]).digest


def zstandard(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(content)
    return sink.getvalue().to_pybytes()


PACK = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard}


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_lines_are_the_same_rows_and_a_cut_file_is_named(tmp_path, suffix):
    write(tmp_path / "train.jsonl", ROWS)
    packed = PACK[suffix]((tmp_path / "train.jsonl").read_bytes())
    (tmp_path / f"train.jsonl.{suffix}").write_bytes(packed)
    assert list(FileRows(tmp_path / f"train.jsonl.{suffix}")) == list(FileRows(tmp_path / "train.jsonl"))
    for content in (packed[:-10], b"{}"):
        (tmp_path / f"cut.jsonl.{suffix}").write_bytes(content)
        with pytest.raises(DataError, match=rf"cut\.jsonl\.{suffix} cannot be unpacked"):
            FileRows(tmp_path / f"cut.jsonl.{suffix}")


def test_a_table_of_texts_keeps_every_cell_as_it_is_written(tmp_path):
    (tmp_path / "a.csv").write_bytes('\ufeffq,a\r\n"1, ""or""\r\n2",007\r\n\r\nNA,\r\n'.encode())
    rows = FileRows(tmp_path / "a.csv")
    assert list(rows) == [{"q": '1, "or"\r\n2', "a": "007"}, {"q": "NA", "a": ""}]
    assert rows.location(1) == f"{tmp_path / 'a.csv'} line 5"
    (tmp_path / "a.tsv").write_text("q\ta\n1,2\t" + "3" * 200_000 + "\n")
    assert list(FileRows(tmp_path / "a.tsv")) == [{"q": "1,2", "a": "3" * 200_000}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n1,2,3\n", "line 3: more or fewer values than the 2 columns a, b"),
        ("a,b\n1\n", "line 2: more or fewer values"),
        ("a,a\n1,2\n", "two columns are named 'a'"),
        ('a,b\n1,"2\n', "unexpected end of data"),
        ("a,b\n", "no rows"),
        ("", "no rows"),
    ],
)
def test_a_broken_table_is_named_with_the_line(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=message) as error:
        FileRows(tmp_path / "a.csv")
    assert str(tmp_path / "a.csv") in str(error.value)
