"""A main job on two ranks is the job on one: the same answers are sampled, and the same weights come out."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e import jobs
from tests.tiers import slow
from verl.observe.ledger import read_ledger

ARR = jobs.ARR
STEPS = 3
COMMON = [
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    "trainer.device=cpu",
    f"{ARR}.actor.fsdp_config.dtype=float32",
    f"{ARR}.actor.use_dynamic_bsz=True",
    f"{ARR}.actor.ppo_max_token_len_per_gpu=64",
    f"{ARR}.actor.ppo_mini_batch_size=2",  # two optimiser steps, old log-probs from a pass of their own
]
PPO = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "critic.fsdp.dtype=float32",
    "critic.optim.lr=1e-2",
    "critic.ppo_mini_batch_size=4",
    "critic.model.enable_gradient_checkpointing=False",
    f"{ARR}.ref.fsdp_config.dtype=float32",
    f"{ARR}.rollout.free_cache_engine=False",
    "trainer.balance_batch=False",
]
WITH_REFERENCE = [
    f"{ARR}.actor.use_kl_loss=True",
    f"{ARR}.ref.fsdp_config.dtype=float32",
]
LORA = [*WITH_REFERENCE, f"{ARR}.model.lora_rank=4"]
SHARED = [f"{ARR}.{role}.fsdp_config.ulysses_sequence_parallel_size=2" for role in ("actor", "ref")]  # on two ranks
JOBS = {
    "grpo": ([], [], ["actor"]),
    "ppo": (PPO, [], ["actor", "critic"]),
    "adapters": (LORA, [], ["actor"]),
    "adapters, the original FSDP": (LORA, [f"{ARR}.actor.strategy=fsdp"], ["actor"]),
    "tokens of a sequence shared": (WITH_REFERENCE, SHARED, ["actor"]),
    "experts divided": (
        [],
        [f"{ARR}.actor.strategy=veomni"]
        + [f"{ARR}.actor.veomni.{word}" for word in ("expert_parallel_size=2", "mixed_precision=False")],
        ["actor"],
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    return tmp_path


def save_mixture(path: Path) -> None:
    """A random mixture of experts in place of the model in `path`, with its sizes."""
    dense = AutoConfig.from_pretrained(path).to_dict()
    sizes = {name: dense[name] for name in dense if name not in ("model_type", "architectures", "mlp_only_layers")}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **sizes, **experts)).save_pretrained(path)


def trained(folder: Path, run: str, role: str = "actor", step: int = STEPS) -> dict[str, torch.Tensor]:
    files = sorted((folder / run / f"global_step_{step}" / role / "huggingface").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("job", ["grpo", "ppo", "experts divided", *slow(list(JOBS)[2:-1])])
def test_two_ranks_sample_and_learn_what_one_does(folder: Path, job: str):
    extra, on_two, roles = JOBS[job]
    if job == "experts divided":
        save_mixture(folder / "model")
    jobs.train(folder, "one", *COMMON, *extra)
    jobs.train(folder, "two", *COMMON, *extra, *on_two, "trainer.n_gpus_per_node=2")
    assert_same_answers(folder, STEPS)
    row = jobs.metrics(folder, "two")[1]  # on a CPU a process's memory, with its libraries
    assert row["actor/perf/planned_memory_gb"] > 0
    if job != "ppo":  # whose rollout does not sleep: a CPU takes the memory of its KV cache as that fills
        assert row["actor/perf/planned_memory_gb"] < row["actor/perf/max_memory_allocated_gb"]
    for role in roles:
        one, two = trained(folder, "one", role), trained(folder, "two", role)
        start = load_file(next((folder / "model").glob("*.safetensors")))
        assert one.keys() == two.keys()
        for name, tensor in one.items():  # by norm: where a gradient is rounding alone, Adam makes a whole step of it
            change = tensor - start[name] if name in start else tensor
            assert float((tensor - two[name]).norm()) <= 1e-4 * float(change.norm()), name
        moved = [name for name in start if name in one and not torch.equal(start[name], one[name])]
        assert len(moved) > 5
    ours, theirs = (jobs.without_timings(jobs.metrics(folder, run)) for run in ("one", "two"))
    assert ours.keys() == theirs.keys()
    for step, values in ours.items():
        assert values.keys() == theirs[step].keys()
        assert theirs[step].get("rollout/generated_tokens") == values.get("rollout/generated_tokens")
        for name, value in values.items():
            if name.startswith(("rollout/", "global_seqlen/")):  # about how many ranks answered, and trained on what
                continue
            assert theirs[step][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
        for found in (values, theirs[step]) if "actor/loss" in values else ():
            low, high, mean = (found[f"global_seqlen/{name}"] for name in ("balanced_min", "balanced_max", "mean"))
            assert low <= high and low + high == pytest.approx(2 * mean)


def assert_same_answers(folder: Path, steps: int) -> None:
    for step in range(1, steps + 1):
        one, two = (read_ledger(folder / run / "ledger", step).batch for run in ("one", "two"))
        assert torch.equal(one["tokens"], two["tokens"]) and torch.equal(one["rewards"], two["rewards"])
        torch.testing.assert_close(one["rollout_logprobs"], two["rollout_logprobs"], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_run_over_ranks_resumes_on_as_many_and_on_one(folder: Path):
    """Two ranks to step 1, two to step 2, one to step 3: what one rank makes of three steps."""
    schedule = f"{ARR}.actor.optim.total_training_steps={STEPS}"
    jobs.train(folder, "one", *COMMON, schedule)
    for step, ranks in ((1, 2), (2, 2), (3, 1)):
        limits = [f"trainer.total_training_steps={step}", "trainer.save_freq=1", f"trainer.n_gpus_per_node={ranks}"]
        jobs.train(folder, "two", *COMMON, schedule, *limits)
    assert_same_answers(folder, STEPS)
    one, two = trained(folder, "one"), trained(folder, "two")
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("spawned_ranks")  # whose command lines tell them from other processes
def test_a_run_that_has_lost_a_rank_goes_on_as_if_it_had_not(folder: Path, capsys: pytest.CaptureFixture[str]):
    """The reward kills a rank while the others may sample, once, in the step after the second checkpoint."""
    deadly = f"""
