"""`verl check-data` through its command line, on rows with one fault each."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.conftest import import_or_skip
from verl import cli
from verl.commands.check_data.rows import normal_form
from verl.rewards.gold_answers import gold_texts

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth == "boom":
        raise RuntimeError("no such answer")
    return {"score": float(solution_str == f"It is {ground_truth}!"), "acc": float(solution_str == str(ground_truth))}
"""


def row(number: int, **changes: Any) -> dict[str, Any]:
    """A sound row: the sum of `number` and a thousand."""
    made = {
        "data_source": "openai/gsm8k",
        "prompt": f"What is the sum of {number} and a thousand?",
        "reward_model": {"style": "rule", "ground_truth": str(1000 + number)},
        "extra_info": {"index": number},
    }
    return {key: value for key, value in {**made, **changes}.items() if value is not ...}


class Checked:
    """The outcome of a command: exit code, what it printed, the page, and the level of each check on the page."""

    def __init__(self, code: int, out: str, page: str):
        self.code, self.out, self.page = code, out, page
        cells = re.findall(r'<tr><td>([^<]+)</td><td class="[^"]*">([^<]+)</td><td>([^<]*)</td>', page)
        self.levels = {check: level for check, level, _ in cells}
        self.texts = {check: text for check, _, text in cells}

    def bad(self) -> dict[str, str]:
        return {check: level for check, level in self.levels.items() if level in ("warning", "wrong")}


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def check(train: list[Any], validation: list[Any] | None = None, *words: str) -> Checked:
        paths = {}
        for name, rows in (("train", train), ("validation", validation or [row(-1)])):
            paths[name] = tmp_path / f"{name}.jsonl"
            paths[name].write_text("".join(json.dumps(r) + "\n" for r in rows))
        files = [f"data.train_files={paths['train']}", f"data.val_files={paths['validation']}"]
        page = tmp_path / "page.html"
        code = cli.main(["check-data", "--out", str(page), *files, *words])
        return Checked(code, capsys.readouterr().out, page.read_text())

    return check


def test_sound_rows_pass_and_what_was_not_checked_is_said(check):
    done = check([row(n) for n in range(50)])
    assert done.code == 0 and done.bad() == {}
    assert done.levels["training: prompt length"] == "not checked"
    assert "set actor_rollout_ref.model.path" in done.texts["training: prompt length"]
    assert "accepted: 50 as #### …" in done.texts["training: gold answers"]
    assert "training: 50 rows" in done.out and "nothing that cannot be right was found" in done.out


