"""No run overwrites another: it stops, takes another name, or goes on; and it says what it does and leaves a model."""

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import jobs, test_sft
from verl.commands import generate_answers
from verl.commands.score_answers import print_scores
from verl.config import load_config
from verl.observe.events import read_events
from verl.observe.progress import Progress
from verl.trainer import main_ppo
from verl.trainer.run.checkpoints import complete_steps
from verl.trainer.sft_trainer import run_sft
from verl.utils.errors import ConfigError

TWO = "trainer.total_training_steps=2"
QUICK = ["trainer.val_before_train=False", "actor_rollout_ref.actor.optim.total_training_steps=9"]
OTHER = "actor_rollout_ref.actor.optim.lr=3e-3"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    monkeypatch.chdir(tmp_path)
    jobs.prepare(tmp_path)
    return tmp_path


def contents(folder: Path, run: str) -> dict[str, bytes]:
    """Every file of a run, and its metrics."""
    files = [*(folder / run).rglob("*"), folder / "metrics" / "e2e" / f"{run}.jsonl"]
    return {str(path): path.read_bytes() for path in files if path.is_file()}


@pytest.mark.parametrize("how", [[OTHER], ["trainer.resume_mode=disable"]], ids=["other", "disable"])
def test_another_configuration_stops_with_the_ways_out_or_takes_another_name(
    folder: Path, how: list[str], capsys: pytest.CaptureFixture[str]
):
    jobs.train(folder, "run", TWO, *QUICK)
    before = contents(folder, "run")
    assert main_ppo.main(jobs.overrides(folder, "run", TWO, *QUICK, *how)) == 2
    said = capsys.readouterr().err
    assert "already holds steps up to 2" in said and "trainer.on_existing=rename" in said
    assert ("optim.lr 0.01 -> 0.003" in said and "trainer.on_existing=resume" in said) == (how == [OTHER])
    jobs.train(folder, "run", TWO, *QUICK, *how, "trainer.on_existing=rename")
    assert contents(folder, "run") == before
    assert complete_steps(folder / "run-2") == [2] and list(jobs.metrics(folder, "run-2")) == [1, 2]
    assert "run e2e/run-2: new; run holds another run" in capsys.readouterr().out


