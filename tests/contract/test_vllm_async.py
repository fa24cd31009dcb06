"""Asynchronous training with the real vLLM: parked answers are asked for again with their tokens."""

from pathlib import Path

import pytest

from tests.conftest import skip_without_vllm
from tests.contract.test_vllm import SMALL_RUN
from tests.e2e import jobs
from tests.e2e.test_async_runs import (
    ASYNC,
    EVERY_STEP,
    KEEPS,
    assert_old_logprobs_of_each_version,
    assert_sampled_with_kept_cache,
    assert_trained_once_or_dropped,
)
from tests.e2e.test_resume import stopping
from verl.commands.quickstart.addition_task import CHARACTERS
from verl.commands.quickstart.small_model import make_model
from verl.observe.events import read_events

pytestmark = pytest.mark.vllm
BYPASS = "algorithm.rollout_correction.bypass_mode=True"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    skip_without_vllm()
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    make_model(tmp_path / "model", CHARACTERS, 0, hidden=128, layers=2)
    return tmp_path


@pytest.mark.parametrize(
    ("replicas", "resumes", "keeps"),
    [(1, True, []), (2, False, []), (2, True, [KEEPS])],
    ids=["one", "two", "two-keep_kv"],
)
def test_answers_go_on_under_the_next_weights_and_over_a_resume(
    folder: Path, replicas: int, resumes: bool, keeps: list[str]
):
    how = [*SMALL_RUN, *EVERY_STEP, ASYNC, f"actor_rollout_ref.rollout.num_replicas={replicas}", *keeps]
    how += [] if resumes else [BYPASS]
    # three at a time, of four answers a prompt: some are half done whenever a step ends
    how += ["data.max_response_length=24", "actor_rollout_ref.rollout.max_num_seqs=3", "trainer.device=cpu"]
    if resumes:
        jobs.train(folder, "run", *how, *stopping(folder, 3))
    jobs.train(folder, "run", *how)
    assert_trained_once_or_dropped(folder / "run")
    rows = jobs.metrics(folder, "run")
    assert all(rows[step]["training/off_policy/lag/max"] <= 8 for step in range(1, 7))
    assert any(rows[step]["training/off_policy/lag/max"] > 0 for step in range(1, 7))
    events = read_events(folder / "run" / "events.jsonl")
    answers = [segments for event in events if event["event"] == "answered" for segments in event["segments"]]
    assert any(len(segments) > 1 for segments in answers)
    assert all(sum(count for _, count in segments) <= 24 for segments in answers)
    if resumes:  # the trainer scores what vLLM has sampled, before it leaves a version
        assert_old_logprobs_of_each_version(folder, "run", steps=range(2, 7))
    if keeps:
        assert_sampled_with_kept_cache(folder, "run", steps=range(2, 7))


def test_without_staleness_prompts_versions_and_weights_are_those_of_the_synchronous_run(folder: Path):
    how = [*SMALL_RUN, "trainer.device=cpu", "trainer.total_training_steps=3"]
    jobs.train(folder, "sync", *how)
    jobs.train(folder, "async", *how, ASYNC, "async_training.staleness_threshold=0")
    sync, ahead = (jobs.metrics(folder, run) for run in ("sync", "async"))
    for step in range(1, 4):
        for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"):
            assert ahead[step][name] == sync[step][name], (step, name)


@pytest.mark.parametrize("keeps", [[], [KEEPS]], ids=["recompute", "keep_kv"])
def test_with_devices_of_its_own_the_rollout_stops_for_a_publish_only(folder: Path, keeps: list[str]):
    apart = ["actor_rollout_ref.hybrid_engine=False", "actor_rollout_ref.rollout.n_gpus_per_node=1"]
    how = [*SMALL_RUN, *apart, "trainer.v1.trainer_mode=separate_async", "data.max_response_length=24"]
    how += ["actor_rollout_ref.rollout.max_num_seqs=3", "trainer.device=cpu", "trainer.test_freq=2", *keeps]
    jobs.train(folder, "run", *how, "trainer.save_freq=1")
    assert_old_logprobs_of_each_version(folder, "run", steps=range(1, 7), mixed=False)  # by weights that are kept
    assert_trained_once_or_dropped(folder / "run")
    events = read_events(folder / "run" / "events.jsonl")
    rows = jobs.metrics(folder, "run")
    assert any(rows[step]["training/off_policy/lag/max"] > 0 for step in range(1, 7))
    assert all(rows[step]["weight_sync/pause_s"] <= rows[step]["timing_s/update_weights"] for step in range(1, 7))
    times = {name: [e["time"] for e in events if e["event"] == name] for name in ("take", "publish", "answered")}
    trained = list(zip(times["take"], times["publish"][1:], strict=False))
    assert any(begin < answered < end for answered in times["answered"] for begin, end in trained)
