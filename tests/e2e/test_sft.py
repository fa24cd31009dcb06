"""Supervised fine-tuning on a tiny model."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e import jobs
from verl.config import SFTConfig, load_config
from verl.observe.tracking import Tracking
from verl.trainer.run.checkpoints import Checkpoints
from verl.trainer.sft.trainer import SFTTrainer
from verl.trainer.sft_trainer import run_sft
from verl.utils.errors import ConfigError, DataError, Interrupted


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    return tmp_path


def overrides(folder: Path, run: str, *extra: str) -> list[str]:
    return [
        f"model.path={folder / 'model'}",
        "model.enable_gradient_checkpointing=False",
        f"data.train_files={folder / 'data' / 'worked.jsonl'}",
        f"data.val_files={folder / 'data' / 'worked.jsonl'}",
        "data.train_batch_size=2",
        "data.max_length=64",
        "optim.lr=1e-2",
        "engine.dtype=float32",
        "trainer.total_training_steps=8",
        "trainer.logger=[file]",
        "trainer.project_name=e2e",
        f"trainer.experiment_name={run}",
        f"trainer.default_local_dir={folder / run}",
        *extra,
    ]


def config(folder: Path, run: str, *extra: str) -> SFTConfig:
    return load_config(overrides(folder, run, *extra), config_name="sft_trainer")


def train(folder: Path, run: str, *extra: str) -> dict[str, float]:
    return run_sft(config(folder, run, *extra))


def test_the_loss_falls_and_is_the_mean_over_trained_tokens(folder: Path):
    last = train(folder, "run", "trainer.test_freq=4", "trainer.total_training_steps=40")
    rows = jobs.metrics(folder, "run")
    assert rows[1]["train/loss"] > 2.0 > 1.0 > last["train/loss"]
    assert last["val/loss"] < 1.0


def test_the_loss_is_that_of_transformers(folder: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train(folder, "run", "data.train_batch_size=4", "trainer.total_training_steps=1")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    total, count = 0.0, 0
    for line in (folder / "data" / "worked.jsonl").read_text().splitlines():
        prompt, answer = (m["content"] for m in json.loads(line)["messages"])
        ids = tokenizer(prompt + answer + "<eos>", return_tensors="pt")["input_ids"]
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        trained = int((labels != -100).sum())
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * trained
        count += trained
    assert jobs.metrics(folder, "run")[1]["train/loss"] == pytest.approx(total / count, rel=1e-5)


COMMON = ["trainer.save_freq=2", "data.train_batch_size=3", "optim.lr_scheduler_type=cosine"]


def weights(folder: Path, run: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / run / f"global_step_{step}" / "huggingface" / "model.safetensors")


def optimizer_state(folder: Path, run: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / run / f"global_step_{step}" / "optim_world_size_1_rank_0.safetensors")


def assert_same_run(folder: Path, first: str, second: str, step: int) -> None:
    for tensors in (weights, optimizer_state):
        ours, theirs = tensors(folder, first, step), tensors(folder, second, step)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert without_timings(folder, first) == without_timings(folder, second)


def without_timings(folder: Path, run: str) -> dict[int, dict[str, float]]:
    timings = ("timing_s/", "train/perf/", "train/mfu")
    rows = jobs.metrics(folder, run).items()
    return {step: {name: v for name, v in row.items() if not name.startswith(timings)} for step, row in rows}


@pytest.mark.parametrize("stop", [2, 4])  # 4 rows, 3 a step: an epoch is one step
def test_a_resumed_run_continues_bit_for_bit(folder: Path, stop: int, capsys: pytest.CaptureFixture[str]):
    train(folder, "whole", *COMMON, "trainer.test_freq=1")
    whole = jobs.scores_said(capsys)
    train(folder, "parts", *COMMON, "trainer.test_freq=1", f"trainer.total_training_steps={stop}", SCHEDULE)
    capsys.readouterr()
    train(folder, "parts", *COMMON, "trainer.test_freq=1")
    assert_same_run(folder, "whole", "parts", 8)
    assert jobs.scores_said(capsys) == whole and len(whole) > 1 and all("first" in line for line in whole)


SCHEDULE = "optim.total_training_steps=8"


def test_a_run_killed_inside_its_saves_ends_like_one_that_never_was(folder: Path):
    """Each child is killed at some moment of a save; the last one finishes."""
    train(folder, "whole", *COMMON)
    for delay_s in (0.0, 0.02, 0.005):
        child, reader = forked(lambda begun: killed_run(folder, begun))
        with os.fdopen(reader, "rb") as pipe:
            pipe.read(1)
        time.sleep(delay_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    train(folder, "killed", *COMMON)
    assert_same_run(folder, "whole", "killed", 8)


def test_a_step_is_logged_before_its_checkpoint_has_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch):
    logged = jobs.watch_checkpoints(folder, "run", monkeypatch)
    train(folder, "run", "trainer.save_freq=1", "trainer.total_training_steps=3")
    assert logged == [True] * 3


def forked(run: Callable[[int], None]) -> tuple[int, int]:
    """(process, pipe to read from) of a child that runs `run(pipe to write to)`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            run(writer)
        finally:
            os._exit(0)
    os.close(writer)
    return child, reader