SOLUTION = "78 and 1000 are together 1078 #### 1078"
FAULTS: list[tuple[str, list[dict[str, Any]], str, str]] = [
    ("a refused row", [row(1, reward_model=...)], "rows a run can read", "wrong"),
    ("a repeated prompt", [row(1)], "repeated prompts", "warning"),
    ("nearly", [row(1, prompt="what is  the sum of 1, and a THOUSAND")], "nearly repeated prompts", "warning"),
    ("two answers", [row(1, reward_model={"ground_truth": "7"})], "one prompt, two answers", "warning"),
    (
        "a marked answer",
        [row(77, prompt="A sum: 77 and 1000. The answer is 1077.")],
        "prompts with their answer",
        "warning",
    ),
    (
        "a whole solution",
        [row(78, prompt=f"Sum? {SOLUTION}", extra_info={"answer": SOLUTION})],
        "prompts with their answer",
        "warning",
    ),
    (
        "a solution that disagrees",
        [row(79, extra_info={"answer": "So many: #### 80"})],
        "gold answers, worked",
        "warning",
    ),
    ("an unknown source", [row(80, data_source="openai/gsm8")], "data sources", "wrong"),
    ("no number", [row(81, reward_model={"ground_truth": "seven"})], "gold answers, failures", "wrong"),
    ("no tools", [row(82, extra_info={"need_tools_kwargs": True})], "arguments of tools", "wrong"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "name", "level"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_each_fault_is_found_where_it_is_and_by_its_own_check(check, rows, name: str, level: str):
    done = check([row(n) for n in range(60)] + [row(n) for n in range(100, 200)] + rows)
    expected = {f"training: {name}": level}
    if name == "one prompt, two answers":
        expected["training: repeated prompts"] = "warning"
    assert done.bad() == expected
    assert done.code == int(level == "wrong")
    assert "1 of " in done.texts[f"training: {name}"]
    assert re.search(rf"training: {re.escape(name)}: .*train.jsonl line 161: ", done.out), done.out
    assert "train.jsonl line 161" in done.page


def test_the_validation_prompts_that_are_trained_on_are_a_warning_up_to_one_in_a_hundred(check):
    train, validation = [row(n) for n in range(5)], [row(n) for n in range(1000, 1200)]
    for shared, level in ((2, "warning"), (3, "wrong")):
        rows = validation[shared:] + [row(n) for n in range(shared)]
        done = check(train, rows)
        assert done.bad() == {"validation prompts in training": level}, shared
        assert f"{shared} of 200" in done.texts["validation prompts in training"]


def test_answers_that_occur_by_chance_are_counted_and_not_refused(check):
    shots = "Example: 1 + 1. #### 2. Example: 5 + 1000. #### 1005. Now: "
    done = check([row(n, prompt=f"{shots}{n} and 1000? Not {1000 + n}!") for n in range(20)])
    assert done.code == 0 and done.bad() == {}  # what all prompts begin with is not looked at
    assert "; 20 hold one of less than 20 characters" in done.texts["training: prompts with their answer"]
    done = check([row(n, prompt=f"{n} and 1000? Not 1{1000 + n} or {1000 + n}.5!") for n in range(1, 21)])
    assert "; 0 hold one" in done.texts["training: prompts with their answer"]


def test_normal_form_forgets_looks_and_keeps_numbers():
    assert normal_form('  What is\t\uff38, "really"? ') == "what is x really"
    for one, other in (("2+3", "2-3"), ("3.5", "35"), ("5!", "5"), ("1,000", "1 000"), ("3:4", "34"), ("-4", "4")):
        assert normal_form(one) != normal_form(other)


@pytest.mark.parametrize(
    ("truth", "texts"),
    [
        ("42", ["42"]),
        (42, ["42"]),
        (["a", "b"], ["a", "b"]),
        ({"target": ["Paris", "paris"]}, ["Paris", "paris"]),
        ('{"inputs": ["1"], "outputs": ["2"]}', []),
        (r"\{1, 2\}", [r"\{1, 2\}"]),
        ("[0, 1]", ["[0, 1]"]),
        ("", []),
        (None, []),
        (True, []),
    ],
)
def test_gold_answers_as_text(truth: Any, texts: list[str]):
    assert gold_texts(truth) == texts


def test_a_function_of_the_user_is_asked_and_its_rejections_are_warnings_its_failures_errors(check, tmp_path: Path):
    (tmp_path / "mine.py").write_text(REWARD)
    words = [f"reward.custom_reward_function.path={tmp_path / 'mine.py'}", "reward.timeout_s=10"]
    rows = [row(n, data_source="my/own") for n in range(4)]
    assert check(rows, [row(9, data_source="my/own")], *words).bad() == {}  # accepted as the bare ground truth
    strange = row(7, extra_info={"solution": "Guess!"}, reward_model={"ground_truth": {"target": []}})
    done = check([*rows, strange], None, *words)
    assert (done.code, done.bad()) == (0, {"training: gold answers": "warning"})
    done = check([*rows, row(5, reward_model={"ground_truth": "boom"})], None, *words)
    assert (done.code, done.bad()) == (1, {"training: gold answers, failures": "wrong"})
    assert "no such answer" in done.out


def test_rows_without_a_scorer_are_a_warning_where_failures_are_counted_or_a_reward_model_scores(check):
    rows = [row(n, data_source="new/one") for n in range(3)]
    assert check(rows, None, "reward.on_error=count").bad() == {"training: data sources": "warning"}
    done = check(rows, rows[:1], "data.val_files=null", "reward.on_error=count")
    assert done.levels["training: gold answers"] == "not checked" and "validation: gold answers" not in done.levels


@pytest.mark.parametrize(
    ("key", "own", "tools", "level"),
    [
        ("True", None, None, "wrong"),
        ("True", False, None, "good"),
        ("True", None, {"search": {"create_kwargs": {"k": 1}}}, "good"),
        ("False", None, None, "good"),
    ],
)
def test_rows_need_tools_by_the_key_or_by_themselves(check, key: str, own: Any, tools: Any, level: str):
    extra = {"need_tools_kwargs": own, "tools_kwargs": tools}
    rows = [row(n, extra_info=extra) for n in range(3)]
    done = check(rows, [row(9, extra_info=extra)], f"data.need_tools_kwargs={key}")
    assert {done.levels[f"{split}: arguments of tools"] for split in ("training", "validation")} == {level}


@pytest.fixture
def qwen(test_data: Path) -> str:
    return str(test_data / "tokenizers" / "qwen3")


def test_lengths_are_those_of_the_template_and_each_fate_of_long_prompts_is_said(check, qwen: str):
    rows = [row(n, prompt="word " * (10 * n) + f"number {n}") for n in range(1, 6)]
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    chats = [[{"role": "user", "content": r["prompt"]}] for r in rows]
    lengths = [len(tokenizer.apply_chat_template(c, add_generation_prompt=True)["input_ids"]) for c in chats]
    model, limit = f"actor_rollout_ref.model.path={qwen}", f"data.max_prompt_length={lengths[2]}"
    check_name = "training: prompt length"
    for word, level, text in (
        ("data.truncation=error", "wrong", "stop the run"),
        ("data.truncation=left", "warning", "are cut left"),
        ("data.filter_overlong_prompts=True", "warning", "are removed"),
    ):
        done = check(rows, None, model, limit, word)
        assert done.levels[check_name] == level and text in done.texts[check_name]
        assert done.texts[check_name].startswith("2 of 5 ")
        assert f"{lengths[0]} to {lengths[-1]} tokens, median {lengths[2]}" in done.texts[check_name]
        assert f"train.jsonl line 5: {lengths[4]} tokens" in done.out


def test_loops_and_tools_that_the_run_does_not_have_are_found(check, qwen: str):
    extra = {"tools_kwargs": {"search": {"create_kwargs": {"k": 1}}}}
    rows = [row(1), row(2, agent_name="tool_agnt"), row(3, agent_name="tool_agent", extra_info=extra)]
    done = check(rows, None, f"actor_rollout_ref.model.path={qwen}")
    assert done.bad() == {"training: agent loops": "wrong", "training: tools": "warning"} and done.code == 1
    assert "tool_agent" in done.out and "search; the run has no tools" in done.out


def test_solutions_longer_than_the_answers_limit_are_a_warning(check, qwen: str):
    long = row(2, extra_info={"answer": "step " * 40 + "#### 1002"})
    short = row(1, extra_info={"answer": "#### 1001"})
    words = [f"actor_rollout_ref.model.path={qwen}", "data.max_response_length=40"]
    assert check([short, long], None, *words).bad() == {"training: solution length": "warning"}


def test_the_page_is_one_file_and_shows_text_as_text(check):
    attack = "<script>alert(1)</script> {{ 7 * 7 }}"
    done = check([row(1, prompt=attack), row(1, prompt=attack)])
    assert "<script" not in done.page and "&lt;script&gt;" in done.page and "{{ 7 * 7 }}" in done.page
    assert "http://" not in done.page and "https://" not in done.page and "default-src 'none'" in done.page


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        ([{"question": "How many?", "answer": f"{n} + 0\n#### {n}"} for n in range(3)],
         "data.prompt_key=question data.answer_key=answer reward.scorer=gsm8k"),
        ([{"problem": f"Is it {n}?", "Final Answer": f"Number {n}"} for n in range(3)],
         "data.prompt_key=problem 'data.answer_key='\"'\"'Final Answer'\"'\"'' reward.scorer=exact"),
        ([{"prompt": f"What is {n}/2?", "solution": rf"It is $\boxed{{\frac{{{n}}}{{2}}}}$."} for n in range(3)],
         "data.answer_key=solution reward.scorer=math"),
        ([row(n) for n in range(3)], ""),
    ],
)  # fmt: skip
def test_the_settings_for_a_file_are_printed_and_a_run_reads_it_with_them(tmp_path: Path, capsys, rows, settings):
    if "math" in settings:
        import_or_skip("math_verify")
    path, words = tmp_path / "my rows.jsonl", ["--out", str(tmp_path / "page.html")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cli.main(["check-data", *words, str(path)])
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("settings to paste: "))
    assert settings in said
    assert cli.main(["check-data", *words, *shlex.split(said.partition(": ")[2])]) == 0
    assert "training: 3 rows" in capsys.readouterr().out


