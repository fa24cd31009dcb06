"""The scripts of examples/data_preprocess on samples in the formats of the originals, each run as printed."""

import asyncio
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import ROOT
from verl.agent.tools import call_tool, load_tools
from verl.config.data import DataConfig
from verl.data.preferences import conversation_with
from verl.data.prompt_rows import check_row_and_read_messages
from verl.utils.external_code import load_object

SCRIPTS = ROOT / "examples" / "data_preprocess"
RAW = ROOT / "tests" / "data" / "raw"
NO_SCRIPTS = {"conversion", "hellaswag_reward"}
RL = {  # script -> raw folder, rows kept and read in train and test
    "math_dataset": ("math", (3, 6), (1, 1)),
    "hellaswag": ("hellaswag", (2, 5), (1, 1)),
    "aime2024_multiturn_w_tool": ("aime", (2, 3), (2, 3)),
    "preprocess_search_r1_dataset": ("search_r1", (2, 5), (1, 1)),
    "gsm8k": ("gsm8k", (2, 3), (1, 1)),
    "gsm8k_multiturn_w_tool": ("gsm8k", (2, 3), (1, 1)),
    "gsm8k_tool_agent_loop": ("gsm8k", (2, 3), (1, 1)),
}


def run(script: str, *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, cwd=ROOT, check=False)


def convert(script: str, raw: str | Path, out: Path, *more: str) -> dict[str, list[dict[str, Any]]]:
    done = run(script, "--local_dataset_path", RAW / raw, "--local_save_dir", out, *more)
    assert done.returncode == 0, done.stderr
    (card,) = out.rglob("data_card.md")
    return {split: pq.read_table(card.parent / f"{split}.parquet").to_pylist() for split in ("train", "test")}


def all_scripts() -> list[str]:
    return sorted({path.stem for path in SCRIPTS.glob("*.py")} - NO_SCRIPTS)


@pytest.mark.parametrize("script", all_scripts())
def test_help_has_an_example_and_the_flags(script: str):
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    assert f"python3 examples/data_preprocess/{script}.py --local_dataset_path DIR" in done.stdout
    for flag in ("--local_dataset_path", "--local_save_dir", "--local_dir", "--hdfs_dir"):
        assert flag in done.stdout


@pytest.mark.parametrize("script", RL)
def test_rows_are_such_that_a_run_reads_them_and_none_is_dropped_silently(script: str, tmp_path: Path):
    folder, *counts = RL[script]
    splits = convert(script, folder, tmp_path)
    card = (tmp_path / "data_card.md").read_text()
    for (split, rows), (kept, read) in zip(splits.items(), counts, strict=True):
        assert len(rows) == kept
        assert f"| {split}.parquet | {read} | {kept} | {read - kept} |" in card
        dropped = re.findall(rf"- {split}: (\d+) x", card)
        assert sum(map(int, dropped)) == read - kept
        for row in rows:
            check_row_and_read_messages(row, DataConfig())
            assert row["extra_info"]["split"] == split


def test_math_takes_the_last_boxed_answer(tmp_path: Path):
    rows = convert("math_dataset", "math", tmp_path)["train"]
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    assert truths == [r"\frac{5}{6}", r"\{-2, 2\}", "2"]
    assert {row["data_source"] for row in rows} == {"DigitalLearningGmbH/MATH-lighteval"}
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2]
    card = (tmp_path / "data_card.md").read_text()
    assert "no \\boxed answer in the solution. The first: " in card and "train.jsonl line 4" in card
    assert "is empty or not closed" in card and "no text in 'problem'" in card


def test_hellaswag_asks_for_a_letter_and_its_reward_reads_it(tmp_path: Path):
    rows = convert("hellaswag", "hellaswag", tmp_path)
    assert [row["reward_model"]["ground_truth"] for row in rows["train"]] == ["A", "D"]
    text = rows["train"][1]["prompt"][0]["content"]
    assert "How to wash hands. Take soap. Use water." in text and "D. drives into the sea." in text
    score = load_object(str(SCRIPTS / "hellaswag_reward.py"), "compute_score", "test")
    for answer, right in (("#### A or\n#### D", 1.0), ("#### (d)", 1.0), ("#### Dogs", 0.0), ("D", 0.0)):
        assert score("Rowan/hellaswag", answer, "D")["score"] == right


