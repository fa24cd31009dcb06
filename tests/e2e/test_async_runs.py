"""Colocated asynchronous runs: without staleness they are the synchronous run, and with it nothing is lost."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.e2e import jobs
from tests.e2e.test_resume import assert_same_run, stopping
from tests.mixed_weights import mixed_logprobs
from tests.tiers import slow, soak
from verl.config import load_config
from verl.data.batch import Batch
from verl.observe.events import read_events
from verl.observe.ledger import read_ledger
from verl.trainer.ppo.parking_setup import check_parking
from verl.utils.errors import ConfigError, VerlError
from verl.workers.batch_dispatch import ShardDispatcher

ASYNC = "trainer.v1.trainer_mode=colocate_async"
EVERY_STEP = ["trainer.save_freq=1", "trainer.test_freq=1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "data.gen_batch_size=2"],
        ["actor_rollout_ref.rollout.free_cache_engine=False", "algorithm.adv_estimator=remax"],
    ],
    ids=["grpo", "mini-batches", "remax"],
)
def test_without_staleness_a_run_is_the_synchronous_one_bit_for_bit(folder: Path, extra: list[str]):
    jobs.train(folder, "sync", *EVERY_STEP, *extra)
    jobs.train(folder, "async", *EVERY_STEP, *extra, ASYNC, "async_training.staleness_threshold=0")
    assert_same_run(folder, "sync", "async", step=6)


def test_with_staleness_a_run_trains_on_the_answers_of_older_weights(folder: Path):
    jobs.train(folder, "run", *EVERY_STEP, ASYNC, "async_training.staleness_threshold=1")
    rows = jobs.metrics(folder, "run")
    for step in range(1, 7):
        batch = read_ledger(folder / "run" / "ledger", step).batch
        assert len(batch["group_ids"].unique()) == 4
        assert int((step - 1 - batch["policy_versions"][:, 0]).max()) <= 8
        age = rows[step]["training/off_policy/lag/mean"]
        assert age == (0 if step == 1 else pytest.approx(1, abs=1))
    assert rows[6]["fully_async/count/stale_samples_processed"] > 0


MORE = [
    ["async_training.staleness_threshold=1.5"],
    ["trainer.v1.sampler.max_off_policy_strategy=drop", "trainer.v1.sampler.max_off_policy_threshold=2"],
    ["actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.max_num_seqs=8"],
    ["algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.max_num_seqs=8"],
]


@pytest.mark.parametrize("extra", MORE, ids=["more", "drop", "few-rows", "remax"])
def test_a_resumed_run_goes_on_with_what_was_under_way_bit_for_bit(folder: Path, extra: list[str]):
    """From the checkpoints of steps 1 and 4; with remax, of answers that are complete but for the greedy one."""
    how = ["trainer.save_freq=1", "trainer.test_freq=-1", ASYNC, *extra]
    jobs.train(folder, "run", *how)
    shutil.copytree(folder / "run", folder / "whole")
    shutil.copy(folder / "metrics" / "e2e" / "run.jsonl", folder / "metrics" / "e2e" / "whole.jsonl")
    for saved in (4, 1):
        state = json.loads((folder / "run" / f"global_step_{saved}" / "trainer.json").read_text())
        assert under_way(state)
        for step in range(saved + 1, 7):
            shutil.rmtree(folder / "run" / f"global_step_{step}")
        (folder / "run" / "latest_checkpointed_iteration.txt").write_text(str(saved))
        jobs.train(folder, "run", *how)
        assert_same_run(folder, "whole", "run", step=6)
    assert_trained_once_or_dropped(folder / "run")


def under_way(saved: Any) -> list[dict[str, Any]]:
    """The groups that a checkpoint holds."""
    if not isinstance(saved, dict):
        return []
    return saved.get("groups") or [group for value in saved.values() for group in under_way(value)]


def assert_trained_once_or_dropped(run: Path) -> None:
    """In the history that survives, each admitted group is trained once, or named as dropped, or still under way."""
    admitted: dict[int, int] = {}
    trained: list[int] = []
    dropped: list[int] = []
    for event in surviving(read_events(run / "events.jsonl")):
        if event["event"] == "admitted":
            assert event["group"] not in admitted
            admitted[event["group"]] = event["version"]
        elif event["event"] == "take":
            trained += event["groups"]
            assert all(event["version"] - admitted[group] <= 8 for group in event["groups"])
        elif event["event"] == "dropped":
            dropped.append(event["group"])
    assert len(trained) == len(set(trained)) == 6 * 4 and not set(trained) & set(dropped)
    assert set(trained) | set(dropped) <= set(admitted)


def surviving(events: list[dict]) -> list[dict]:
    """Without what happened after the checkpoint that a later process went on from."""
    out: list[dict] = []
    for event in events:
        if event["event"] == "resumed":
            known = {e["group"] for e in out if e["event"] == "admitted"}
            under_way = set(event["groups"])
            assert under_way <= known
            out = [e for e in out if e["event"] not in ("take", "resumed") or e["version"] < event["version"]]
            out = [e for e in out if e["event"] != "dropped" or e["group"] not in under_way]
            gone = {group for e in out for group in e.get("groups", [e["group"]] if e["event"] == "dropped" else [])}
            out = [e for e in out if e["event"] != "admitted" or e["group"] in under_way | gone]
        out.append(event)
    return out


def test_dynamic_sampling_fills_the_places_of_groups_without_spread(folder: Path):
    filtered = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=seq_reward"]
    jobs.train(folder, "run", ASYNC, *filtered)
    for step, row in jobs.metrics(folder, "run").items():
        if step:
            assert row["reward/groups_without_spread"] == 0
            assert len(read_ledger(folder / "run" / "ledger", step).batch["group_ids"].unique()) == 4


def test_old_log_probs_are_those_of_the_version_that_sampled(folder: Path):
    """The ledger has them: recorded for answers of older weights, the trainer's own pass for the others."""
    jobs.train(folder, "run", ASYNC, "actor_rollout_ref.actor.ppo_mini_batch_size=2", "trainer.save_freq=-1")
    rows, seen = jobs.metrics(folder, "run"), 0
    for step in range(2, 7):
        batch = read_ledger(folder / "run" / "ledger", step).batch
        stale = (batch["policy_versions"][:, 0] < step - 1)[batch.sequence_ids()]
        assert torch.equal(batch["old_logprobs"][stale], batch["rollout_logprobs"][stale])
        torch.testing.assert_close(batch["old_logprobs"][~stale], batch["rollout_logprobs"][~stale], atol=1e-4, rtol=0)
        seen += int(stale.sum())
        if stale.any():
            assert rows[step]["training/off_policy/staleness_k3_kl"] > 1e-9
    assert seen > 0