import os, signal
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    folder = Path({str(folder)!r})
    if (folder / "lost" / "global_step_2").exists() and not (folder / "shot").exists():
        (folder / "shot").touch()
        children = Path(f"/proc/{{os.getppid()}}/task").glob("*/children")
        started = [int(word) for file in children for word in file.read_text().split()]
        ranks = [pid for pid in started if b"spawn_main" in Path(f"/proc/{{pid}}/cmdline").read_bytes()]
        os.kill(max(ranks), signal.SIGKILL)
    return sum(c.isdigit() for c in solution_str) / 8
"""
    (folder / "deadly.py").write_text(deadly)
    on_two = [*COMMON, "trainer.n_gpus_per_node=2", "trainer.save_freq=1"]
    jobs.train(folder, "whole", *on_two)
    capsys.readouterr()
    jobs.train(folder, "lost", *on_two, f"reward.custom_reward_function.path={folder / 'deadly.py'}")
    said = capsys.readouterr().out
    assert (folder / "shot").exists() and "was killed by SIGKILL" in said
    assert re.search(r"restart 1 of 3: all ranks, from step [1-3]\b", said)  # as far as the background has saved
    assert "restarts     after a lost rank or node from the newest checkpoint, 3 times at most" in said
    whole, lost = trained(folder, "whole"), trained(folder, "lost")
    assert all(torch.equal(whole[name], lost[name]) for name in whole)
    assert jobs.without_timings(jobs.metrics(folder, "whole")) == jobs.without_timings(jobs.metrics(folder, "lost"))