def test_a_rerun_goes_on_and_another_configuration_that_goes_on_names_its_keys(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    jobs.train(folder, "run", TWO, *QUICK)
    jobs.train(folder, "run", "trainer.total_training_steps=3", *QUICK)
    said = capsys.readouterr().out
    assert "run e2e/run: continues after step 2\n  may change: trainer.total_training_steps 2 -> 3\n" in said
    jobs.train(folder, "run", "trainer.total_training_steps=4", *QUICK, OTHER, "trainer.on_existing=resume")
    said = capsys.readouterr().out
    assert "changes the result: actor_rollout_ref.actor.optim.lr 0.01 -> 0.003" in said
    assert list(jobs.metrics(folder, "run")) == [1, 2, 3, 4]
    saved = json.loads((folder / "run" / "run.json").read_text())["config"]
    assert saved["actor_rollout_ref"]["actor"]["optim"]["lr"] == 3e-3


def test_a_rerun_of_what_saved_nothing_keeps_the_earlier_records(folder: Path, capsys: pytest.CaptureFixture[str]):
    how = ["trainer.total_training_steps=1", "trainer.save_freq=-1", "trainer.v1.trainer_mode=colocate_async", *QUICK]
    (folder / "run").mkdir()
    killed_in_its_first_step = '{"event": "publish", "version": 0, "time": 1.0}\n'
    (folder / "run" / "events.jsonl").write_text(killed_in_its_first_step)
    for _ in range(2):
        jobs.train(folder, "run", *how)
    assert (folder / "run" / "events.earlier-1.jsonl").read_text() == killed_in_its_first_step
    said = capsys.readouterr().out
    assert "saves nothing" in said.splitlines()[0] and "starts over, as it had saved nothing" in said
    assert complete_steps(folder / "run") == [] and (folder / "metrics" / "e2e" / "run.earlier-1.jsonl").exists()
    assert list((folder / "run" / "ledger.earlier-1").glob("*.parquet"))
    for name in ("events.earlier-2.jsonl", "events.jsonl"):
        assert [event["event"] for event in read_events(folder / "run" / name)].count("take") == 1


def test_a_run_without_a_name_gets_the_date_and_a_counter_and_says_how_to_continue(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    nameless = [o for o in jobs.overrides(folder, "", TWO, *QUICK) if "experiment_name" not in o]
    nameless = [o for o in nameless if "default_local_dir" not in o]
    names = []
    for extra in ([], [], [TWO.replace("2", "3"), "trainer.on_existing=resume"]):
        assert main_ppo.main([*nameless, *extra]) == 0
        first = capsys.readouterr().out.splitlines()[0]
        names.append(re.match(r"run e2e/(grpo-\d{4}-\d\d-\d\d-\d): ", first)[1])  # type: ignore[index]
        if len(names) == 2:
            assert f"to continue the last one (step 2 of 2), add trainer.experiment_name={names[0]}" in first
    assert [name[-2:] for name in names] == ["-1", "-2", "-2"] and first.endswith("continues after step 2")
    root = folder / "checkpoints" / "e2e"
    assert [complete_steps(root / name) for name in names[:2]] == [[2], [2, 3]]


def test_the_header_comes_before_the_libraries_and_the_summary_says_what_to_do_next(folder: Path):
    program = (
        "import sys\nfrom verl.config import load_config\nfrom verl.trainer.main_ppo import run_ppo\n"
        "def announce(line):\n    print('torch' in sys.modules, line)\n"
        "run_ppo(load_config(sys.argv[1:]), announce)\n"
    )
    command = [sys.executable, "-c", program, *jobs.overrides(folder, "run", TWO, "trainer.test_freq=1")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("True ", "False "))]
    early, late = ([text for loaded, text in lines if loaded == when] for when in ("False", "True"))
    assert early[0] == "run e2e/run: new" and [line.split()[0] for line in early[1:5]] == [
        "task", "model", "metrics", "checkpoints",
    ]  # fmt: skip
    assert "16k parameters" in early[2] and "the last step" in early[4]
    words = [line.split()[0] for line in late if line]
    assert words[:4] == ["device", "rows", "answers", "steps"] and "12 prompts, 4 held out" in late[1]
    closing = ("done", "validation", "training", "time", "folder", "model", "continue", "serve", "evaluate", "report")
    assert set(closing) <= set(words[4:])
    assert re.search(r"^step 2/2 \| .* 0s left$", done.stderr, re.MULTILINE)
    model = next(line for line in late if line.startswith("model")).split()[1]
    assert (folder / model / "model.safetensors").is_file()


@pytest.mark.parametrize("values", [(), ("data.val_max_samples=3", "reward.custom_reward_function.name=by_length")])
def test_the_commands_that_evaluate_give_the_score_of_the_last_validation(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], values: tuple[str, ...]
):
    reward = folder / "reward.py"
    text = "def {}(data_source, solution_str, ground_truth, extra_info=None):\n    return {}\n"
    digits = "sum(int(c) * 10.0 ** -n for n, c in enumerate(solution_str) if c.isdigit())"
    reward.write_text(text.format("compute_score", digits) + text.format("by_length", f"1 - {digits}"))
    said: list[str] = []
    config = load_config(jobs.overrides(folder, "run", TWO, "trainer.test_freq=1", *values))
    scores = main_ppo.run_ppo(config, said.append)
    (score,) = [value for name, value in scores.items() if name.startswith("val-core/")]
    monkeypatch.chdir(folder)
    generate, score_answers = (line.split(maxsplit=1)[1] for line in said if line.startswith("evaluate"))
    assert generate_answers.main(shlex.split(generate)[2:]) == 0
    capsys.readouterr()
    assert print_scores(load_config(shlex.split(score_answers)[2:], config_name="evaluation"))
    (again,) = json.loads(capsys.readouterr().out.splitlines()[-1]).values()
    assert again == pytest.approx(score, rel=1e-9)


def test_progress_names_every_stage_and_counts_the_answers(folder: Path, monkeypatch: pytest.MonkeyPatch):
    stream, shown = io.StringIO(), []

    class Watched(Progress):
        def __init__(self) -> None:
            super().__init__(stream=stream)

        def stage(self, name: str) -> None:
            super().stage(name)
            shown.append(self.stage_name)

        def count(self, text: str) -> None:
            super().count(text)
            shown.append(f"{self.stage_name} {self.counted}")

    monkeypatch.setattr(main_ppo, "Progress", Watched)
    jobs.train(folder, "run", "trainer.total_training_steps=1", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    wanted = [
        "loading libraries", "reading and filtering prompts", "loading the model", "validating",
        "validating 4 of 4 answers", "generating", "generating 0 of 16 answers", "generating 16 of 16 answers",
        "evaluating log-probs", "updating", "publishing weights", "saving",
    ]  # fmt: skip
    assert [stage for stage in shown if stage in wanted and shown.count(stage)] == sorted(
        (stage for stage in shown if stage in wanted), key=wanted.index
    )
    assert set(wanted) <= set(shown)


def test_fine_tuning_stops_goes_on_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]):
    def tune(*extra: str) -> None:
        run_sft(load_config(test_sft.overrides(folder, "sft", *extra), config_name="sft_trainer"))

    tune(TWO)
    said = capsys.readouterr().out
    assert said.startswith("run e2e/sft: new\n") and "4 conversations, 4 held out" in said and "verl serve" in said
    assert json.loads((folder / "sft" / "run.json").read_text())["config"]["optim"]["lr"] == 0.01
    with pytest.raises(ConfigError, match=r"steps up to 2 of another configuration \(optim.lr 0.01 -> 0.002\)"):
        tune(TWO, "optim.lr=2e-3")
    tune(TWO.replace("2", "3"), "optim.lr=2e-3", "trainer.on_existing=resume")
    said = capsys.readouterr().out
    assert "changes the result: optim.lr 0.01 -> 0.002" in said and "resumed from" in said
    with pytest.raises(ConfigError, match=r"another configuration \(command"):
        jobs.train(folder, "sft", TWO)