def test_a_synchronous_checkpoint_is_not_resumed_as_an_asynchronous_one(folder: Path):
    jobs.train(folder, "run", "trainer.save_freq=1", "trainer.total_training_steps=2")
    with pytest.raises(VerlError, match="trainer_mode=sync"):
        jobs.train(folder, "run", "trainer.save_freq=1", ASYNC, "trainer.on_existing=resume")


def test_a_killed_run_ends_like_one_that_never_was(folder: Path):
    how = [*EVERY_STEP, ASYNC, "async_training.staleness_threshold=1.5"]
    jobs.train(folder, "whole", *how)
    kill_and_resume(folder, how)
    assert_same_run(folder, "whole", "killed", step=6)
    assert_trained_once_or_dropped(folder / "killed")


def kill_and_resume(folder: Path, how: list[str]) -> None:
    """Train "killed" in a process that is killed in its fourth step, and then to the end."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *jobs.overrides(folder, "killed", *how)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        while run.poll() is None and not has_taken(folder / "killed" / "events.jsonl", step=4):
            time.sleep(0.005)
        run.kill()
    assert run.returncode == -signal.SIGKILL
    jobs.train(folder, "killed", *how)


def has_taken(events: Path, step: int) -> bool:
    return events.exists() and sum(event["event"] == "take" for event in read_events(events)) >= step


KEEPS = "actor_rollout_ref.rollout.kv_cache_on_publish=keep_kv"


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [*soak([[]]), [KEEPS]], ids=["recompute", "keep_kv"])
def test_answers_of_several_ranks_go_on_under_the_next_weights(folder: Path, keeps: list[str]):
    """Each rank decodes with a copy of the weights, which it drops while the policy is trained, unless it keeps the
    cache of unfinished answers. Float32 throughout: an answer's old log-probs are the trainer's of the versions that
    sampled it."""
    how = [*EVERY_STEP, ASYNC, "trainer.n_gpus_per_node=2", "trainer.device=cpu", "data.max_response_length=40", *keeps]
    jobs.train(folder, "run", *how, *stopping(folder, 3))
    jobs.train(folder, "run", *how)
    assert_trained_once_or_dropped(folder / "run")
    events = read_events(folder / "run" / "events.jsonl")
    mixed = [s for e in events if e["event"] == "answered" for s in e["segments"] if len(s) > 1]
    assert mixed
    assert_old_logprobs_of_each_version(folder, "run", steps=range(2, 7))
    if keeps:
        assert_sampled_with_kept_cache(folder, "run", steps=range(2, 7))


def assert_sampled_with_kept_cache(folder: Path, run: str, steps: range) -> None:
    """The log-probs that the rollout has recorded are those of float64 models in which each version reads the tokens
    that were there when it sampled, after the keys and values of the versions before it. A resume has none of these."""
    models: dict[int, PreTrainedModel] = {}
    events = read_events(folder / run / "events.jsonl")
    resumed = {group for e in events if e["event"] == "resumed" for group in e["groups"]}
    segments = {e["group"]: e["segments"] for e in events if e["event"] == "answered"}
    gaps: list[float] = []
    for step in steps:
        batch = read_ledger(folder / run / "ledger", step).batch
        starts, seen = batch.cu_seqlens.tolist(), Counter[int]()
        for group, start, end in zip(batch["group_ids"].tolist(), starts, starts[1:], strict=False):
            parts, tokens = segments[group][seen[group]], batch["tokens"][start:end].tolist()
            seen[group] += 1
            if len(parts) == 1 or group in resumed:
                continue
            for version, _ in parts:
                path = folder / run / f"global_step_{version}" / "actor" / "huggingface"
                models[version] = models.get(version) or AutoModelForCausalLM.from_pretrained(
                    path if version else folder / "model", dtype=torch.float64
                )
            first = tokens[: len(tokens) - sum(count for _, count in parts)]
            expected = mixed_logprobs(models, first, tokens[len(first) :], parts)
            recorded = batch["rollout_logprobs"][start:end][len(first) :].double()
            torch.testing.assert_close(recorded, expected, atol=1e-5, rtol=0)
            gaps.append(float((batch["old_logprobs"][start:end][len(first) :].double() - recorded).abs().max()))
    assert max(gaps) > 1e-5, "no answer differs from what a recomputed cache gives"


def assert_old_logprobs_of_each_version(folder: Path, run: str, steps: range, mixed: bool = True) -> None:
    """The old log-prob of each token is that of a plain forward in float64 by the checkpoint of the version that
    sampled it, in answers of one version and, unless it is left to time whether there are any, of several."""
    models: dict[int, PreTrainedModel] = {}
    answers = [e for e in read_events(folder / run / "events.jsonl") if e["event"] == "answered"]
    segments = {e["group"]: e["segments"] for e in answers}
    checked: Counter[bool] = Counter()
    for step in steps:
        batch = read_ledger(folder / run / "ledger", step).batch
        starts, seen = batch.cu_seqlens.tolist(), Counter[int]()
        for number, (group, start, end) in enumerate(
            zip(batch["group_ids"].tolist(), starts, starts[1:], strict=False)
        ):
            parts = segments[group][seen[group]]
            seen[group] += 1
            assert [parts[0][0], parts[-1][0]] == batch["policy_versions"][number].tolist()
            tokens, sampled = batch["tokens"][start:end], batch["loss_mask"][start:end]
            old = batch["old_logprobs"][start:end][sampled].double()
            for version, count in parts:
                part, old = old[:count], old[count:]
                first = int(sampled.sum()) - len(old) - count
                if version not in models:
                    path = folder / run / f"global_step_{version}" / "actor" / "huggingface"
                    path = path if version else folder / "model"
                    models[version] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
                with torch.no_grad():
                    logits = models[version](tokens[None], use_cache=False).logits[0, :-1]
                plain = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0][sampled[1:]]
                torch.testing.assert_close(part, plain[first : first + count], atol=1e-5, rtol=0)
                checked[len(parts) > 1] += version < step - 1
    assert checked[False] > 0 and (checked[True] > 0 or not mixed), checked


@pytest.mark.parametrize("ranks", [1, *slow([2])])
def test_old_log_probs_are_scored_before_the_trainer_leaves_a_version(folder: Path, ranks: int):
    """With top_p the rollout's log-probs are not used: the trainer scores what it will train on under newer weights."""
    how = [*EVERY_STEP, ASYNC, "actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    how += [f"trainer.n_gpus_per_node={ranks}", "trainer.device=cpu", "data.max_response_length=12"]
    jobs.train(folder, "run", *how)
    assert_old_logprobs_of_each_version(folder, "run", steps=range(2, 7), mixed=ranks == 1)
    rows = jobs.metrics(folder, "run")
    stale = [step for step in range(2, 7) if rows[step]["training/off_policy/trajectory_staleness/max"] > 0]
    assert stale and all(rows[step]["training/off_policy/staleness_k3_kl"] > 1e-9 for step in stale)
    assert all(rows[step]["rollout_corr/k3_kl"] < 1e-6 for step in stale)  # engine against trainer, one version


def test_rollout_correction_weighs_by_the_gap_to_the_engine_and_not_by_that_between_versions(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    minis: list[Batch] = []
    update = ShardDispatcher.update

    def watched(dispatcher: ShardDispatcher, batch: Batch, *args: Any) -> Any:
        minis.append(batch)
        return update(dispatcher, batch, *args)

    monkeypatch.setattr(ShardDispatcher, "update", watched)
    how = [
        *EVERY_STEP,
        ASYNC,
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    how += ["data.max_response_length=12", "algorithm.rollout_correction.rollout_is=token"]
    jobs.train(folder, "run", *how, "algorithm.rollout_correction.rollout_is_threshold=1.01")
    assert_old_logprobs_of_each_version(folder, "run", steps=range(2, 7))
    assert len(minis) == 12
    for mini in minis:
        gaps = (mini["old_logprobs"] - mini["rollout_logprobs"])[mini["loss_mask"]]
        assert gaps.abs().max() > 1e-4  # bfloat16 against float32
        weights = mini["rollout_is_weights"][mini["loss_mask"]]
        torch.testing.assert_close(weights, gaps.exp().clamp(max=1.01), rtol=1e-5, atol=0)
    rows = jobs.metrics(folder, "run")
    assert max(rows[step]["training/off_policy/staleness_k3_kl"] for step in range(2, 7)) > 1e-9


def test_a_resumed_run_has_the_old_log_probs_that_were_scored(folder: Path):
    how = [*EVERY_STEP, ASYNC, "actor_rollout_ref.rollout.top_p=0.9"]
    jobs.train(folder, "whole", *how)
    jobs.train(folder, "parts", *how, *stopping(folder, 3))
    jobs.train(folder, "parts", *how)
    assert_same_run(folder, "whole", "parts", step=6)


def test_what_cannot_be_is_refused_before_anything_starts(folder: Path):
    ranks = [ASYNC, "trainer.n_gpus_per_node=2", "trainer.device=cpu"]
    stop, sglang = "actor_rollout_ref.rollout.stop=[ab]", "actor_rollout_ref.rollout.name=sglang"
    check_parking(load_config(jobs.overrides(folder, "run", *ranks, stop)))
    for more, refused in ((stop, "use stop_token_ids"), (KEEPS, r"keep_kv needs .* rollout\.name=sglang aborts")):
        with pytest.raises(ConfigError, match=refused):
            check_parking(load_config(jobs.overrides(folder, "run", *ranks, sglang, more)))
