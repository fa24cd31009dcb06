"""Preference optimization and reward models on a tiny model."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e import jobs, test_sft
from tests.e2e.test_sft import without_timings
from tests.ranks import run_ranks
from verl import cli
from verl.config import DPOConfig, RewardModelConfig, load_config
from verl.trainer.sft_trainer import run_sft
from verl.utils.errors import ConfigError, DataError, RegistryError

PRESETS = {"dpo": "dpo_trainer", "reward": "reward_trainer"}
EXACT = ["engine.model_dtype=fp64", "engine.dtype=float64"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    monkeypatch.setenv("MASTER_PORT", "1")  # the ranks have met already
    jobs.prepare(tmp_path)
    write_pairs(tmp_path)
    return tmp_path


def write_pairs(folder: Path, count: int = 12) -> None:
    """Sums of different lengths: the right result is chosen, one with a wrong last digit rejected."""
    rows = [
        {"prompt": f"{7**i}+1=", "chosen": f"{7**i + 1};", "rejected": f"{7**i + 2}", "margin": i % 2}
        for i in range(count)
    ]
    (folder / "data" / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config(folder: Path, kind: str, run: str, *extra: str) -> DPOConfig | RewardModelConfig:
    files = {"worked.jsonl": "pairs.jsonl"}
    words = [word.replace(*item) for word in test_sft.overrides(folder, run) for item in files.items()]
    words += ["data.train_batch_size=4", "optim.lr=3e-3", "trainer.total_training_steps=3", *extra]
    return load_config(words, config_name=PRESETS[kind])


def train(folder: Path, kind: str, run: str, *extra: str) -> dict[str, float]:
    return run_sft(config(folder, kind, run, *extra))


@pytest.mark.parametrize("kind", PRESETS)
@pytest.mark.parametrize("lora", [[], ["model.lora_rank=4", "optim.lr=5e-2", "loss.beta=1"]], ids=["whole", "adapters"])
def test_the_loss_starts_at_its_closed_form_and_falls(folder: Path, kind: str, lora: list[str]):
    last = train(folder, kind, "run", *lora, "trainer.total_training_steps=20", "trainer.test_freq=1")
    rows = jobs.metrics(folder, "run")
    first = [json.loads(line)["margin"] for line in (folder / "data" / "pairs.jsonl").read_text().splitlines()]
    assert set(first) == {0, 1}
    losses = {math.log(2), math.log(1 + math.e)}  # margins of 0 and 1 at equal rewards
    assert min(losses) <= rows[1]["train/loss"] <= max(losses)
    assert rows[1]["train/rewards/chosen"] == rows[1]["train/rewards/rejected"] == rows[1]["train/rewards/margins"] == 0
    assert last["val/loss"] < 0.8 * rows[1]["val/loss"] and last["train/loss"] < rows[1]["train/loss"]
    assert last["val/rewards/accuracies"] == 1 and last["val/rewards/margins"] > rows[1]["val/rewards/margins"] > 0
    assert last["val/rewards/margins"] == pytest.approx(
        last["val/rewards/chosen"] - last["val/rewards/rejected"], rel=1e-5
    )
    assert ("val/logps/chosen" in last) == (kind == "dpo")


def test_a_policy_that_is_its_reference_has_the_loss_log_2(folder: Path):
    rows = (folder / "data" / "pairs.jsonl").read_text().replace('"margin": 1', '"margin": null')
    (folder / "data" / "pairs.jsonl").write_text(rows)
    assert train(folder, "dpo", "run", *EXACT, "trainer.total_training_steps=1", "optim.lr=0")[
        "train/loss"
    ] == pytest.approx(math.log(2), rel=1e-7)


@pytest.mark.parametrize("kind", PRESETS)
def test_a_resumed_run_continues_with_the_same_metrics_and_weights(folder: Path, kind: str):
    common = ["trainer.test_freq=2", "trainer.save_freq=2", "trainer.total_training_steps=6"]
    train(folder, kind, "whole", *common)
    train(folder, kind, "parts", *common, "trainer.total_training_steps=2", "optim.total_training_steps=6")
    train(folder, kind, "parts", *common)
    assert without_timings(folder, "whole") == without_timings(folder, "parts")
    ours, theirs = (load_file(path) for path in sorted(folder.glob("*/global_step_6/huggingface/model.safetensors")))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


WAYS = {
    "one pair at a time": ["data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=1"],
    "three pairs": ["data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=3"],
    "a small token budget": ["data.max_token_len_per_gpu=128"],
    "padded": ["data.pad_mode=right"],
}


def assert_equal_metrics(folder: Path, run: str) -> None:
    names = ("train/loss", "train/grad_norm", "train/rewards/", "train/logps/", "val/")
    for step, row in jobs.metrics(folder, "one").items():
        found = jobs.metrics(folder, run)[step]
        for name in (name for name in row if name.startswith(names)):
            assert found[name] == pytest.approx(row[name], rel=1e-10, abs=1e-12), (run, step, name)


@pytest.mark.parametrize("kind", PRESETS)
def test_the_result_depends_neither_on_the_cut_nor_on_the_number_of_ranks(folder: Path, kind: str):
    common = [*EXACT, "data.train_batch_size=5", "trainer.test_freq=1", "optim.lr=1e-2"]
    train(folder, kind, "one", *common)
    for number, how in enumerate(WAYS.values()):
        train(folder, kind, f"way{number}", *common, *how)
        assert_equal_metrics(folder, f"way{number}")
    run_ranks(2, train, folder, kind, "two", *common, "data.max_token_len_per_gpu=128")
    assert_equal_metrics(folder, "two")


def test_two_ranks_that_share_every_sequence_give_the_result_of_one(folder: Path):
    train(folder, "dpo", "one", *EXACT)
    run_ranks(2, train, folder, "dpo", "two", *EXACT, "engine.ulysses_sequence_parallel_size=2")
    assert_equal_metrics(folder, "two")


def test_transformers_gives_the_scores_of_the_saved_reward_model(folder: Path):
    """Padded, as users score: mean rewards of the validation rows are those that training logged."""
    last = train(folder, "reward", "run", *EXACT, "trainer.total_training_steps=4", "optim.lr=3e-2")
    saved = folder / "run" / "global_step_4" / "huggingface"
    model = AutoModelForSequenceClassification.from_pretrained(saved, num_labels=1, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    rows = [json.loads(line) for line in (folder / "data" / "pairs.jsonl").read_text().splitlines()]
    for name in ("chosen", "rejected"):
        texts = [row["prompt"] + row[name] + tokenizer.eos_token for row in rows]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        with torch.no_grad():
            scores = model(**inputs).logits[:, 0]
        assert scores.std() > 1e-3
        assert float(scores.mean()) == pytest.approx(
            last[f"val/rewards/{name}"], rel=1e-6
        )  # its norms round to float32


def test_a_saved_reward_model_is_trained_on(folder: Path):
    before = train(folder, "reward", "run", "trainer.total_training_steps=8")
    saved = folder / "run" / "global_step_8" / "huggingface"
    after = train(folder, "reward", "more", f"model.path={saved}", "trainer.total_training_steps=1", "optim.lr=0")
    assert after["val/rewards/margins"] == pytest.approx(before["val/rewards/margins"], rel=1e-5)


def test_a_reference_free_loss_loads_no_reference(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl.trainer.sft.ranks.frozen_worker", lambda worker: pytest.fail("a reference was loaded"))
    last = train(folder, "dpo", "run", "loss.name=simpo", "loss.beta=2", "trainer.total_training_steps=10")
    assert last["train/loss"] < jobs.metrics(folder, "run")[1]["train/loss"]


def test_the_commands_train_and_the_report_shows_them(folder: Path, capsys: pytest.CaptureFixture[str]):
    for verb in ("dpo", "reward-model"):
        run = folder / verb
        words = [w for w in test_sft.overrides(folder, verb) if not w.startswith("data.")]
        words += [f"data.train_files={folder}/data/pairs.jsonl", "data.train_batch_size=4", "data.max_length=64"]
        assert cli.main([verb, *words, "trainer.total_training_steps=2"]) == 0
        assert cli.main(["report", str(run)]) == 0 and "rewards/accuracies" in (run / "report.html").read_text()
        assert cli.main([verb, "--help"]) == 0
    said = capsys.readouterr().out
    for line in ("preference optimization (sigmoid), verl", "reward-model training (sigmoid), verl", "12 pairs"):
        assert line in said
    assert "training     accuracy" in said and "usage: verl dpo" in said and "usage: verl reward-model" in said


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["loss.name=sigmod"], RegistryError, "unknown preference loss 'sigmod'; did you mean 'sigmoid'"),
        (["data.max_length=512", "data.max_token_len_per_gpu=1000"], ConfigError, "too small for two sequences.*1024"),
        (["data.custom_cls.path=x.py", "data.custom_cls.name=X"], ConfigError, "columns prompt, chosen and rejected"),
        (["loss.beta=0"], ConfigError, "loss.beta=0.* above 0"),
        (["data.max_length=8"], DataError, r"pairs\.jsonl line \d+: the conversation has \d+ tokens"),
    ],
)
def test_a_mistake_is_refused_before_the_first_step(folder: Path, words: list[str], error: type, message: str):
    with pytest.raises(error, match=message):
        train(folder, "dpo", "run", *words)


def test_a_loss_of_ones_own_is_selected_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "square_loss_of_mine.py").write_text(
        "from verl.algorithms.preferences import register_preference_loss\n"
        "@register_preference_loss('my_square', uses_reference=False)\n"
        "def my_square(margins, config):\n"
        "    return (margins - config.extra['target']) ** 2\n"
    )
    monkeypatch.syspath_prepend(folder)
    own = ["loss.name=my_square", "model.external_lib=square_loss_of_mine", "+loss.target=3.0", "loss.beta=1"]
    train(folder, "dpo", "run", *own, "trainer.total_training_steps=1", "data.train_batch_size=12", "optim.lr=0")
    row = jobs.metrics(folder, "run")[1]
    assert row["train/loss"] >= (row["train/rewards/margins"] - 3.5) ** 2 > 0  # Jensen; the mean margin of rows is 1/2