def killed_run(folder: Path, begun: int) -> None:
    """Train; write a byte whenever a save begins."""
    original = Checkpoints.save

    def telling(*args: object) -> None:
        os.write(begun, b"s")
        original(*args)  # type: ignore[arg-type]

    Checkpoints.save = telling  # type: ignore[method-assign,assignment]
    train(folder, "killed", *COMMON)


@pytest.mark.parametrize(("stage", "step"), [("update", 3), ("validate", 2)])
def test_ctrl_c_finishes_a_step_and_saves_it(folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str, step: int):
    original = getattr(SFTTrainer, stage)

    def interrupted(trainer: SFTTrainer, given: object) -> object:
        result = original(trainer, given)
        if trainer.global_step == 2:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(SFTTrainer, stage, interrupted)
    with pytest.raises(Interrupted, match=rf"Ctrl-C after step {step} of 8, which is saved in .*global_step_{step}"):
        train(folder, "run", "trainer.test_freq=1", "trainer.total_training_steps=8")
    assert (folder / "run" / "latest_checkpointed_iteration.txt").read_text() == str(step)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_retention_keeps_the_newest(folder: Path):
    train(folder, "run", "trainer.save_freq=2", "trainer.max_ckpt_to_keep=2")
    assert sorted(p.name for p in (folder / "run").glob("global_step_*")) == ["global_step_6", "global_step_8"]


def test_a_checkpoint_whose_huggingface_folder_was_taken_away_stays(folder: Path):
    train(folder, "run", "trainer.total_training_steps=2")
    shutil.rmtree(folder / "run" / "global_step_2" / "huggingface")
    train(folder, "run", "trainer.total_training_steps=3")
    assert (folder / "run" / "global_step_2" / "manifest.json").is_file()


def test_a_resume_that_would_train_on_other_rows_is_refused(folder: Path):
    train(folder, "run", "trainer.total_training_steps=2")
    with pytest.raises(DataError, match=r"other data.train_batch_size \(2, now 1\)"):
        train(folder, "run", "data.train_batch_size=1", "trainer.on_existing=resume")


def test_auto_resume_prefers_the_path_that_was_given(folder: Path, capsys: pytest.CaptureFixture[str]):
    train(folder, "run", "trainer.save_freq=2")
    train(folder, "run", f"trainer.resume_from_path={folder / 'run' / 'global_step_4'}")
    assert "step 4 of 8 is done" in capsys.readouterr().out


def test_adapters_are_fine_tuned_and_resumed(folder: Path):
    lora = [*COMMON, "trainer.test_freq=2", "model.lora_rank=4", "model.lora_alpha=8"]
    train(folder, "whole", *lora)
    train(folder, "parts", *lora, "trainer.total_training_steps=4", SCHEDULE)
    train(folder, "parts", *lora)
    assert_same_run(folder, "whole", "parts", 8)
    losses = [row["train/loss"] for row in jobs.metrics(folder, "whole").values()]
    assert losses[-1] < losses[0]
    saved = load_file(folder / "whole" / "global_step_8" / "lora_adapter" / "adapter_model.safetensors")
    layer, start = "model.layers.0.self_attn.q_proj", load_file(folder / "model" / "model.safetensors")
    a, b = (saved[f"base_model.model.{layer}.lora_{part}.weight"] for part in "AB")
    expected = start[f"{layer}.weight"] + 2 * b @ a
    torch.testing.assert_close(weights(folder, "whole", 8)[f"{layer}.weight"], expected)
    assert torch.equal(weights(folder, "whole", 8)["model.norm.weight"], start["model.norm.weight"])


