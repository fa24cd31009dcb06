"""The main job, from rows on disk to a changed model."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e import jobs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    return tmp_path


PPO = [
    "algorithm.adv_estimator=gae",
    "critic.fsdp.dtype=float32",
    "critic.optim.lr=1e-2",
    "critic.model.enable_gradient_checkpointing=False",
]


def test_grpo_raises_a_reward_that_is_easy_to_raise(folder: Path):
    jobs.train(folder, "run", "trainer.total_training_steps=25", "actor_rollout_ref.rollout.n=8")
    rows = jobs.metrics(folder, "run")
    first = sum(rows[s]["critic/score/mean"] for s in range(1, 6)) / 5
    last = sum(rows[s]["critic/score/mean"] for s in range(21, 26)) / 5
    assert last > first + 0.1


@pytest.mark.parametrize("extra", [[], PPO], ids=["grpo", "ppo"])
def test_metrics_have_their_names_and_are_finite(folder: Path, extra: list[str]):
    jobs.train(folder, "run", "trainer.test_freq=3", "trainer.save_freq=3", *extra)
    rows = jobs.metrics(folder, "run")
    assert sorted(rows) == list(range(7))
    wanted = {
        "actor/entropy",
        "actor/pg_loss",
        "actor/ppo_kl",
        "actor/pg_clipfrac",
        "actor/grad_norm",
        "actor/lr",
        "critic/score/mean",
        "reward/acc/mean",
        "critic/advantages/max",
        "response_length/mean",
        "prompt_length/mean",
        "timing_s/gen",
        "timing_s/step",
        "perf/throughput",
        "perf/mfu/actor",
        "actor/perf/cpu_memory_used_gb",
        "training/global_step",
        "training/rollout_probs_diff_max",
    }
    if extra:
        wanted |= {"critic/vf_loss", "critic/vf_explained_var", "critic/grad_norm", "critic/values/mean"}
        wanted |= {"perf/mfu/critic", "values/perf/cpu_memory_used_gb"}
    for step in range(1, 7):
        assert wanted <= rows[step].keys(), wanted - rows[step].keys()
        assert all(math.isfinite(v) for v in rows[step].values())
    assert any(name.startswith("val-core/quickstart/addition/") for name in rows[3])


def test_answers_of_a_validation_reach_trackers_with_tables(folder: Path, monkeypatch: pytest.MonkeyPatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_DIR", str(folder / "tb"))
    extra = ["trainer.logger=[tensorboard]", "trainer.val_only=True", "trainer.log_val_generations=2"]
    jobs.train(folder, "run", *extra)
    events = accumulator.EventAccumulator(str(folder / "tb"))
    events.Reload()
    [event] = events.Tensors("val/generations/text_summary")
    assert event.step == 0 and len(event.tensor_proto.string_val[0].decode().splitlines()) == 2 + 2


def test_the_model_on_disk_is_the_trained_one(folder: Path):
    jobs.train(folder, "run", "trainer.save_freq=6")
    saved = load_file(folder / "run" / "global_step_6" / "actor" / "huggingface" / "model.safetensors")
    before = load_file(folder / "model" / "model.safetensors")
    assert saved.keys() == before.keys()
    assert all(not torch.equal(saved[name], before[name]) for name in saved)


def test_rollout_and_trainer_agree_on_log_probs(folder: Path, capsys: pytest.CaptureFixture[str]):
    jobs.train(folder, "run", "trainer.ledger_keep_steps=2")
    assert capsys.readouterr().out.count("GB for the last 2 of 6 steps") == 1
    assert sorted(file.name for file in (folder / "run/ledger").iterdir()) == [f"step_00000{n}.parquet" for n in (5, 6)]
    assert all(r["training/rollout_probs_diff_max"] < 1e-5 for s, r in jobs.metrics(folder, "run").items() if s)


def test_leaving_out_the_old_log_prob_pass_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from verl.trainer.ppo.old_logprobs import FromUpdate

    jobs.train(folder, "lean", "trainer.save_freq=6")
    monkeypatch.setattr(FromUpdate, "update_repeats", lambda self, step: False)
    jobs.train(folder, "full", "trainer.save_freq=6")
    lean, full = (
        load_file(folder / run / "global_step_6" / "actor" / "huggingface" / "model.safetensors")
        for run in ("lean", "full")
    )
    for name in lean:
        torch.testing.assert_close(lean[name], full[name], rtol=2e-4, atol=2e-5)
    entropies = [[row["actor/entropy"] for s, row in jobs.metrics(folder, r).items() if s] for r in ("lean", "full")]
    assert entropies[0] == pytest.approx(entropies[1], rel=1e-3) and min(entropies[0]) > 0


def test_a_mistake_is_one_message_and_exit_code_2(tmp_path: Path):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "data.train_batch_sise=4"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "data.train_batch_size" in done.stderr and "Traceback" not in done.stderr


def test_a_reward_that_always_fails_stops_the_run(folder: Path):
    from verl.utils.errors import RewardError

    (folder / "reward.py").write_text("def compute_score(**kw):\n    raise ValueError('no grader today')\n")
    with pytest.raises(RewardError, match="no grader today"):
        jobs.train(folder, "run")


def test_counted_errors_and_abstentions_are_left_out_and_reported(folder: Path):
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    kind = ord((solution_str or '0')[0]) % 3\n"
        "    return 1 / kind if kind < 2 else {'abstain': True}\n"
    )
    jobs.train(folder, "run", "reward.on_error=count", "trainer.total_training_steps=3", f"{jobs.ARR}.rollout.n=8")
    rows = jobs.metrics(folder, "run")
    assert all(rows[step]["reward/errors"] > 0 and rows[step]["reward/abstained"] > 0 for step in (1, 2, 3))
    assert all(rows[step]["critic/score/mean"] == 1.0 for step in (1, 2, 3))
