"""`verl check-reward` through its command line, on rewards with one fault each."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.tiers import each_once
from verl import cli
from verl.commands.check_reward import passes
from verl.commands.quickstart.addition_task import make_split, write_split

AGAIN, THREADS, PROCESSES = "the same answer again", "16 threads at once", "other processes, hash seeds, locales"
ABOVE = {kind: f"gold above {kind} answers" for kind in ("empty", "garbage", "another prompt's", "halved")}
RIGHT = "float(solution_str.rpartition('####')[2].strip() == ground_truth)"
HEAD = (
    "import os, random, time\nkept = []\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
)


def row(number: int, **changes: Any) -> dict[str, Any]:
    """A row whose worked answer has a length of its own."""
    made = {
        "data_source": "my/own",
        "prompt": f"What is the sum of {number} and a thousand?",
        "reward_model": {"ground_truth": str(1000 + number)},
        "extra_info": {"answer": f"We {'really ' * (number % 7)}add {number} #### {1000 + number}"},
    }
    return {**made, **changes}


class Checked:
    """The outcome of a command: exit code, what it printed, the page, and the level and text of each check."""

    def __init__(self, code: int, out: str, page: str):
        self.code, self.out, self.page = code, out, page
        cells = re.findall(r'<tr><td>([^<]+)</td><td class="[^"]*">([^<]+)</td><td>([^<]*)</td>', page)
        self.levels = {check.replace("&#39;", "'"): level for check, level, _ in cells}
        self.texts = {check.replace("&#39;", "'"): text for check, _, text in cells}

    def bad(self) -> dict[str, str]:
        return {check: level for check, level in self.levels.items() if level in ("warning", "wrong")}


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Checks a function with this body; without processes, which take seconds to start."""

    def check(body: str | None, *words: str, rows: list[dict[str, Any]] | None = None, processes: bool = False):
        if not processes:
            monkeypatch.setattr(passes, "CHILD_ENVIRONMENTS", ())
        monkeypatch.setattr(passes, "MEMORY_CALLS", 200)
        made = rows or [row(n) for n in range(24)]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in made))
        given = [f"data.train_files={tmp_path / 'rows.jsonl'}"]
        if body is not None:
            mine = tmp_path / f"mine_{len(list(tmp_path.glob('mine_*')))}.py"  # a file runs once per process
            mine.write_text(HEAD + "".join(f"    {line}\n" for line in body.splitlines()))
            given.append(f"reward.custom_reward_function.path={mine}")
        page = tmp_path / "page.html"
        code = cli.main(["check-reward", "--html", str(page), "--seed", "3", *given, *words])
        return Checked(code, "".join(capsys.readouterr()), page.read_text())

    return check


def test_a_sound_reward_passes_in_every_way(check):
    done = check(f"return {RIGHT}", processes=True)
    assert done.code == 0 and done.bad() == {}, done.out
    assert {done.levels[name] for name in (*ABOVE.values(), AGAIN, THREADS, PROCESSES, "memory")} == {"good"}
    assert "means 1 and 0; gold answers: the worked answer of my/own" in done.texts[ABOVE["empty"]]
    assert re.search(r"120 calls; median [\d.]+ ms, p99 [\d.]+ ms, largest [\d.]+ ms", done.texts["time of a call"])
    assert "rows: 24 of 24 of" in done.out and "seed: 3" in done.out


def test_a_row_that_a_run_refuses_is_named_with_its_file_and_number(check):
    broken = row(1)
    del broken["reward_model"]
    done = check(f"return {RIGHT}", rows=[row(0), broken, *(row(n) for n in range(2, 12))])
    assert done.code == 1 and "rows: 11 of 12 of" in done.out
    assert done.levels["rows: rows a run can read"] == "wrong"
    said = " ".join(re.sub("[^\x20-\x7e]", " ", done.out).split())
    assert "rows.jsonl line 2" in said and "no column 'reward_model'" in said
    assert "repair them or take them out of the file" in said
    alone = check(f"return {RIGHT}", rows=[broken])
    assert alone.code == 2 and re.search(r"rows\.jsonl line 1: .*reward_model", alone.out)


