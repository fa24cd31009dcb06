"""Traces of conversations: a receiver and MLflow's own store get what the policy, the tools and the reward did."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.agent_cases import ScriptedEngine, make_agent_runner, row, tool_call_text
from tests.otlp_receiver import Receiver, attributes, receiving
from verl.agent.agent_runner import AgentRunner
from verl.data.trajectory import FIRST_VALIDATION_GROUP
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.observe.tracing import writer as writer_module
from verl.observe.tracing.backends import TRACE_BACKENDS
from verl.observe.tracing.recorder import TraceRecorder
from verl.observe.tracing.writer import TraceWriter
from verl.observe.trackers import RunInfo
from verl.utils.errors import DataError
from verl.utils.rollout_trace import rollout_trace_attr, rollout_trace_op
from verl.workers.rollout.base import SamplingParams

TURNS = [tool_call_text("add", a=2, b=3), "The sum is 5.<|im_end|>"]
Converse = Callable[..., list[str]]


@register("failing_loop")
class FailingLoop(AgentLoopBase):
    """Fails in a decorated step."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        await self.think(hard=True)
        raise AssertionError

    @rollout_trace_op
    async def think(self, hard: bool) -> None:
        raise DataError("failing")


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving(monkeypatch) as found:
        yield found


@pytest.fixture
def converse(tokenizer: Any, tool_file: Path) -> Converse:
    """Answers prompts, scores them with 1, 2, … and writes their traces to a backend; returns what was said."""

    def run(
        backend: str, groups: range = range(7, 8), n: int = 1, loop: str | None = None, **settings: Any
    ) -> list[str]:
        said: list[str] = []
        runner: AgentRunner = make_agent_runner(tokenizer, tool_file)
        writer = TraceWriter(backend, TRACE_BACKENDS[backend], RunInfo("a project", "a run"), said.append)
        traces = TraceRecorder(writer, lambda ids: tokenizer.decode(ids), **settings)

        async def answer(group: int) -> None:
            engine = ScriptedEngine(tokenizer, TURNS)
            sampling = SamplingParams(n=n, max_tokens=300)
            found = await runner.answer(row(agent_name=loop), group, sampling, engine, traces)
            scored = [replace(t, reward=float(i), score_parts={"part": i}) for i, t in enumerate(found, start=1)]
            traces.scored(scored, [None] * len(scored), time.time_ns())

        for group in groups:
            asyncio.run(answer(group))
        traces.close()
        return said

    return run


def test_a_conversation_is_a_trace_with_turns_tools_and_reward(converse, receiver):
    assert converse("opentelemetry", n=2) == []
    assert receiver.resources[0]["verl.experiment"] == "a run"
    assert len(receiver.roots()) == 2
    for number, root in enumerate(receiver.roots(), start=1):
        of_root = attributes(root)
        assert of_root["input.value"] == {"prompt": [{"role": "user", "content": "What is 2+3?"}]}
        assert (of_root["verl.sample"], of_root["verl.step"], of_root["verl.row"]) == (number - 1, 1, 4)
        assert (of_root["verl.policy_version_min"], of_root["verl.policy_version_max"]) == (0, 1)
        first, tool, second, reward = receiver.below(root)
        assert [s.name for s in (first, tool, second, reward)] == ["generate", "add", "generate", "reward"]
        assert attributes(first)["output.value"] == {"text": TURNS[0]}
        assert attributes(second)["output.value"] == {"text": TURNS[1]}
        assert attributes(second)["gen_ai.usage.input_tokens"] > attributes(first)["gen_ai.usage.input_tokens"]
        assert attributes(second)["verl.policy_version_max"] == 1
        assert attributes(tool)["input.value"] == {"arguments": '{"a": 2, "b": 3}'}
        assert attributes(tool)["output.value"] == {"response": "5", "reward": 0.5, "calls": 1}
        assert attributes(reward)["output.value"] == {"reward": float(number), "part": number}
        assert of_root["output.value"]["reward"] == number
        for child in (first, tool, second, reward):
            assert root.start_time_unix_nano <= child.start_time_unix_nano <= child.end_time_unix_nano
            assert child.end_time_unix_nano <= root.end_time_unix_nano
        assert first.end_time_unix_nano <= tool.start_time_unix_nano
        assert tool.end_time_unix_nano <= second.start_time_unix_nano


def test_tokens_are_recorded_on_request(converse, receiver, tokenizer):
    converse("opentelemetry", with_tokens=True)
    [root] = receiver.roots()
    found = attributes(receiver.below(root)[0])["output.value"]
    assert found["token_ids"] == tokenizer(TURNS[0])["input_ids"]
    assert "".join(found["tokens"]) == TURNS[0] and found["logprobs"] == [-0.5] * len(found["tokens"])


def test_a_single_turn_is_traced_too(converse, receiver):
    converse("opentelemetry", n=2, loop="single_turn_agent", with_tokens=True)
    # the scripted engine answers a request of several samples with one
    [root] = receiver.roots()
    turn, reward = receiver.below(root)
    assert attributes(turn)["output.value"]["text"] == TURNS[0]
    assert set(attributes(turn)["output.value"]["logprobs"]) == {-0.5}
    assert attributes(reward)["output.value"]["reward"] == 1.0


