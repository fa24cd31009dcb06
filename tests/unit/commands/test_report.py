"""`verl report` and `verl show` on runs whose files lie in the tests' data."""

import json
import re
import shutil
from pathlib import Path
from urllib.parse import unquote

import pytest

from verl.commands import report, show
from verl.observe.html_report import differing_keys, flatten, group_curves, stage_times
from verl.observe.metric_names import HEADLINES, find_metric, headline_rank
from verl.observe.run_record import find_run
from verl.observe.step_records import PROFILES_FILE, REPLICAS_FILE, append_record, drop_records_after, read_records

EARLIER = Path(__file__).resolve().parents[2] / "data" / "earlier_run"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs `demo/first` and `demo/second` below checkpoints/, which differ in one key."""
    monkeypatch.chdir(tmp_path)
    model = {"path": str(EARLIER / "model"), "tokenizer_path": None}
    for name, source, lr in (("first", "critic", 0.01), ("second", "ranks", 0.02)):
        folder = tmp_path / "checkpoints" / "demo" / name
        shutil.copytree(EARLIER / source / "ledger", folder / "ledger")
        config = {"actor_rollout_ref": {"model": model, "actor": {"optim": {"lr": lr}}}}
        metrics = str(EARLIER / "expected" / f"{source}.jsonl")
        record = {"name": f"demo/{name}", "metrics": metrics, "total_steps": 4, "config": config}
        (folder / "run.json").write_text(json.dumps(record))
        (folder / "validation_samples").mkdir()
        for step, answer in ((2, "dunno"), (10, "12")):
            row = {"input": "7+5=", "output": answer, "gts": "12", "score": float(answer == "12"), "step": step}
            (folder / "validation_samples" / f"{step}.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path


def test_a_run_is_found_by_folder_by_name_and_by_its_metrics_file(runs: Path) -> None:
    by_name, by_folder = find_run("demo/first"), find_run("checkpoints/demo/first")
    assert by_name == by_folder and by_name.name == "demo/first" and by_name.total_steps == 4
    assert find_run(str(by_name.metrics)).metrics == by_name.metrics


def test_what_names_no_run_gets_one_line_with_the_three_ways(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["demo/nowhere"]) == 2
    error = capsys.readouterr().err
    assert "demo/nowhere" in error and "run.json" in error and ".jsonl" in error and "Traceback" not in error
    (runs / "checkpoints" / "demo" / "first" / "run.json").write_text("{")
    assert report.main(["demo/first"]) == 2 and "run.json" in capsys.readouterr().err


def test_the_page_of_one_run_has_curves_stages_answers_and_config(runs: Path) -> None:
    assert report.main(["demo/first"]) == 0
    page = (runs / "checkpoints" / "demo" / "first" / "report.html").read_text()
    front = page[: page.index("All other metrics")]
    for name in ("critic/score/mean", "actor/ppo_kl", "response_length/mean", "actor/pg_clipfrac", "actor/grad_norm"):
        assert f'aria-label="{name} over 4 steps' in front
    assert 'class="band"' in front and "seconds by stage" in front and "update_actor" in front
    assert front.index("dunno") < front.index("step 10") and "4 of 4" in front
    assert "actor_rollout_ref.actor.optim.lr" in page and "<script" not in page and "refresh" not in page


def test_two_runs_are_drawn_over_each_other_with_the_differing_key_on_top(runs: Path) -> None:
    assert report.main(["demo/first", "demo/second", "--out", "both.html"]) == 0
    page = (runs / "both.html").read_text()
    table = page[page.index("Keys that differ") : page.index("<h2>Curves")]
    assert re.findall(r"<tr><td>([\w.]+)</td><td>([\d.]+)</td><td>([\d.]+)</td>", table) == [
        ("actor_rollout_ref.actor.optim.lr", "0.01", "0.02")
    ]
    drawing = re.search(r'aria-label="critic/score/mean.*?</svg>', page, re.S)
    assert drawing and drawing[0].count('<g class="run0">') == 1 and drawing[0].count('<g class="run1">') == 1


def test_answers_of_two_runs_stand_side_by_side_step_by_step(runs: Path) -> None:
    second = runs / "checkpoints" / "demo" / "second" / "validation_samples"
    row = {"input": "7+5=", "output": "<b>11", "gts": "12", "score": 0.0, "step": 2}
    only = {**row, "input": "1+1=", "gts": "2", "output": "2", "score": None}
    (second / "2.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (row, only)))
    (second / "10.jsonl").unlink()
    assert report.main(["demo/first", "demo/second", "--out", "both.html"]) == 0
    page = (runs / "both.html").read_text()
    tables = re.findall(r"<summary>(\d\+\d=).*?<table[^>]*>(.*?)</table>", page, re.S)
    read = {
        prompt: [[" ".join(re.sub(r"<[^>]*>", " ", cell).split()) for cell in re.findall(r"<td.*?</td>", line, re.S)]
                 for line in re.findall(r"<tr>.*?</tr>", table, re.S)]
        for prompt, table in tables
    }  # fmt: skip
    names = ["", "demo/first", "demo/second"]
    assert read["7+5="] == [names, ["step 2", "0 dunno", "0 &lt;b&gt;11"], ["step 10", "1 12", "-"]]
    assert read["1+1="] == [names, ["step 2", "-", "2"]]


def test_the_page_has_the_health_lines_of_the_run(runs: Path) -> None:
    record = json.loads((runs / "checkpoints" / "demo" / "first" / "run.json").read_text())
    steps = [{"step": step, "data": {"actor/ppo_kl": 0.7 if step > 1 else 0.0}} for step in (1, 2, 3)]
    (runs / "sick.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    changed = {**record, "metrics": str(runs / "sick.jsonl")}
    (runs / "checkpoints" / "demo" / "first" / "run.json").write_text(json.dumps(changed))
    assert report.main(["demo/first", "demo/second", "--out", "both.html"]) == 0
    page = (runs / "both.html").read_text()
    assert page.count("an update moved the policy by 0.7 nats") == 1 and "demo/first: health, step 2" in page


def test_a_run_that_trains_is_followed_to_its_last_step(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (EARLIER / "expected" / "critic.jsonl").read_text().splitlines()
    metrics, folder = runs / "growing.jsonl", runs / "checkpoints" / "demo" / "first"
    metrics.write_text("\n".join(lines[:2]) + '\n{"step": 3, "da')  # the third line is being written
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "metrics": str(metrics)}))
    pages = []

    def the_run_goes_on(seconds: float) -> None:
        pages.append((folder / "report.html").read_text())
        metrics.write_text("\n".join(lines) + "\n")

    monkeypatch.setattr(report.time, "sleep", the_run_goes_on)
    assert report.main(["demo/first", "--follow", "--every", "3"]) == 0
    assert len(pages) == 1 and 'http-equiv="refresh" content="3"' in pages[0] and "2 of 4" in pages[0]
    assert "refresh" not in (folder / "report.html").read_text()


def test_stages_and_what_they_leave_over_add_up_to_the_step() -> None:
    data = {"timing_s/gen": 3.0, "timing_s/update_actor": 1.0, "timing_s/step": 5.0, "timing_s/agent_loop/x/mean": 9.0}
    times = stage_times([{"step": 1, "data": data}])
    assert times is not None and [(name, share) for name, _, share in times.areas] == [
        ("gen", "60%"),
        ("update_actor", "20%"),
        ("other", "20%"),
    ]


def test_headlines_are_in_the_table_of_metrics() -> None:
    headlines = [name + "a/acc/mean@1" * name.endswith("/") for name in HEADLINES]
    assert [name for name in headlines if find_metric(name) is None] == []


def test_headline_names_are_whole_names_or_beginnings() -> None:
    assert headline_rank("val-core/gsm8k/acc/mean@1") == 0
    assert headline_rank("actor/pg_clipfrac_lower") is None and headline_rank("actor/pg_clipfrac") is not None
    _, groups = group_curves([{"training/global_step": [(1, 1.0)], "x/y": [(1, 1.0)]}])
    assert list(groups) == ["x"]


def test_keys_that_one_run_lacks_differ_and_unknown_configurations_are_not_compared() -> None:
    configs = [flatten({"a": {"b": 1, "c": 2}}), flatten({"a": {"b": 1}})]
    assert differing_keys(configs) == [("a.c", ["2", "(not there)"])]
    named = [
        flatten({"trainer": {"experiment_name": x, "default_local_dir": x, "save_freq": s}})
        for x, s in ("a1", ("b", None))
    ]
    assert differing_keys(named) == [("trainer.save_freq", ["1", "null"])]
    assert differing_keys([configs[0], {}]) == [] and differing_keys(configs[:1]) == []
    sections = [flatten({"a": {"extra": {}}, "b": 1}), flatten({"a": {"extra": {"k": 3}}, "b": 1})]
    assert differing_keys(sections) == [("a.extra.k", ["(not there)", "3"])]


def test_the_worst_and_best_answers_of_a_step_are_shown_as_text(runs, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert show.main(["demo/first", "--step", "2", "--worst", "3"]) == 0
    worst = capsys.readouterr().out
    assert show.main(["demo/first", "--step", "2", "--best", "3"]) == 0
    best = capsys.readouterr().out
    rewards = [[float(r) for r in re.findall(r"reward ([\d.]+)", text)] for text in (worst, best)]
    assert rewards[0] == sorted(rewards[0]) and rewards[1] == sorted(rewards[1], reverse=True)
    assert len(rewards[0]) == len(rewards[1]) == 3 and rewards[0][0] < rewards[1][0]
    assert re.search(r"^\d\d\+\d\d=", worst, re.M)  # a prompt of the task, decoded


def test_the_expected_answer_is_read_from_the_row_if_it_still_holds_the_prompt(runs, capsys) -> None:
    show.main(["demo/first", "--row", "99"])
    row = int(re.findall(r"\d+", capsys.readouterr().err.partition("it has rows")[2])[0])
    show.main(["demo/first", "--row", str(row), "--color", "none"])
    question = re.search(r"\d\d\+\d\d=", capsys.readouterr().out).group()
    record = runs / "checkpoints" / "demo" / "first" / "run.json"
    saved = json.loads(record.read_text())
    saved["config"]["data"] = {"train_files": [str(runs / "rows.jsonl")]}
    record.write_text(json.dumps(saved))
    for content, seen in ((question, 4), ("1+1=", 0)):
        line = {"prompt": [{"role": "user", "content": content}], "reward_model": {"ground_truth": "[b]77"}}
        (runs / "rows.jsonl").write_text((json.dumps(line) + "\n") * (row + 1))
        assert show.main(["demo/first", "--row", str(row)]) == 0
        assert capsys.readouterr().out.count("expected: [b]77\n") == seen
    (runs / "rows.jsonl").unlink()
    assert show.main(["demo/first", "--row", str(row)]) == 0 and "expected" not in capsys.readouterr().out


def test_all_answers_to_a_row_and_the_rows_there_are(runs, capsys) -> None:
    assert show.main(["demo/first", "--row", "99"]) == 2
    rows = re.findall(r"\d+", capsys.readouterr().err.partition("it has rows")[2])
    assert show.main(["demo/first", "--row", rows[0]]) == 0
    assert capsys.readouterr().out.count(f"row {rows[0]},") == 4  # rollout.n


def test_tokens_are_coloured_by_sign_of_advantage_and_by_log_prob() -> None:
    good, bad = show.style_of(1.0, 2.0, "advantage"), show.style_of(-1.0, 2.0, "advantage")
    assert good != bad and "on rgb(35,1" in good and show.style_of(0.0, 2.0, "advantage") == ""
    assert show.style_of(0.0, 1.0, "logprob") == "" and show.style_of(-5.0, 1.0, "logprob").startswith(
        f"{show.WHITE} on rgb("
    )


def test_a_step_that_is_not_there_and_a_run_without_a_ledger_are_named(runs, capsys) -> None:
    assert show.main(["demo/first", "--step", "9"]) == 2 and "steps 1..4 are recorded" in capsys.readouterr().err
    assert show.main([str(EARLIER / "expected" / "sft.jsonl")]) == 2 and "no ledger" in capsys.readouterr().err


def test_a_run_that_failed_before_its_first_step_is_not_told_to_turn_the_ledger_on(runs: Path, capsys) -> None:
    folder = runs / "checkpoints" / "demo" / "first"
    shutil.rmtree(folder / "ledger")
    assert show.main(["demo/first"]) == 2 and "recorded no step" in capsys.readouterr().err
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "config": {"trainer": {"ledger": False}}}))
    assert show.main(["demo/first"]) == 2 and "has no ledger" in capsys.readouterr().err


def test_seconds_beside_the_step_are_not_taken_from_what_no_stage_accounts_for() -> None:
    seconds = {"timing_s/step": 4.0, "timing_s/gen": 1.0, "timing_s/stop_profile": 40.0}
    stack = stage_times(
        [{"step": 1, "data": seconds}, {"step": 2, "data": {"timing_s/step": 4.0, "timing_s/gen": 1.0}}]
    )
    assert stack is not None
    shares = {name: share for name, _, share in stack.areas}
    assert shares == {"stop_profile": "83%", "other": "12%", "gen": "4%"}  # 40, 6 and 2 of 48 seconds


def test_the_page_links_profiles_draws_replicas_and_says_which_alerts_fired(runs: Path) -> None:
    folder = runs / "checkpoints" / "demo" / "first"
    metrics = [
        {"step": step, "data": {"timing_s/step": 400.0, "rollout_corr/k3_kl": 0.3 if step > 1 else 0.0}}
        for step in (1, 2, 3, 4)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    record = json.loads((folder / "run.json").read_text()) | {"metrics": str(folder / "metrics.jsonl")}
    (folder / "run.json").write_text(json.dumps(record))
    trace = folder / "a profile" / "step_2" / "actor_rank0.json.gz"
    trace.parent.mkdir(parents=True)
    trace.write_bytes(b"")
    profiles = [{"name": "step_2", "files": [str(trace)]}, {"name": "steps_3_4", "files": []}]
    (folder / "profiles.jsonl").write_text("".join(json.dumps(line) + "\n" for line in profiles))
    counted = [(1, 10, 20), (2, 30, 50), (3, 5, 90), (4, 25, 91), (9, 999, 999)]  # the first was begun anew at step 3
    lines = [
        {"step": step, "lost": 0, "replicas": [{"counts": {"tokens": n}, "gauges": {"bytes": 7}} for n in values]}
        for step, *values in counted
    ]
    (folder / "replicas.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report.main(["demo/first"]) == 0
    page = (folder / "report.html").read_text()
    [link] = re.findall(r'<a href="([^"]*)">actor_rank0.json.gz</a>', page)
    assert (folder / unquote(link)).is_file() and "step 2: 400 s" in page and "step 3: 400 s, step 4: 400 s" in page
    [alert] = [row for row in re.findall("<tr>.*?</tr>", page, re.S) if "VerlMismatch" in row]
    assert "firing, fired after step 2" in alert
    replicas = page[page.index("Rollout replicas") : page.index("<h2>Validation")]
    [tokens] = [svg for svg in re.findall("<svg.*?</svg>", replicas, re.S) if 'aria-label="tokens ' in svg]
    titles = re.findall("<title>(.*?)</title>", tokens)
    assert titles[:4] == [f"replica 0, step {step}: {n}" for step, n in ((1, 10), (2, 20), (3, 5), (4, 20))]
    assert titles[4:] == [f"replica 1, step {step}: {n}" for step, n in ((1, 20), (2, 30), (3, 40), (4, 1))]


def test_a_run_that_goes_on_forgets_profiles_and_replicas_of_later_steps(tmp_path: Path) -> None:
    drop_records_after(tmp_path, 3)  # neither file is there
    profiles, replicas = tmp_path / PROFILES_FILE, tmp_path / REPLICAS_FILE
    profiles.write_text("".join(json.dumps({"name": name}) + "\n" for name in ("step_3", "steps_2_4", "step_10")))
    replicas.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 3, 4)) + '{"step": 2, "re')
    drop_records_after(tmp_path, 3)
    append_record(replicas, {"step": 4})
    assert [record["name"] for record in read_records(profiles)] == ["step_3"]
    assert [record["step"] for record in read_records(replicas)] == [1, 3, 4]
