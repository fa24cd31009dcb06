"""Distillation in real runs of three steps: top-k and estimators, one teacher and two, and what is refused."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e import jobs
from tests.e2e.jobs import ARR
from verl.commands.quickstart.addition_task import CHARACTERS
from verl.commands.quickstart.small_model import make_model
from verl.config import load_config
from verl.config.check import check_can_start
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.trainer import PPOTrainer
from verl.utils.errors import ConfigError, DataError

LOSS, TEACHER = "distillation.distillation_loss", "distillation.teacher_models"
SHORT = ("trainer.total_training_steps=3", "trainer.save_freq=-1", "trainer.val_before_train=False")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("distillation")
    jobs.prepare(out)
    for name, seed in (("one", 5), ("two", 6)):
        make_model(out / name, CHARACTERS, seed, hidden=32, layers=1)
    lines = (out / "data" / "train.jsonl").read_text().splitlines()
    half = len(lines) // 2
    for name, first in (("a", lines[:half]), ("b", lines[half:])):
        lines = [line.replace('"data_source": "', f'"domain": "{name}", "data_source": "') for line in first] + [
            line for line in lines if line not in first
        ]
    (out / "data" / "domains.jsonl").write_text("\n".join(sorted(lines)) + "\n")
    return out


@pytest.fixture
def run(folder, monkeypatch):
    """Trains three steps with distillation; the batches and the metrics by step."""
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(folder / "metrics"))

    def train(name: str, *overrides: str):
        batches, step = [], PPOTrainer.step

        def watched(self, timer):
            record = step(self, timer)
            batches.append(record.batch)
            return record

        monkeypatch.setattr(PPOTrainer, "step", watched)
        exact = f"{ARR}.ref.fsdp_config.dtype=float32"  # of the teachers too; auto is bfloat16 on a GPU
        jobs.train(folder, name, *SHORT, "distillation.enabled=True", exact, *overrides)
        return batches, {number: row for number, row in jobs.metrics(folder, name).items() if number}

    return train


def teacher(folder: Path, name: str) -> str:
    return f"{TEACHER}.teacher_model.model_path={folder / name}"


@pytest.mark.parametrize("mode", ["forward_kl_topk", "k3"])
def test_the_policy_comes_closer_to_the_teacher(run, folder, mode):
    only = (f"{LOSS}.use_task_rewards=False", f"{LOSS}.topk=4")
    batches, metrics = run(f"closer-{mode}", teacher(folder, "one"), f"{LOSS}.loss_mode={mode}", *only)
    losses = [metrics[step]["distillation/loss"] for step in (1, 2, 3)]
    assert losses[0] > losses[2] > 0 and metrics[1]["timing_s/teacher"] > 0
    assert metrics[1]["distillation/loss_min"] <= losses[0] <= metrics[1]["distillation/loss_max"]
    assert metrics[1]["actor/loss"] == pytest.approx(losses[0], rel=1e-4)
    mask = batches[0]["loss_mask"]
    if mode == "k3":
        assert (batches[0]["teacher_logprobs"][mask] < 0).all() and "teacher_top_ids" not in batches[0]
    else:
        assert batches[0]["teacher_top_ids"].shape == (batches[0].num_tokens, 4)
        assert 0 < metrics[1]["distillation/student_mass"] < 1
        assert metrics[1]["distillation/teacher_mass_min"] <= metrics[1]["distillation/teacher_mass"]


@pytest.mark.parametrize("mode", ["forward_kl_topk", "k3", "k2"])
def test_a_teacher_equal_to_the_policy_changes_nothing(run, folder, mode):
    overrides = (f"{LOSS}.loss_mode={mode}", f"{LOSS}.topk=5", f"{LOSS}.use_task_rewards=False")
    _, metrics = run(f"same-{mode}", teacher(folder, "model"), *overrides, f"{ARR}.actor.optim.weight_decay=0")
    assert abs(metrics[1]["distillation/loss"]) < 1e-6 and metrics[1]["actor/grad_norm"] < 1e-5


def test_minus_the_divergence_is_an_advantage(run, folder):
    overrides = (f"{LOSS}.loss_mode=k1", f"{LOSS}.use_policy_gradient=True", f"{LOSS}.use_task_rewards=False")
    _, metrics = run("advantages", teacher(folder, "one"), *overrides)
    assert metrics[1]["distillation/pg_loss"] == pytest.approx(metrics[1]["distillation/loss"], rel=1e-4)
    assert metrics[3]["distillation/abs_loss"] < metrics[1]["distillation/abs_loss"]


def test_the_column_of_the_row_picks_one_of_two_teachers(run, folder):
    two = [f"+{TEACHER}.{n}.{k}" for n in ("first", "second") for k in ("model_path", "key")]
    values = (folder / "one", "a", folder / "two", "b")
    overrides = [f"{key}={value}" for key, value in zip(two, values, strict=True)]
    data = f"data.train_files={folder / 'data' / 'domains.jsonl'}"
    both, _ = run("two", data, "distillation.teacher_key=domain", *overrides)
    first, _ = run("first", data, teacher(folder, "one"))
    second, _ = run("second", data, teacher(folder, "two"))
    by_row = [line.count('"domain": "a"') for line in (folder / "data" / "domains.jsonl").read_text().splitlines()]
    is_first = torch.tensor([by_row[row] for row in both[0]["rows"].tolist()], dtype=torch.bool)
    assert is_first.any() and not is_first.all()
    expected = torch.where(
        is_first[both[0].sequence_ids()], first[0]["teacher_logprobs"], second[0]["teacher_logprobs"]
    )
    torch.testing.assert_close(both[0]["teacher_logprobs"], expected, rtol=1e-5, atol=1e-6)


def test_rows_without_a_teacher_are_counted_and_the_first_is_named(folder):
    data = folder / "data" / "domains.jsonl"
    lines = data.read_text().splitlines()
    of_b = sum('"domain": "b"' in line for line in lines)
    one = (f"+{TEACHER}.first.model_path={folder / 'one'}", f"+{TEACHER}.first.key=a")
    keys = (f"data.train_files={data}", "distillation.enabled=True", *one)
    for column, said in (
        (
            "domain",
            rf"{of_b} of {len(lines)} rows have no teacher, the first is .*: domain='b' is the key of no teacher",
        ),
        ("nowhere", rf"{len(lines)} of {len(lines)} rows have no teacher, the first is .*line 1: has no 'nowhere'"),
    ):
        with pytest.raises(DataError, match=said + r"; known: a \(distillation.teacher_key="):
            run_ppo(load_config(jobs.overrides(folder, "rows", *SHORT, *keys, f"distillation.teacher_key={column}")))


@pytest.mark.parametrize(
    ("lacks", "said"),
    [("", "is not a folder"), ("*.safetensors", r"holds no \*.safetensors"), ("tokenizer*", "tokenizer")],
)
def test_a_folder_that_is_no_teacher_is_named_with_its_key(folder, lacks, said):
    broken = folder / "no_teacher"
    shutil.rmtree(broken, ignore_errors=True)
    if lacks:
        shutil.copytree(folder / "one", broken)
        for file in broken.glob(lacks):
            file.unlink()
    keys = ("distillation.enabled=True", teacher(folder, "no_teacher"))
    with pytest.raises(
        ConfigError, match=rf"teacher_models.teacher_model.model_path={broken} cannot be a teacher: .*{said}"
    ):
        run_ppo(load_config(jobs.overrides(folder, "broken", *SHORT, *keys)))


def test_a_teacher_has_a_temperature_of_its_own(run, folder):
    """Its log-probs are those of its logits divided by it, in transformers."""
    [batch, *_], _ = run("cold", teacher(folder, "one"), f"+{TEACHER}.teacher_model.temperature=0.5")
    model = AutoModelForCausalLM.from_pretrained(folder / "one", dtype=torch.float32)
    start, stop = batch.cu_seqlens[:2].tolist()
    tokens, sampled = batch["tokens"][start:stop], batch["loss_mask"][start:stop]
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, :-1]
    expected = (logits / 0.5).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    found = batch["teacher_logprobs"][start:stop]
    torch.testing.assert_close(found[1:][sampled[1:]], expected[sampled[1:]], rtol=1e-4, atol=1e-5)


def test_two_ranks_train_the_same_policy(run, folder):
    overrides = (teacher(folder, "one"), f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=4", "trainer.device=cpu")
    _, one = run("one-rank", *overrides)
    _, two = run("two-ranks", *overrides, "trainer.n_gpus_per_node=2")
    for name in ("distillation/loss", "distillation/loss_max", "distillation/student_mass_min", "actor/grad_norm"):
        assert two[1][name] == pytest.approx(one[1][name], rel=1e-4), name


def test_another_tokenizer_is_refused(folder):
    other = folder / "other"
    shutil.rmtree(other, ignore_errors=True)
    make_model(other, CHARACTERS[::-1], 0, hidden=32, layers=1)
    keys = ("distillation.enabled=True", teacher(folder, "other"))
    with pytest.raises(ConfigError, match="another tokenizer than the policy"):
        run_ppo(load_config(jobs.overrides(folder, "other", *SHORT, *keys)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.topk=5000"), "topk=5000 is more than"),
        ((f"{LOSS}.loss_mode=forward_kl_topk", f"{LOSS}.use_policy_gradient=True"), "does not depend on the sampled"),
        ((f"{LOSS}.use_policy_gradient=True", f"{LOSS}.policy_loss_mode=kl_cov"), "asks for .*chosen_tokens"),
        ((f"{LOSS}.loss_mode=k9",), "unknown distillation loss 'k9'"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_first_step(folder, overrides, message):
    keys = ("distillation.enabled=True", teacher(folder, "one"), *overrides)
    with pytest.raises(ConfigError, match=message):
        run_ppo(load_config(jobs.overrides(folder, "refused", *SHORT, *keys)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((f"{TEACHER}.teacher_model.model_path=null",), "needs a teacher"),
        ((f"+{TEACHER}.b.model_path=x",), "key is not set"),
        (
            (f"+{TEACHER}.b.model_path=x", f"+{TEACHER}.b.key=m", f"{TEACHER}.teacher_model.key=m"),
            "key=m belongs to several",
        ),
        ((f"+{TEACHER}.teacher_model.modelpath=x",), "is no key of a teacher"),
    ],
)
def test_teachers_that_cannot_be_are_refused(folder, overrides, message):
    keys = ("distillation.enabled=True", teacher(folder, "one"), *overrides)
    with pytest.raises(ConfigError, match=message):
        check_can_start(load_config(jobs.overrides(folder, "refused", *SHORT, *keys)))
