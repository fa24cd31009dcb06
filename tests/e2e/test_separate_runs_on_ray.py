"""Asynchronous runs on two Ray nodes, with a rank of the trainer and a replica of the rollout on each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e import jobs
from tests.e2e.test_async_runs import assert_trained_once_or_dropped
from tests.e2e.test_ray_nodes import ray_of_nodes
from tests.e2e.test_resume import checkpoint_tensors, stopping
from verl.config import load_config
from verl.experimental.fully_async_policy import fully_async_main
from verl.observe.events import read_events
from verl.observe.ledger import read_ledger
from verl.trainer.ppo.run_setup import build_run

pytestmark = pytest.mark.ray
ROLLOUT = f"{jobs.ARR}.rollout"
ON_RAY = ["trainer.device=cpu", "trainer.nnodes=2", "trainer.n_gpus_per_node=1", f"{ROLLOUT}.n_gpus_per_node=1"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ray_of_nodes(2, "127.0.0.2") as cluster:
        yield cluster.address


@pytest.fixture
def folder(tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAY_ADDRESS", address)
    jobs.prepare(tmp_path)
    return tmp_path


def test_without_staleness_a_run_is_the_synchronous_one_on_processes_bit_for_bit(folder: Path):
    how = ["trainer.device=cpu", "trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=1"]
    apart = ["trainer.v1.trainer_mode=separate_async", f"{jobs.ARR}.hybrid_engine=False"]
    jobs.train(folder, "ray", *how, *ON_RAY, *apart, "async_training.staleness_threshold=0")
    jobs.train(folder, "sync", *how, "trainer.runtime=processes", "trainer.n_gpus_per_node=2")
    found, wanted = (checkpoint_tensors(folder / run / "global_step_2") for run in ("ray", "sync"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    rows, expected = (jobs.without_timings(jobs.metrics(folder, run)) for run in ("ray", "sync"))
    for step, row in expected.items():
        assert {k: v for k, v in rows[step].items() if k in row and "weight_sync/" not in k} == {
            k: v for k, v in row.items() if "weight_sync/" not in k
        }


def test_a_run_loses_a_replica_is_resumed_by_its_old_name_and_trains_every_prompt_once(folder: Path):
    how = [*ON_RAY, "data.max_response_length=40", f"{ROLLOUT}.max_num_seqs=1", f"{ROLLOUT}.ignore_eos=True"]
    how += [f"{jobs.ARR}.actor.ppo_mini_batch_size=2", "async_training.trigger_parameter_sync_step=2"]
    how += ["async_training.staleness_threshold=1.5", "trainer.save_freq=3", "trainer.test_freq=2"]
    words = jobs.overrides(folder, "run", *how)
    run = build_run(load_config(["--config-name=fully_async_ppo_trainer", *words, *stopping(folder, 3)]))
    router: Any = run.trainer.source.collector.engine.inner

    def kill_one() -> None:
        if run.trainer.global_step == 1:
            router.engines[1].server.kill()

    run.observers.after_step.append(kill_one)
    try:
        run.fit()
    finally:
        run.trainer.close()
    assert router.restarts == [0, 1]
    assert fully_async_main.main(words) == 0
    assert_trained_once_or_dropped(folder / "run")
    rows, older = jobs.metrics(folder, "run"), 0
    for step in range(1, 7):
        versions = read_ledger(folder / "run" / "ledger", step).batch["policy_versions"]
        assert len(versions) == 4 * 4 and int((step - 1 - versions[:, 0]).max()) <= 8
        older += int((versions[:, 1] < step - 1).sum())
        assert rows[step]["weight_sync/tensors_read_back"] == rows[step]["weight_sync/tensors_sent"] > 0
    assert older > 0  # it sampled while the policy was trained
    events = [event["event"] for event in read_events(folder / "run" / "events.jsonl")]
    assert events.count("take") == 12 and events.count("resumed") == 1  # each mini-batch by itself