def test_at_most_so_many_prompts_of_a_step_are_traced(converse, receiver):
    converse("opentelemetry", range(-2, 9), n=2, max_prompts=3)  # those below 0 are greedy answers
    assert [attributes(root)["verl.group"] for root in receiver.roots()] == [0, 0, 1, 1, 2, 2]
    before = len(receiver.roots())
    converse("opentelemetry", range(FIRST_VALIDATION_GROUP, FIRST_VALIDATION_GROUP + 9), max_prompts=2)
    assert [attributes(root)["verl.validate"] for root in receiver.roots()[before:]] == [True, True]


def test_mlflow_keeps_the_same_in_its_own_store(converse, tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    assert converse("mlflow", n=2) == []
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("a project").experiment_id
    traces = sorted(client.search_traces(locations=[experiment]), key=lambda t: t.info.tags["sample"])
    assert [trace.info.tags["experiment"] for trace in traces] == ["a run"] * 2
    for number, trace in enumerate(traces, start=1):
        [root] = [span for span in trace.data.spans if span.parent_id is None]
        below = sorted((s for s in trace.data.spans if s.parent_id == root.span_id), key=lambda s: s.start_time_ns)
        kinds = [(span.name, span.span_type) for span in below]
        assert kinds == [("generate", "LLM"), ("add", "TOOL"), ("generate", "LLM"), ("reward", "EVALUATOR")]
        assert below[1].inputs == {"arguments": '{"a": 2, "b": 3}'} and below[1].outputs["response"] == "5"
        assert root.outputs["reward"] == number and below[2].outputs == {"text": TURNS[1]}
        assert root.start_time_ns <= below[0].start_time_ns and below[-1].end_time_ns <= root.end_time_ns


@pytest.mark.parametrize("backend", ["opentelemetry", "mlflow"])
def test_a_backend_that_fails_is_named_once_and_nothing_is_raised(converse, backend, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://x")
    said = converse(backend, range(3))
    assert len(said) == 2 and said[0].startswith(f"warning: rollout.trace.backend={backend} ")
    assert said[1] == f"warning: 3 traces did not reach {backend}; 0 did"


def test_traces_beyond_those_that_may_wait_are_left_out(converse, receiver, monkeypatch):
    monkeypatch.setattr(writer_module, "MAX_WAITING", 1)
    slow = TRACE_BACKENDS["opentelemetry"]

    class Slow(slow):
        def write(self, root: Any) -> None:
            time.sleep(0.3)
            super().write(root)

    monkeypatch.setitem(TRACE_BACKENDS, "opentelemetry", Slow)
    said = converse("opentelemetry", range(4), n=3)
    assert "is slower than the run" in said[0] and len(said) == 2
    lost = int(said[1].split()[1])
    assert lost > 0 and len(receiver.roots()) == 12 - lost


def test_a_conversation_that_fails_is_written_with_its_error(converse, receiver):
    with pytest.raises(DataError, match="failing"):
        converse("opentelemetry", loop="failing_loop")
    for _ in range(100):
        if receiver.roots():
            break
        time.sleep(0.05)
    [root] = receiver.roots()
    assert "failing" in root.status.message and root.status.code == 2
    [step] = receiver.below(root)
    assert step.name.endswith("FailingLoop.think") and attributes(step)["input.value"] == {"hard": True}


def test_published_decorators_trace_a_block_and_nothing_outside(receiver):
    from verl.utils.rollout_trace import RolloutTraceConfig

    @rollout_trace_op
    def add(a: int, b: int) -> int:
        return a + b

    assert add(1, b=2) == 3
    RolloutTraceConfig.init("a project", "a run", "opentelemetry", token2text=True)
    assert RolloutTraceConfig.get_backend() == "opentelemetry" and RolloutTraceConfig.enable_token2text()
    with rollout_trace_attr(sample_index=3, step=2, name="mine"):
        assert add(2, b=3) == 5
        with rollout_trace_attr(trace=False):
            add(7, b=7)
    RolloutTraceConfig.reset()
    [root] = receiver.roots()
    assert (root.name, attributes(root)["verl.sample_index"], attributes(root)["verl.step"]) == ("mine", 3, 2)
    [call] = receiver.below(root)
    assert attributes(call)["input.value"] == {"a": 2, "b": 3} and attributes(call)["output.value"] == {"result": 5}
    assert RolloutTraceConfig.get_backend() is None


def test_the_console_prints_the_spans_that_a_variable_asks_for(converse, monkeypatch, capsys):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    assert converse("opentelemetry") == []
    printed = capsys.readouterr().out
    names = [
        json.loads(line.strip().rstrip(",").partition(": ")[2]) for line in printed.splitlines() if '"name"' in line
    ]
    assert names[:5] == ["generate", "add", "generate", "reward", "tool_agent"]  # each after what is inside
