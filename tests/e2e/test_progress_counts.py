"""What a run says about how far its stages are, and a run without validation rows."""

import io
import json
from pathlib import Path

import pytest

from tests.e2e import jobs
from verl.config import load_config
from verl.observe.progress import Progress
from verl.trainer import main_ppo
from verl.trainer.ppo.run_setup import build_run
from verl.trainer.ppo.sources import trajectory_source
from verl.trainer.ppo.sources.trajectory_source import CollectCounts
from verl.trainer.sft.trainer import build_sft

ARR = jobs.ARR


@pytest.fixture(autouse=True)
def _metrics_go_to_the_test_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))


class Recorded:
    """Every (stage, count) that was shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, str]] = []

    def show(self, progress: Progress, force: bool) -> None:
        if progress.counted:
            self.shown.append((progress.stage_name, progress.counted))

    def close(self) -> None: ...

    def counts(self, stage: str) -> list[str]:
        return [count for name, count in self.shown if name == stage]


def recorded() -> tuple[Progress, Recorded]:
    progress = Progress(stream=io.StringIO())
    progress.display = record = Recorded()
    return progress, record


def first_numbers(counts: list[str]) -> list[int]:
    return [int(count.split()[0].replace(",", "")) for count in counts]


@pytest.mark.parametrize("ranks", [1, 2])
def test_validation_and_generation_count_answers_and_tokens_and_updates_count_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
):
    monkeypatch.setattr(trajectory_source, "TOKENS_EVERY_S", 0.0)
    jobs.prepare(tmp_path)
    words = ["trainer.total_training_steps=1", "trainer.device=cpu", f"trainer.n_gpus_per_node={ranks}"]
    words += [f"{ARR}.actor.ppo_mini_batch_size=2", f"{ARR}.actor.use_kl_loss=True", f"{ARR}.rollout.ignore_eos=True"]
    words += [f"{ARR}.actor.ppo_micro_batch_size_per_gpu=2", f"{ARR}.actor.use_dynamic_bsz=False"]
    words += ["data.max_response_length=100", f"{ARR}.actor.ppo_max_token_len_per_gpu=2000"]
    progress, record = recorded()
    run = build_run(load_config(jobs.overrides(tmp_path, "run", *words)), progress)
    try:
        run.fit()
    finally:
        run.trainer.close()
    for stage, answers in (("validating", 4), ("generating", 16)):
        counts = record.counts(stage)
        assert counts[0] == f"0 of {answers} answers"
        assert any(f"0 of {answers} answers, " in count and count.endswith(" tokens") for count in counts)
        assert any(count.startswith(f"{answers} of {answers} answers") for count in counts)
    assert record.counts("evaluating the reference")[-1] == "16 of 16 sequences"
    updating = first_numbers(record.counts("updating"))
    steps = [0, 2, 4, 6, 8, 10, 12, 14, 16] if ranks == 1 else [0, 8, 16]  # micro-batches, or mini-batches
    assert sorted(set(updating)) == steps and updating == sorted(updating)


def test_answers_that_wait_for_their_score_are_counted_as_such():
    assert CollectCounts(8, 8, 2, 900).text() == "2 of 8 answers scored"
    assert CollectCounts(8, 7, 2, 900).text() == "7 of 8 answers, 900 tokens"


def test_fine_tuning_counts_the_sequences_of_updates_and_validation(tmp_path: Path):
    jobs.prepare(tmp_path)
    rows = [[{"role": "user", "content": f"1{n}+11="}, {"role": "assistant", "content": "1234"}] for n in range(8)]
    for name, some in (("train", rows), ("test", rows[:6])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in some))
    words = [f"model.path={tmp_path}/model", f"data.train_files={tmp_path}/train.jsonl", "trainer.logger=[file]"]
    words += [f"data.val_files={tmp_path}/test.jsonl", "data.train_batch_size=4", "trainer.total_training_steps=1"]
    words += ["data.use_dynamic_bsz=False", "data.micro_batch_size_per_gpu=2", "data.max_length=64"]
    progress, record = recorded()
    config = load_config([*words, f"trainer.default_local_dir={tmp_path}/run"], "sft_trainer")
    trainer = build_sft(config, progress=progress)
    trainer.fit()
    for stage, numbers in {"updating": [0, 2, 4], "validating": [0, 2, 4, 6]}.items():
        counts = first_numbers(record.counts(stage))
        assert counts == sorted(counts) and sorted(set(counts)) == numbers


def test_a_run_without_validation_rows_trains_saves_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    jobs.prepare(tmp_path)
    words = jobs.overrides(tmp_path, "run", "data.val_files=null", "trainer.total_training_steps=2")
    assert main_ppo.main([*words, "trainer.test_freq=1"]) == 0
    said = capfd.readouterr().out
    assert "12 prompts, no validation" in said and "validation every" not in said and "verl generate" not in said
    rows = jobs.metrics(tmp_path, "run")
    assert sorted(rows) == [1, 2] and not [name for row in rows.values() for name in row if name.startswith("val-")]
    assert (tmp_path / "run" / "global_step_2" / "actor" / "huggingface" / "config.json").is_file()
    assert not (tmp_path / "run" / "validation_samples").exists()
