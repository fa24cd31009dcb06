"""Reasons against a run that are said before heavy libraries are loaded, each once."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import jobs
from verl import config
from verl.checks.machine import early_findings
from verl.config import load_config
from verl.config.algorithm import ESTIMATORS
from verl.config.engine import STRATEGIES
from verl.trainer import main_ppo, sft_trainer
from verl.workers.engine.base import EngineRegistry

ARR = "actor_rollout_ref"
# Ends the program at the first line with a reason, and says whether a heavy library was loaded before it.
SCRIPT = """
import os, signal, sys

class Watched:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        self.stream.write(text)
        if "error: " in text:
            heavy = {"torch", "transformers"} & set(sys.modules)
            print("\\nheavy" if heavy else "\\nlight", file=self.stream, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    def __getattr__(self, name):
        return getattr(self.stream, name)

sys.stdout, sys.stderr = Watched(sys.stdout), Watched(sys.stderr)
from verl.cli import main
sys.exit(50 + main(sys.argv[1:]))
"""
MISSING = {
    "train": (
        f"{ARR}.model.path=/m {ARR}.rollout.name=sglang {ARR}.actor.strategy=fsdp3 data.train_files=/x.jsonl "
        "data.val_files=[/y.jsonl] reward.custom_reward_function.path=/r.py algorithm.adv_estimator=grpoo "
        f"{ARR}.actor.ppo_micro_batch_size_per_gpu=1 {ARR}.actor.policy_loss.loss_mode=vanila trainer.device=gpu "
        "reward.reward_manager.name=naiv critic.enable=False",
        ["model.path=/m is not a folder", "no engine named 'fsdp3'", "needs sglang, which is not installed here",
         "/x.jsonl does not exist", "/y.jsonl does not exist", "there is no file /r.py", "advantage estimator 'grpoo'",
         "policy loss 'vanila'; did you mean 'vanilla'?", "device=gpu is no kind of device; known: auto, cpu, cuda",
         "reward_manager.name 'naiv'"],
    ),
    "sft": (
        "model.path=/m engine.strategy=fsdp3 data.train_files=/x.jsonl data.val_files=/y.jsonl trainer.device=cpuu",
        ["model.path=/m is not a folder", "no engine named 'fsdp3'", "/x.jsonl does not", "/y.jsonl does not",
         "trainer.device=cpuu is no kind of device; known"],
    ),
    "eval": (
        "data.path=/x.jsonl custom_reward_function.path=/r.py", ["there is no file /r.py", "/x.jsonl does not exist"],
    ),
    "certify": (
        f"{ARR}.model.path=/m {ARR}.actor.strategy=fsdp3 data.train_files=/x.jsonl critic.model.path=/c "
        "critic.strategy=fsdp",
        ["model.path=/m is not a folder", "no engine named 'fsdp3'", "/x.jsonl does not", "model.path=/c is not"],
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _metrics_go_to_the_test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))


@pytest.mark.parametrize("verb", MISSING)
def test_what_is_missing_is_said_at_once_before_heavy_libraries_are_loaded(verb: str, tmp_path: Path):
    words, reasons = MISSING[verb]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, verb, *words.split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert "\nlight\n" in said, said
    assert f"error: {len(reasons)} things keep" in said
    assert [reason for reason in reasons if reason not in said] == []


@pytest.mark.parametrize("port", ["99999", "65536"])
def test_a_server_without_a_model_and_with_no_port_says_both_at_once(tmp_path: Path, port: str):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "serve", "--port", port],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert "\nlight\n" in done.stderr and "a port is a number from 0 to 65535" in done.stderr, done.stderr
    assert "no model is named; give its folder: verl serve model=DIR" in done.stderr


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def compute_scores(x):\n    def compute_score(): ...\n", "did you mean 'compute_scores'?"),
        ("import os\ndef compute_score(\n", "SyntaxError: '(' was never closed"),
    ],
)
def test_a_reward_file_without_its_function_is_said_before_it_runs(tmp_path: Path, text: str, says: str):
    (tmp_path / "r.py").write_text(f"raise SystemExit('it ran')\n{text}")
    for words in (
        f"train {ARR}.model.path=. data.train_files=r.py reward.custom_reward_function.path=r.py",
        "eval data.path=/x.jsonl custom_reward_function.path=r.py",
    ):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *words.split()],
            cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert "\nlight\n" in said and says in said and "it ran" not in said, said


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = ["serve", "model=/m", "rollout.name=sglang", "--port", str(other.getsockname()[1])]
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *words],
            cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
    assert "\nlight\n" in done.stderr and "error: 3 things keep the server from starting" in done.stderr, done.stderr
    for reason in (
        f"--port {words[-1]}: ",
        "--port 0 takes a free port",
        "needs sglang",
        "model.path=/m is",
    ):
        assert reason in done.stderr


def test_the_scorers_of_all_sources_of_an_answers_file_are_looked_up_at_once(tmp_path: Path):
    row = '{"data_source": "%s", "responses": ["1"], "reward_model": {"ground_truth": "1"}}\n'
    (tmp_path / "answers.jsonl").write_text(row % "mine" + row % "openai/gsm8k" + row % "yours")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "eval", "data.path=answers.jsonl"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert "\nlight\n" in done.stderr, done.stderr
    assert "error: 2 things keep" in done.stderr and "'mine'" in done.stderr and "'yours'" in done.stderr


def test_a_run_says_the_early_reasons_first_and_ends_with_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    jobs.prepare(tmp_path)
    words = [f"{ARR}.rollout.name=sglang", "reward.custom_reward_function.path=/r.py", "trainer.logger=[consol]"]
    words += [f"{ARR}.actor.policy_loss.loss_mode=vanila", "algorithm.adv_estimator=grpoo"]
    assert main_ppo.main(jobs.overrides(tmp_path, "run", *words)) == 2
    out, err = capsys.readouterr()
    assert "error: 3 things keep this run from starting:" in out
    assert "error: 5 things keep this run from starting:\n  1. " in err and "\n  5. " in err and "\n  6. " not in err
    early = ["needs sglang, which", "there is no file /r.py", "unknown tracker 'consol'"]
    for reason in (*early, "estimator 'grpoo'", "policy loss 'vanila'"):
        assert out.count(reason) == (reason in early) and err.count(reason) == 1, reason


def test_a_run_whose_reasons_were_all_said_early_ends_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    jobs.prepare(tmp_path)
    assert main_ppo.main(jobs.overrides(tmp_path, "run", f"{ARR}.model.path={tmp_path}/nowhere")) == 2
    out, err = capsys.readouterr()
    assert "nowhere is not a folder" in out and "nowhere is not a folder" in err.splitlines()[-1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_fine_tuning_ends_with_all_reasons(tmp_path: Path, ranks: int, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty").mkdir()
    words = [f"model.path={tmp_path}/empty", f"data.train_files={tmp_path}/none.jsonl", "engine.strategy=fsdp3"]
    words += ["trainer.device=cpu", f"trainer.n_gpus_per_node={ranks}", "trainer.logger=[consol]"]
    assert sft_trainer.main([*words, f"trainer.default_local_dir={tmp_path}/run"]) == 2
    out, err = capsys.readouterr()
    assert "error: 3 things keep this run from starting:" in out and "\n  4. model.path=" in err
    for reason in ("has no config.json", "none.jsonl does not exist", "no engine named 'fsdp3'", "'consol'"):
        assert err.count(reason) == 1, reason


def test_the_names_known_early_are_those_that_register():
    code = """
from verl.algorithms.advantages import ADVANTAGES
from verl.algorithms.losses import POLICY_LOSSES
print(*sorted(ADVANTAGES))
print(*sorted(POLICY_LOSSES))
"""
    # in an interpreter of its own: examples that other tests run register more
    words = [sys.executable, "-c", code]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split() for line in said] == [sorted(ESTIMATORS), sorted(config.algorithm.POLICY_LOSSES)]


@pytest.mark.parametrize("way", ["external_lib", "modules"])
def test_names_that_others_may_register_are_not_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
):
    words = [f"{ARR}.model.path={tmp_path}", "algorithm.adv_estimator=mine", "trainer.device=mine"]
    monkeypatch.delitem(sys.modules, "verl.algorithms.advantage_registry")  # a fresh command has not loaded it
    alone = [str(error) for error in early_findings(load_config(words)).errors]
    if way == "modules":
        monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
    else:
        words.append(f"{ARR}.model.external_lib=mine")
    others = [str(error) for error in early_findings(load_config(words)).errors]
    assert sum("mine" in error for error in alone) == 2 and not any("mine" in error for error in others)


def test_the_engines_known_early_are_those_that_register():
    for strategy in STRATEGIES:
        EngineRegistry.get_engine_cls("language_model", strategy)
    assert set(STRATEGIES) <= set(EngineRegistry._engines["language_model"])