def test_the_tools_of_a_row_get_their_arguments(tmp_path: Path):
    aime = convert("aime2024_multiturn_w_tool", "aime", tmp_path / "a")["test"]
    assert [row["reward_model"]["ground_truth"] for row in aime] == ["204", "25"]
    search = convert("preprocess_search_r1_dataset", "search_r1", tmp_path / "s")["train"]
    assert search[1]["reward_model"]["ground_truth"] == {"target": ["Arthur's Magazine", "Arthurs"]}
    assert search[1]["data_source"] == "searchR1_hotpotqa"
    for row, tool in ((aime[0], "code_interpreter"), (search[1], "search")):
        extra = row["extra_info"]
        assert row["agent_name"] == "tool_agent" and extra["need_tools_kwargs"] is True
        kwargs = extra["tools_kwargs"][tool]["create_kwargs"]
        assert kwargs["ground_truth"] == row["reward_model"]["ground_truth"]


def test_the_gsm8k_tool_of_the_rows_judges_by_their_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    multiturn = convert("gsm8k_multiturn_w_tool", "gsm8k", tmp_path / "m")["train"]
    loop = convert("gsm8k_tool_agent_loop", "gsm8k", tmp_path / "l")["train"]
    assert [{**row, "agent_name": "tool_agent"} for row in multiturn] == loop
    monkeypatch.chdir(ROOT)
    tools = load_tools("examples/gsm8k_multiturn_w_tool/calc_gsm8k_reward.yaml", None)
    kwargs = loop[1]["extra_info"]["tools_kwargs"]["calc_gsm8k_reward"]["create_kwargs"]
    calls = (call_tool(tools, *tools, json.dumps({"answer": text}), kwargs) for text in ("1200", "12"))
    replies = [asyncio.run(call) for call in calls]
    assert [(reply.text, reward) for reply, reward, _ in replies] == [("This is right.", 1), ("This is not right.", 0)]


def test_dapo_keeps_each_problem_once_in_one_split(tmp_path: Path):
    splits = convert("dapo_multiturn_w_tool", "dapo", tmp_path, "--test_share", "0.4")
    problems = [row["prompt"][0]["content"] for rows in splits.values() for row in rows]
    assert len(problems) == len(set(problems)) == 12 and all(splits.values())
    card = (tmp_path / "data_card.md").read_text()
    assert sum(int(n) for n in re.findall(r"(\d+) x the problem is there already", card)) == 3
    assert "x the prompt is empty" in card and "x no ground_truth" in card
    longer = convert("dapo_multiturn_w_tool", "dapo", tmp_path, "--test_share", "0.8")  # a larger share only adds
    assert {r["extra_info"]["id"] for r in splits["test"]} < {r["extra_info"]["id"] for r in longer["test"]}
    assert "must be above 0" in run("dapo_multiturn_w_tool", "--local_dataset_path", RAW, "--test_share", "1").stderr


@pytest.mark.parametrize(("raw", "kept", "read"), [("hh_dahoas", 2, 8), ("hh_anthropic", 1, 2)])
def test_hh_rlhf_becomes_conversations_pairs_and_prompts(raw: str, kept: int, read: int, tmp_path: Path):
    name = "full_hh_rlhf"
    sft, rm, rl = (convert(name, raw, tmp_path / s, "--split", s)["train"] for s in ("sft", "rm", "rl"))
    assert len(sft) == len(rm) == len(rl) == kept
    assert f"| train.parquet | {read} | {kept} |" in (tmp_path / "rm" / "rm" / "data_card.md").read_text()
    for conversation, pair, prompt in zip(sft, rm, rl, strict=True):
        assert conversation["messages"] == conversation_with("chosen", "prompt", pair)
        assert conversation_with("rejected", "prompt", pair)[:-1] == prompt["prompt"]
        assert prompt["reward_model"]["style"] == "model"
        check_row_and_read_messages(prompt, DataConfig())
    last = rm[-1]
    assert [message["role"] for message in last["prompt"]] == ["user", "assistant", "user"]
    assert last["prompt"][0]["content"] == "Hi" and not last["chosen"].startswith(" ")


