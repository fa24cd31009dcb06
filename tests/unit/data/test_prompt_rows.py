"""Tables of questions and answers as prompts of a run."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from verl.commands.quickstart.small_model import make_tokenizer
from verl.config import DataConfig, load_config
from verl.data.prompt_rows import holds_messages
from verl.data.prompts import PromptDataset, load_prompts
from verl.rewards.scorer_lookup import score_row
from verl.utils.errors import DataError

TOKENIZER = make_tokenizer("0123456789+=?abcdefghijklmnopqrstuvwxyz ")
ROWS = [{"question": "1+1=", "answer": "2"}, {"question": "2+2=", "answer": "4"}]
QA = {"prompt_key": "question", "answer_key": "answer"}


def write(folder: Path, rows: list[dict[str, Any]], name: str = "sums.jsonl") -> Path:
    path = folder / name
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        pa.csv.write_csv(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, **settings: Any) -> PromptDataset:
    return load_prompts(str(path), DataConfig(**{"max_prompt_length": 200, "shuffle": False, **settings}), TOKENIZER)


@pytest.mark.parametrize("name", ["sums.jsonl", "sums.csv", "sums.parquet"])
def test_a_table_of_questions_and_answers_is_rows_of_a_run(tmp_path: Path, name: str):
    prompts = list(load(write(tmp_path, ROWS, name), **QA, system_prompt="add"))
    assert [p.ground_truth for p in prompts] == ["2", "4"] and [p.data_source for p in prompts] == ["sums", "sums"]
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}]
    assert prompts[0].messages == messages and prompts[0].text == "add1+1="
    assert prompts[0].columns["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert [p.data_source for p in load(tmp_path / name, **QA, data_source="mine")] == ["mine", "mine"]


def test_what_a_row_says_itself_stays(tmp_path: Path):
    own = [{"role": "system", "content": "say"}, {"role": "user", "content": "3"}]
    row = {"question": own, "answer": 0, "data_source": "x", "reward_model": {"style": "s", "ground_truth": "9"}}
    (prompt,) = load(write(tmp_path, [row]), **QA, system_prompt="add", data_source="mine")
    assert prompt.messages == own and prompt.data_source == "x"
    assert prompt.columns["reward_model"] == {"style": "s", "ground_truth": 0}


def test_other_prompts_of_the_same_file_have_another_digest(tmp_path: Path):
    path = write(tmp_path, [{**row, "other": "5"} for row in ROWS])
    digests = [load(path, **QA, **more).digest for more in ({}, {"system_prompt": "a"}, {"system_prompt": "b"})]
    digests.append(load(path, prompt_key="question", answer_key="other").digest)
    assert len(set(digests)) == 4


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        (
            {"question": "1", "answer": "2"},
            {},
            ["'prompt': set data.prompt_key=question", "'reward_model': set data.answer_key=answer",
             "'data_source': set data.data_source=NAME (reward.scorer=math, gsm8k or exact scores any)"],
        ),
        ({"Problem": "1", "solution": "2"}, {}, ["data.prompt_key=Problem", "data.answer_key=solution"]),
        ({"q": "1", "a": "2"}, {}, ["data.prompt_key=COLUMN, one of a, q", "data.answer_key=COLUMN, one of a, q"]),
        ({"qestion": "1", "answer": "2"}, QA, ["no column 'question': set data.prompt_key=qestion"]),
        ({"question": "1", "anser": "2"}, QA, ["no column 'answer': set data.answer_key=anser"]),
        ({"question": "1", "answer": None}, QA, ["column 'answer' is null"]),
        ({"question": "1", "answer": " "}, QA, ["column 'answer' is empty"]),
    ],
)  # fmt: skip
def test_all_missing_columns_are_named_at_once_with_the_keys_that_fix_them(tmp_path: Path, row, settings, said):
    with pytest.raises(DataError) as error:
        load(write(tmp_path, [row]), **settings)
    assert "sums.jsonl line 1: " in str(error.value)
    assert [text for text in said if text not in str(error.value)] == []


def test_the_keys_that_a_message_names_fix_the_rows(tmp_path: Path):
    path = write(tmp_path, [{"problem": "1+1=", "target": "2"}])
    with pytest.raises(DataError) as error:
        load(path)
    keys = re.findall(r"set (data\.\w+=\w+)", str(error.value))
    config = load_config([*keys, "data.max_prompt_length=200"]).data
    (prompt,) = load_prompts(str(path), config, TOKENIZER)
    assert (prompt.ground_truth, prompt.data_source) == ("2", "NAME")


WRITTEN = [{"role": "user", "content": "1+1="}]


@pytest.mark.parametrize("text", [json.dumps(WRITTEN), str(WRITTEN), " " + json.dumps(WRITTEN * 2, indent=1)])
def test_messages_written_as_text_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str):
    load(write(tmp_path, [ROWS[0], {"question": text, "answer": "2"}]), **QA)
    assert "1 rows have a list of {role, content} as text" in caplog.text and "sums.jsonl line 2" in caplog.text


@pytest.mark.parametrize(
    "text", ["[1, 2] has which role?", '["role"]', "[" * 9_000 + "role", "role", '[{"role": 1}]', 5]
)
def test_other_texts_are_no_messages(text: object):
    assert not holds_messages(text)


def test_gsm8k_as_it_is_published_is_scored_by_the_number_behind_its_marks(test_data: Path):
    prompts = load(test_data / "gsm8k" / "test.jsonl", **QA, max_prompt_length=4000)
    assert len(prompts) == 1319 and prompts.data_sources.keys() == {"test"}
    first = prompts[0]
    scores = [score_row("test", text, first.ground_truth, scorer="gsm8k")["score"] for text in ("#### 18", "#### 19")]
    assert scores == [1.0, 0.0] and first.ground_truth.endswith("#### 18")