WRONG_ABOVE = {ABOVE[kind]: "wrong" for kind in ("empty", "garbage", "another prompt's")}
FAULTS: list[tuple[str, str, dict[str, str], str]] = [
    ("constant", "return 1.0", {"scores that differ": "wrong", **WRONG_ABOVE}, "all 120 answers got 1"),
    ("length alone", "return len(solution_str) / 1000", {"scores beyond length": "wrong"}, "correlation 1.00"),
    ("random", "return random.random()", {AGAIN: "warning", ABOVE["garbage"]: "wrong"}, "get another score (by 0."),
    ("its own calls", f"kept.append(1)\nreturn {RIGHT} + len(kept) / 1e6", {AGAIN: "warning"}, "get another score"),
    (
        "threads",
        f"global shown\nshown = solution_str\ntime.sleep(1e-4)\nreturn {RIGHT.replace('solution_str', 'shown')}",
        {THREADS: "wrong"},
        "get another score (by 1 at most)",
    ),
    ("memory", f"kept.append(b'x' * 400_000)\nreturn {RIGHT}", {"memory": "warning"}, "MB per 1,000 calls"),
    (
        "hanging",
        f"time.sleep(0 if solution_str else 1)\nreturn {RIGHT}",
        {"calls that take too long": "wrong", "time of a call": "warning"},
        "no result after reward.timeout_s=0.2",
    ),
    ("raising", f"solution_str[0]\nreturn {RIGHT}", {"calls that fail": "wrong"}, "string index out of range"),
    (
        "not finite",
        f"return {RIGHT} if '####' in solution_str else float('nan')",
        {"calls that fail": "wrong"},
        "the score is nan",
    ),
    ("the sign", f"return -{RIGHT}", WRONG_ABOVE, "as if the sign were wrong"),
    (
        "any answer",
        "return float('####' in solution_str)",
        {ABOVE["another prompt's"]: "wrong"},
        "gold answers do not score higher",
    ),
    ("a beginning", "return float('We' in solution_str)", {ABOVE["halved"]: "warning"}, "do not score higher"),
    ("parts", f"right = {RIGHT}\nreturn {{'score': right}} | {{'pred': 1}} * 0 if 0 else "
     "({'score': right, 'pred': 1} if right else {'score': right})",
     {"parts of every score": "warning"}, "without pred"),
    (
        "abstains",
        f"return {RIGHT} if solution_str else {{'score': 0, 'abstain': True}}",
        {"abstentions": "warning"},
        "24 of 120 answers are left out",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected", "said"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_each_fault_is_found_and_shown(check, body: str, expected: dict[str, str], said: str):
    done = check(body, "reward.timeout_s=0.2")
    assert expected.items() <= done.bad().items(), done.out
    assert done.code == int("wrong" in done.bad().values())
    beyond = {name for name in done.bad().keys() - expected.keys() if not name.startswith("gold above ")}
    assert not beyond, beyond  # a reward that is no reward does not put gold answers above others, either
    assert said in " ".join(done.out.split()) or said in done.page, done.out


def test_a_score_that_depends_on_the_process_is_found(check, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(passes, "CHILD_ENVIRONMENTS", passes.CHILD_ENVIRONMENTS[:1])
    done = check(f"return {RIGHT} + hash(solution_str) % 7 / 100", processes=True)
    assert (done.code, done.bad()) == (1, {PROCESSES: "wrong"})
    assert "get another score (by 0.0" in done.texts[PROCESSES]  # which of them it is depends on this process's hashes
    assert re.search(r"got [01](\.0\d)?, then [01](\.0\d)?", done.page), done.page


def test_a_process_that_cannot_score_is_named(check, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(passes, "CHILD_ENVIRONMENTS", ({"PYTHONHASHSEED": "1"},))
    done = check(f"if os.environ['PYTHONHASHSEED'] == '1': os._exit(7)\nreturn {RIGHT}", processes=True)
    assert (done.code, done.bad()) == (1, {PROCESSES: "wrong"}) and "exit code 7" in done.page


def test_a_function_that_compares_the_answers_of_a_batch_gets_them_one_by_one_from_threads_too(check, tmp_path: Path):
    mine = tmp_path / "batched.py"
    mine.write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    rows = zip(solution_strs, ground_truths)\n"
        "    return [(s.rpartition('####')[2].strip() == t) / len(solution_strs) for s, t in rows]\n"
    )
    done = check(None, f"reward.custom_reward_function.path={mine}", "reward.reward_manager.name=batch")
    assert done.code == 0 and done.bad() == {} and done.levels[THREADS] == "good"


HANGING = f"time.sleep(0 if solution_str else 30)\nreturn {RIGHT}"
IN_PROCESSES = {
    "sound": f"return {RIGHT}",
    "constant": "return 1.0",
    "raising": f"solution_str[0]\nreturn {RIGHT}",
    "hanging": HANGING,
}


@pytest.mark.parametrize(("what", "name"), each_once([*IN_PROCESSES], ["remote", "prime"]))
def test_managers_with_processes_of_their_own_find_what_naive_finds(check, monkeypatch, what: str, name: str):
    body = IN_PROCESSES[what]
    monkeypatch.setattr(passes, "THREADS", 2)  # processes
    monkeypatch.setattr(passes, "LIMIT_S", 0.2 if body == HANGING else 60.0)
    plain, done = (check(body, f"reward.reward_manager.name={m}", "--rows", "8") for m in ("naive", name))
    assert (done.code, done.bad()) == (plain.code, plain.bad()), done.out
    same = {check: (done.levels[check], plain.levels[check]) for check in (*ABOVE.values(), AGAIN)}
    assert all(ours == theirs for ours, theirs in same.values()), same


@pytest.mark.parametrize("name", ["naive", "remote"])
def test_after_three_calls_that_hang_the_others_are_left_out(check, name: str):
    done = check("time.sleep(5)", "reward.timeout_s=0.1", f"reward.reward_manager.name={name}")
    assert done.code == 1 and done.levels[AGAIN] == "not checked" and done.texts["time of a call"].startswith("3 calls")


def test_failures_are_a_warning_where_the_run_counts_them(check):
    done = check(f"solution_str[0]\nreturn {RIGHT}", "reward.on_error=count")
    assert done.code == 0 and done.bad()["calls that fail"] == "warning"


def test_the_built_in_scorer_gets_the_ground_truth_in_the_form_that_it_reads(check):
    done = check(None, rows=[row(n, data_source="openai/gsm8k", extra_info={}) for n in range(20)])
    assert done.code == 0 and done.bad() == {} and "#### … of openai/gsm8k" in done.texts[ABOVE["empty"]]


def test_gold_answers_are_where_the_key_says_and_missing_ones_are_not_checked(check):
    rows = [row(n, extra_info={"deep": {"text": f"#### {1000 + n}"}}, reward_model={"ground_truth": {"n": n}})
            for n in range(20)]  # fmt: skip
    body = "return float(solution_str == f\"#### {1000 + ground_truth['n']}\")"
    done = check(body, rows=rows)
    assert done.levels["gold answers"] == "not checked" and "--gold-key" in done.texts["gold answers"]
    done = check(body, "--gold-key", "extra_info.deep.text", rows=rows)
    assert done.code == 0 and "extra_info.deep.text of my/own" in done.texts[ABOVE["empty"]]


def test_rows_are_taken_by_the_seed(check):
    body = f"return {RIGHT}"
    assert "answers: 25" in check(body, "--rows", "5").out
    wheres = [check("return 1.0", "--rows", "3", "--seed", seed).out.split("rows.jsonl line")[1:4] for seed in "778"]
    assert wheres[0] == wheres[1] != wheres[2]


def test_mistakes_are_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for words, message in (
        (["data.train_files=[]"], "no data files"),
        (["reward.reward_model.enable=True", "reward.reward_model.model_path=x"], "starts no reward model"),
        (["data.train_files=x.parquet"], "does not exist"),
        (["data.train_fils=x"], "train_files"),
    ):
        assert cli.main(["check-reward", "--html", str(tmp_path / "x.html"), *words]) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error


MASKED = re.compile(r"[+-]?\d[\d,.]*( MB)?|[━┃┡╇┩│└┴┘┏┳┓─\s]+")


def test_the_page_shows_the_output_as_it_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    page = (ROOT / "docs" / "rewards" / "check_reward.md").read_text(encoding="utf-8")
    blocks = dict(re.findall(r"^```python (\S+)\n(.*?)^```", page, flags=re.M | re.S))
    tables = re.findall(r"^```\n(?:[#$][^┏]*)?(┏.*?)^```", page, flags=re.M | re.S)
    write_split(make_split(0, 4, 8), tmp_path / "quickstart_out" / "data")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(passes, "CHILD_ENVIRONMENTS", ())  # one check fewer that found nothing
    for path, text in (("examples/own_reward/my_reward.py", None), *blocks.items()):
        if text is not None:
            Path(path).write_text(text)
        words = ["data.train_files=quickstart_out/data/train.jsonl", f"reward.custom_reward_function.path={path}"]
        cli.main(["check-reward", *words, "--seed", "1", "--examples", "1"])
        out = [line for line in capsys.readouterr().out.splitlines() if "not checked" not in line]
        out = [line for line in out if "was started" not in line]
        shown = tables.pop(0).replace("10 other checks", "9 other checks")
        assert MASKED.sub(" ", "\n".join(out)).split() == MASKED.sub(" ", shown).split()
