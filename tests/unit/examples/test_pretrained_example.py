"""The example on a pretrained model: its rows, its reward, its settings, and what it counts."""

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launched_scripts import LaunchedScripts
from verl.config import load_config
from verl.config.check import check_can_start
from verl.utils.external_code import load_module

EXAMPLE = ROOT / "examples" / "pretrained"
run = load_module(str(EXAMPLE / "run.py"), "test")
reward = load_module(str(EXAMPLE / "reward.py"), "test")


@pytest.mark.parametrize(
    ("answer", "score"),
    [("42", 1.0), ("17 + 25 = 42.", 1.0), ("42 is 17 + 25", 0.0), ("17 + 25 = 32.", 0.0), ("142", 0.0), ("", 0.0),
     ("forty-two", 0.0), ("٤٢", 0.0)],
)  # fmt: skip
def test_the_last_number_of_an_answer_counts(answer: str, score: float):
    assert reward.compute_score("pretrained/sums", answer, "42", {}) == score


def test_no_held_out_sum_is_trained_and_the_seed_decides_which(tmp_path: Path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run.write_sums(tmp_path / name, seed)
    train, test = ((tmp_path / "a" / f"{split}.jsonl").read_text().splitlines() for split in ("train", "test"))
    prompts = [json.loads(line)["prompt"][0]["content"] for line in [*train, *test]]
    assert len(test) == 100 and len(set(prompts)) == len(prompts) == 8100
    row = json.loads(test[0])
    a, b = (int(word) for word in row["prompt"][0]["content"].split("?")[0].split() if word.isdigit())
    assert row["reward_model"]["ground_truth"] == str(a + b)
    assert (tmp_path / "b" / "test.jsonl").read_text().splitlines() == test
    assert (tmp_path / "c" / "test.jsonl").read_text().splitlines() != test


def test_its_settings_can_start(tmp_path: Path):
    config = load_config(run.grpo(tmp_path, tmp_path / "model", 1, run.STEPS))
    check_can_start(config)
    assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 128


def test_the_script_for_a_gpu_can_start(tmp_path: Path):
    config = load_config(LaunchedScripts(tmp_path)("examples/pretrained/run_smollm2_gsm8k.sh", MODEL_PATH="/m")[0])
    check_can_start(config)
    assert config.actor_rollout_ref.model.path == "/m" and config.trainer.n_gpus_per_node == 1


def test_the_gain_is_that_of_each_sum_with_its_interval():
    gain, interval = run.paired([0.0] * 50 + [1.0] * 50, [0.0] * 30 + [1.0] * 70)
    assert gain == pytest.approx(0.2) and interval == pytest.approx(1.96 * (0.16 / 99) ** 0.5)


def test_the_result_has_both_curves(tmp_path: Path):
    (tmp_path / "metrics" / "pretrained").mkdir(parents=True)
    rows = [{"step": step, "data": {"critic/score/mean": step / 10}} for step in range(3)]
    file = tmp_path / "metrics" / "pretrained" / "sums.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test_answers").mkdir()
    for step, scores in ((0, [0.0, 0.0]), (2, [1.0, 0.0])):
        lines = "".join(json.dumps({"score": score}) + "\n" for score in scores)
        (tmp_path / "test_answers" / f"{step}.jsonl").write_text(lines)
    result = run.summary(tmp_path, "sums", 2, 60.0)
    assert (result["before"], result["after"], result["gain"]) == (0.0, 0.5, 0.5)
    assert result["held_out"] == [(0, 0.0), (2, 0.5)] and result["sampled"] == [(1, 0.1), (2, 0.2)]