def test_prompts_that_hold_messages_as_text_are_a_warning(check):
    done = check([row(1, prompt='[{"role": "user", "content": "1+1="}]'), row(2)])
    assert done.levels["training: prompts as text"] == "warning"


def test_what_cannot_be_checked_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for words, message in (
        ([f"data.train_files={tmp_path / 'no.parquet'}"], "does not exist"),
        (["data.train_fils=x"], "train_files"),
        (["--config-name", "sft_trainer"], "main_ppo"),
    ):
        assert cli.main(["check-data", "--out", str(tmp_path / "x.html"), *words]) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
    assert not (tmp_path / "x.html").exists()


def test_all_of_gsm8k_is_sound(check, test_data: Path, tmp_path: Path):
    rows = {}
    for split in ("train", "test"):
        raw = [json.loads(line) for line in (test_data / "gsm8k" / f"{split}.jsonl").read_text().splitlines()]
        rows[split] = [
            row(n, prompt=r["question"], extra_info={"answer": r["answer"]},
                reward_model={"ground_truth": r["answer"].rpartition("#### ")[2]})
            for n, r in enumerate(raw)
        ]  # fmt: skip
    done = check(rows["train"], rows["test"])
    assert done.code == 0 and done.bad() == {}
    assert "7,473 as the worked answer" in done.out and "1,319 as the worked answer" in done.out