def test_conversations_of_either_kind_are_kept(tmp_path: Path):
    rows = convert("multiturn", "conversations", tmp_path)["train"]
    assert [len(row["messages"]) for row in rows] == [5, 4, 2]
    assert rows[1]["messages"][1] == {"role": "assistant", "content": "4"}
    assert json.loads(rows[2]["tools"])[0]["function"]["name"] == "look_up" and rows[0]["tools"] is None
    card = (tmp_path / "data_card.md").read_text()
    for reason in ("the conversation does not end with an answer", "the conversation begins with an answer"):
        assert f"1 x {reason}" in card
    assert "1 x message 0 has role 'robot'" in card


def test_conversations_without_a_test_file_are_split_by_their_text(tmp_path: Path):
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."}]}
        for n in range(200)
    ]
    sizes = []
    for number, order in enumerate((rows, rows[::-1])):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in order))
        test = convert("multiturn", folder, folder / "out", "--test_share", "0.2")["test"]
        sizes.append(sorted(row["messages"][0]["content"] for row in test))
    assert sizes[0] == sizes[1] and 20 <= len(sizes[0]) <= 60  # 40 expected, 5.7 standard deviation


@pytest.mark.parametrize("layout", ["data/{}-00000-of-00001.parquet", "{}.json", "{}.jsonl.gz", "sub/{}.jsonl.gz"])
def test_every_layout_of_the_hub_gives_the_same_rows(layout: str, tmp_path: Path):
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (RAW / "math" / f"{split}.jsonl").read_text().splitlines()]
        path = tmp_path / "hub" / layout.format(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows))
        else:
            path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    expected = convert("math_dataset", "math", tmp_path / "a")
    assert convert("math_dataset", tmp_path / "hub", tmp_path / "b") == expected


def test_the_card_names_raw_files_columns_and_script_and_does_not_change(tmp_path: Path):
    convert("gsm8k", "gsm8k", tmp_path)
    card = (tmp_path / "data_card.md").read_text()
    for path in (RAW / "gsm8k" / "train.jsonl", SCRIPTS / "gsm8k.py"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() in card
    assert "- `data_source`: `string`" in card and str(ROOT) not in card
    convert("gsm8k", "gsm8k", tmp_path)
    assert (tmp_path / "data_card.md").read_text() == card


def test_other_data_and_data_without_a_usable_row_write_nothing(tmp_path: Path):
    done = run("math_dataset", "--local_dataset_path", RAW / "gsm8k", "--local_save_dir", tmp_path / "out")
    assert done.returncode == 1 and "no column 'problem', so it is other data; it has answer" in done.stderr
    raw = tmp_path / "raw"
    raw.mkdir()
    for split in ("train", "test"):
        (raw / f"{split}.jsonl").write_text('{"problem": "p", "solution": "none"}\n' * 2)
    done = run("math_dataset", "--local_dataset_path", raw, "--local_save_dir", tmp_path / "out")
    assert "no row is left for train.parquet: 2 x no \\boxed answer" in done.stderr
    assert not (tmp_path / "out").exists() and "Traceback" not in done.stderr


def test_raw_data_is_not_written_over_and_copies_go_where_they_shall(tmp_path: Path):
    pq.write_table(pa.Table.from_pylist([{"question": "1+1?", "answer": "#### 2"}]), tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist([{"question": "1+2?", "answer": "#### 3"}]), tmp_path / "test.parquet")
    done = run("gsm8k", "--local_dataset_path", tmp_path, "--local_save_dir", tmp_path)
    assert done.returncode == 1 and "is raw data" in done.stderr
    out, copy = tmp_path / "out", tmp_path / "copy"
    done = run("gsm8k", "--local_dataset_path", tmp_path, "--local_save_dir", out, "--hdfs_dir", copy)
    assert done.returncode == 0, done.stderr
    for name in ("train.parquet", "test.parquet", "data_card.md"):
        assert (copy / name).read_bytes() == (out / name).read_bytes()