EXACT = ["engine.model_dtype=fp64", "engine.dtype=float64"]
WAYS = {
    "one sequence at a time": ["data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=1"],
    "two sequences": ["data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=2"],
    "a small token budget": ["data.max_token_len_per_gpu=64"],
    "padded": ["data.pad_mode=right"],
    "recomputed": ["model.enable_gradient_checkpointing=True"],
}


def test_the_loss_and_the_weights_do_not_depend_on_how_a_batch_is_cut(folder: Path):
    write_conversations(folder, 8)
    common = [*EXACT, "data.train_batch_size=8", "trainer.total_training_steps=3"]
    train(folder, "whole", *common, "data.max_token_len_per_gpu=10000")
    expected = weights(folder, "whole", 3)
    for number, how in enumerate(WAYS.values()):
        train(folder, f"way{number}", *common, *how)
        found = weights(folder, f"way{number}", 3)
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)
        for name in ("train/loss", "train/grad_norm", "val/loss"):
            ours, theirs = (jobs.metrics(folder, run)[3][name] for run in ("whole", f"way{number}"))
            assert ours == pytest.approx(theirs, rel=1e-10)


def write_conversations(folder: Path, count: int) -> None:
    rows = [{"messages": turns} for turns in conversations(count)]
    (folder / "data" / "worked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Two turns each, of different lengths."""
    roles = ("user", "assistant", "user", "assistant")
    texts = [[f"{i}+1=", f"{i + 1}", f"{i}*{10**i}=", str(i * 10**i)] for i in range(count)]
    return [[{"role": r, "content": t} for r, t in zip(roles, row, strict=True)] for row in texts]


def test_each_epoch_has_an_order_of_its_own_unless_shuffling_is_off(folder: Path):
    trainer = SFTTrainer(config(folder, "order"), FourRows(), None, Tracking("p", "e", []))
    orders = [trainer.epoch_order(epoch) for epoch in range(8)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders) and len({*map(tuple, orders)}) > 2
    other = SFTTrainer(config(folder, "order", "data.seed=7"), FourRows(), None, Tracking("p", "e", []))
    assert [other.epoch_order(epoch) for epoch in range(8)] != orders
    plain = SFTTrainer(config(folder, "order", "data.shuffle=False"), FourRows(), None, Tracking("p", "e", []))
    assert plain.epoch_order(5) == [0, 1, 2, 3]


class FourRows:
    digest, notes = "", []

    def __len__(self) -> int:
        return 4


def test_the_metrics_have_their_public_names_and_validation_runs_at_the_end(folder: Path):
    train(folder, "run", "trainer.total_training_steps=2")
    rows = jobs.metrics(folder, "run")
    names = {
        "loss",
        "lr",
        "grad_norm",
        "global_tokens",
        "total_tokens(B)",
        "perf/throughput",
        "perf/cpu_memory_used_gb",
        "mfu",
    }
    assert {f"train/{name}" for name in names} <= rows[1].keys()
    assert "val/loss" not in rows[1] and "val/loss" in rows[2]
    total = rows[1]["train/global_tokens"] + rows[2]["train/global_tokens"]
    assert rows[2]["train/total_tokens(B)"] == pytest.approx(total / 1e9)


def test_keys_that_nothing_reads_are_named_before_the_first_step(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    line = "warning: data.micro_batch_size_per_gpu was set, but nothing reads it in this run"
    keys = [
        "data.micro_batch_size_per_gpu=2",
        "checkpoint.async_save=True",
        "optim.clip_grad=0.5",
        "trainer.test_freq=4",
    ]
    train(folder, "run", *keys)
    assert [said for said in capsys.readouterr().out.splitlines() if said.startswith("warning")] == [line]

    def fails(trainer: SFTTrainer, progress: object) -> None:
        raise DataError("the first step")

    monkeypatch.setattr(SFTTrainer, "one_step", fails)
    with pytest.raises(DataError, match="the first step"):
        train(folder, "again", *keys)
    assert line in capsys.readouterr().out.splitlines()


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_trained(folder: Path):
    with pytest.raises(ConfigError, match=r"default_local_dir=.*reward\.py/run cannot be written to .*Not a directory"):
        train(folder, "reward.py/run")
