"""Asynchronous runs with devices of its own for the rollout, which samples while the policy is trained."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e import jobs
from tests.e2e.replayed import RecordedArrivals
from tests.e2e.test_async_runs import (
    ASYNC,
    assert_old_logprobs_of_each_version,
    assert_trained_once_or_dropped,
    kill_and_resume,
)
from tests.e2e.test_resume import assert_same_run, checkpoint_tensors, stopping
from tests.tiers import slow
from verl.config import load_config
from verl.experimental.fully_async_policy import fully_async_main
from verl.observe.events import EventLog, read_events
from verl.observe.ledger import read_ledger
from verl.trainer.ppo.run_setup import build_run
from verl.trainer.run.checkpoints import read_state
from verl.workers.engine_worker import EngineWorker

APART = ["trainer.device=cpu", f"{jobs.ARR}.hybrid_engine=False", f"{jobs.ARR}.rollout.n_gpus_per_node=1"]
SEPARATE = [*APART, "trainer.v1.trainer_mode=separate_async"]
EVERY_STEP = ["trainer.save_freq=1", "trainer.test_freq=1"]
LONG = [
    "data.max_response_length=120",
    f"{jobs.ARR}.rollout.max_num_seqs=4",
    f"{jobs.ARR}.rollout.ignore_eos=True",
    "trainer.test_freq=3",
]

BUSY = ["data.max_response_length=60", f"{jobs.ARR}.rollout.max_num_seqs=1"]  # the rollout takes longer than the update


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    return tmp_path


def without_publishing(folder: Path, run: str) -> None:
    """Leave out what a publish to another process counts, which one in place has not."""
    file = folder / "metrics" / "e2e" / f"{run}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        row["data"] = {name: value for name, value in row["data"].items() if not name.startswith("weight_sync/")}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_without_staleness_a_run_is_the_synchronous_one_of_any_placement_bit_for_bit(folder: Path):
    jobs.train(folder, "sync", *EVERY_STEP)
    jobs.train(folder, "apart", *EVERY_STEP, *SEPARATE, "async_training.staleness_threshold=0")
    without_publishing(folder, "apart")
    assert_same_run(folder, "sync", "apart", step=6)


def test_the_rollout_goes_on_while_the_policy_is_trained(folder: Path, monkeypatch: pytest.MonkeyPatch):
    in_flight: set[int] = set()
    answered_in_update: list[bool] = []
    add, update = EventLog.add, EngineWorker.update

    def noting(self: EventLog, event: str, **facts: Any) -> None:
        if event in ("admitted", "answered"):
            (in_flight.add if event == "admitted" else in_flight.discard)(facts["group"])
        add(self, event, **facts)

    def waiting_for_an_answer(self: EngineWorker, *args: Any) -> Any:
        before, deadline = set(in_flight), time.monotonic() + 60
        while before and not answered_in_update and time.monotonic() < deadline:
            time.sleep(0.01)
            if before - in_flight:
                answered_in_update.append(True)
        return update(self, *args)

    monkeypatch.setattr(EventLog, "add", noting)
    monkeypatch.setattr(EngineWorker, "update", waiting_for_an_answer)
    jobs.train(folder, "run", *SEPARATE, *LONG, *BUSY, "async_training.staleness_threshold=1.5", "trainer.save_freq=-1")
    rows, spans = jobs.metrics(folder, "run"), 0
    for step in range(1, 7):
        batch = read_ledger(folder / "run" / "ledger", step).batch
        versions = batch["policy_versions"]
        assert len(batch["group_ids"].unique()) == 4 and int((step - 1 - versions[:, 0]).max()) <= 8
        spans += int((versions[:, 1] > versions[:, 0]).sum())
        assert 0 < rows[step]["weight_sync/pause_s"] < rows[step]["timing_s/update_weights"]
        assert rows[step]["weight_sync/tensors_read_back"] == rows[step]["weight_sync/tensors_sent"] > 0
    assert spans > 0  # answers were sampled before and after a publish
    assert answered_in_update
    assert_trained_once_or_dropped(folder / "run")


def test_a_resumed_run_goes_on_with_the_tokens_that_were_in_flight(folder: Path):
    how = [*SEPARATE, *LONG, "async_training.staleness_threshold=1.5", "trainer.save_freq=3"]
    how += [f"{jobs.ARR}.rollout.max_num_seqs=3", "trainer.test_freq=-1"]
    jobs.train(folder, "run", *how, *stopping(folder, 3))
    state = read_state(folder / "run" / "global_step_3")["source"]
    in_flight = {}  # of older weights: by those of the checkpoint the same tokens would be sampled again
    for one in state["engine"]:
        begun = {n: sample for n, sample in enumerate(one["samples"]) if sample["tokens"]}
        parts = {n: (sample["tokens"], sample["segments"][0][0]) for n, sample in begun.items()}
        in_flight |= {(one["request_id"], sample): part for sample, part in parts.items() if part[1] < 3}
    for group in state["groups"]:  # and what was complete a moment before the save
        for sample, answer in enumerate(group["answers"] or ()):
            sampled = [t for t, is_sampled in zip(answer["tokens"], answer["loss_mask"], strict=True) if is_sampled]
            in_flight[group["group"], sample] = sampled, answer["policy_version"][0]
    assert in_flight
    jobs.train(folder, "run", *how)
    assert_trained_once_or_dropped(folder / "run")
    found = 0
    for step in range(4, 7):
        batch = read_ledger(folder / "run" / "ledger", step).batch
        for row, group in enumerate(batch["group_ids"].tolist()):
            start, end = batch.cu_seqlens[row : row + 2].tolist()
            sampled = batch["tokens"][start:end][batch["loss_mask"][start:end]].tolist()
            if (part := in_flight.get((group, row % 4))) is not None:
                assert sampled[: len(part[0])] == part[0] and int(batch["policy_versions"][row, 0]) == part[1]
                found += 1
    assert found > 0


@pytest.mark.parametrize("ranks", [1, *slow([2])])
def test_old_log_probs_are_scored_by_the_version_that_sampled_when_training_has_moved_on(folder: Path, ranks: int):
    """With top_p the rollout's log-probs are not used, in no part of a step. A resumed run goes on with what was
    scored."""
    how = [*SEPARATE, *LONG[:3], "async_training.staleness_threshold=2", "trainer.save_freq=1", "trainer.test_freq=-1"]
    how += [f"{jobs.ARR}.rollout.top_p=0.9", f"{jobs.ARR}.actor.ppo_mini_batch_size=2"]
    how += [f"trainer.n_gpus_per_node={ranks}", "data.max_response_length=60"]
    if ranks == 1:
        jobs.train(folder, "run", *how, *stopping(folder, 4))
    jobs.train(folder, "run", *how)
    assert_trained_once_or_dropped(folder / "run")
    assert_old_logprobs_of_each_version(folder, "run", steps=range(1, 7), mixed=False)
    rows = jobs.metrics(folder, "run")
    parameters = sum(tensor.numel() for tensor in load_file(folder / "model" / "model.safetensors").values())
    for step in range(2, 7):
        assert rows[step]["training/off_policy/kept_weights_bytes"] == 4 * parameters
        assert rows[step]["rollout_corr/k3_kl"] < 1e-6 < rows[step]["training/off_policy/staleness_k3_kl"]
    assert any(rows[step]["training/off_policy/tokens_scored_before_leaving"] > 0 for step in rows if step)


MODES = {
    "in parts": ["async_training.staleness_threshold=1.5", f"{jobs.ARR}.actor.ppo_mini_batch_size=2"],
    "one step off": ["--config-name=one_step_off_ppo_trainer"],
}


@pytest.mark.parametrize("mode", ["in parts", *slow(["one step off"])])
def test_a_killed_run_trains_every_prompt_once(folder: Path, mode: str):
    how = [*SEPARATE, *LONG[:3], *MODES[mode], "trainer.save_freq=1", "trainer.test_freq=-1"]
    kill_and_resume(folder, how)
    assert_trained_once_or_dropped(folder / "killed")


def test_where_a_replica_is_killed_the_others_answer_and_every_prompt_is_trained_once(folder: Path):
    how = [*SEPARATE, *LONG, "async_training.staleness_threshold=1.5", f"{jobs.ARR}.rollout.n_gpus_per_node=2"]
    run = build_run(load_config(jobs.overrides(folder, "run", *how, "trainer.save_freq=-1")))
    router = run.trainer.source.collector.engine.inner

    def kill_one() -> None:
        if run.trainer.global_step == 2:
            router.engines[1].server.kill()

    run.observers.after_step.append(kill_one)
    try:
        run.fit()
    finally:
        run.trainer.close()
    assert router.restarts == [0, 1]
    events = read_events(folder / "run" / "events.jsonl")
    answered = [e["group"] for e in events if e["event"] == "answered"]
    served = {(e["group"], e["replica"]) for e in events if e["event"] == "sent"}
    assert {replica for _, replica in served} == {0, 1} and {group for group, _ in served} >= set(answered)
    stages = [{name for name, *_ in e["stages"]} for e in events if e["event"] == "stages"]
    assert len(stages) == 6 and all({"update_actor", "update_weights"} <= names for names in stages)
    assert_trained_once_or_dropped(folder / "run")


@pytest.mark.slow
def test_recorded_arrivals_over_the_tokens_of_the_ledger_give_the_same_weights(folder: Path):
    how = [f"{jobs.ARR}.actor.ppo_mini_batch_size=2", "trainer.save_freq=6", "trainer.test_freq=-1"]
    jobs.train(folder, "run", *how, *SEPARATE, *LONG[:3], "async_training.staleness_threshold=1.5")
    replay = build_run(load_config(jobs.overrides(folder, "replay", *how, ASYNC)))
    replay.trainer.source = RecordedArrivals(folder / "run")
    replay.trainer.num_parts = 2
    try:
        replay.fit()
    finally:
        replay.trainer.close()
    first, second = (checkpoint_tensors(folder / run / "global_step_6") for run in ("run", "replay"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_the_program_by_its_old_name_and_keys_runs(folder: Path):
    old = ["data.train_batch_size=0", "data.gen_batch_size=1", f"{jobs.ARR}.actor.ppo_mini_batch_size=2"]
    old += ["async_training.trigger_parameter_sync_step=2", "rollout.nnodes=1", "rollout.n_gpus_per_node=1"]
    old += ["rollout.n=4", "rollout.total_rollout_steps=12", "rollout.test_freq=1", "trainer.device=cpu"]
    named = ("data.train_batch_size", f"{jobs.ARR}.rollout.n=", f"{jobs.ARR}.actor.ppo_mini", "trainer.total_training")
    words = [word for word in jobs.overrides(folder, "run", *old) if word in old or not word.startswith(named)]
    assert fully_async_main.main(words) == 0
    rows = jobs.metrics(folder, "run")
    assert sorted(rows) == [0, 1, 2, 3] and rows[3]["fully_async/count/current_param_version"] == 2
    for step in range(1, 4):
        batch = read_ledger(folder / "run" / "ledger", step).batch
        assert batch.num_sequences == 4 * 4
        assert torch.equal(batch["old_logprobs"], batch["rollout_logprobs"])  # the preset's bypass mode


@pytest.mark.slow
def test_a_step_trains_on_each_mini_batch_as_soon_as_it_is_there(folder: Path):
    """Parts of a step give the weights of whole batches with the same mini-batches; the takes are apart in time."""
    how = [*SEPARATE, f"{jobs.ARR}.actor.ppo_mini_batch_size=2", "trainer.save_freq=3", "trainer.test_freq=-1"]
    how += ["trainer.total_training_steps=3"]
    jobs.train(folder, "parts", *how)
    jobs.train(folder, "whole", *how, "async_training.require_batches=2")
    takes = [[e["groups"] for e in of(folder / run, "take")] for run in ("parts", "whole")]
    assert [len(groups) for groups in takes[0]] == [2] * 6 and [len(groups) for groups in takes[1]] == [4] * 3
    assert [takes[0][i] + takes[0][i + 1] for i in (0, 2, 4)] == takes[1]
    parts, whole = (checkpoint_tensors(folder / run / "global_step_3") for run in ("parts", "whole"))
    assert all(torch.allclose(parts[name].float(), whole[name].float(), atol=2e-5) for name in whole)
    rows, wholes = jobs.metrics(folder, "parts"), jobs.metrics(folder, "whole")
    for step in range(1, 4):
        batch = read_ledger(folder / "parts" / "ledger", step).batch
        assert batch.num_sequences == 16 and len(batch["group_ids"].unique()) == 4
        for name in ("training/off_policy/lag/mean", "actor/lr", "critic/score/mean", "fully_async/count/queued"):
            assert rows[step][name] == wholes[step][name], name
    second = read_ledger(folder / "parts" / "ledger", 1).batch.select(range(8, 16))
    assert torch.equal(second["old_logprobs"], second["rollout_logprobs"])  # the policy had moved on


def of(run: Path, name: str) -> list[dict]:
    return [event for event in read_events(run / "events.jsonl") if event["event"] == name]
