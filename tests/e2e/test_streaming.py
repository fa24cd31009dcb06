"""The official client reads an answer while it is decoded, and goes away when it likes."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from aiohttp import ClientConnectionResetError, web

from tests.e2e import jobs
from tests.e2e.serving import serving
from verl.commands.serve.server import OpenAIServer
from verl.config import load_config
from verl.models.load import load_tokenizer
from verl.trainer.ppo.rollout_setup import build_standalone_engine
from verl.workers.rollout.native.core import NativeCore

ARR = "actor_rollout_ref"
LONG = 48  # tokens of an answer
CHAT = [{"role": "user", "content": "12+13="}]


@pytest.fixture
def server(tmp_path: Path) -> OpenAIServer:
    jobs.prepare(tmp_path)
    config = load_config([
        f"{ARR}.model.path={tmp_path / 'model'}", f"{ARR}.rollout.dtype=float32", f"{ARR}.rollout.max_num_seqs=2",
        "data.max_prompt_length=16", "data.max_response_length=64", f"{ARR}.rollout.calculate_log_probs=True",
    ])  # fmt: skip
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    engine = build_standalone_engine(config, tokenizer)
    engine.eos_token_ids = ()  # a random model would end anywhere
    return OpenAIServer(engine, tokenizer, "small", 80)


@pytest.fixture
def client(server: OpenAIServer) -> Iterator[openai.OpenAI]:
    with serving(server) as address:
        yield openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)


def stand_still(core: NativeCore, at: int, until: Callable[[], bool]) -> None:
    """From decode step `at` on, `core` makes no token before `until()`."""
    step, patience = core.step, time.monotonic() + 60

    def halting() -> list:
        if core.counters.decode_steps >= at and not until() and time.monotonic() < patience:
            time.sleep(0.001)
            return []
        return step()

    core.step = halting  # type: ignore[method-assign]


@pytest.mark.parametrize("chat", [True, False])
def test_the_first_delta_arrives_before_the_last_token_is_decoded(
    server: OpenAIServer, client: openai.OpenAI, chat: bool
):
    seen = threading.Event()
    stand_still(server.engine.core, LONG // 2, seen.is_set)
    if chat:
        chunks = client.chat.completions.create(
            model="small", messages=CHAT, max_tokens=LONG, seed=3, stream=True, logprobs=True
        )
    else:
        chunks = client.completions.create(
            model="small", prompt=CHAT[0]["content"], max_tokens=LONG, seed=3, stream=True, logprobs=1
        )
    first = next(iter(chunks))
    assert server.engine.core.counters.generated_tokens <= LONG // 2 + 1  # the engine stands still for this client
    seen.set()
    rest = list(chunks)
    assert len(rest) > LONG / 2 and rest[-1].choices[0].finish_reason == "length"
    if chat:
        whole = client.chat.completions.create(
            model="small", messages=CHAT, max_tokens=LONG, seed=3, logprobs=True
        ).choices[0]
        assert first.choices[0].delta.role == "assistant" and rest[0].choices[0].delta.role is None
        assert "".join(c.choices[0].delta.content for c in [first, *rest]) == whole.message.content
        logprobs = [v.logprob for c in [first, *rest] for v in c.choices[0].logprobs.content]
        assert (
            logprobs == pytest.approx([v.logprob for v in whole.logprobs.content], abs=1e-5) and len(logprobs) == LONG
        )
    else:
        whole = client.completions.create(model="small", prompt=CHAT[0]["content"], max_tokens=LONG, seed=3).choices[0]
        assert "".join(c.choices[0].text for c in [first, *rest]) == whole.text


def test_every_choice_of_every_prompt_is_streamed_with_its_index_and_the_usage(client: openai.OpenAI):
    chunks = list(
        client.completions.create(
            model="small",
            prompt=["12+13=", "1"],
            n=2,
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 36 and chunks[-1].usage.prompt_tokens == 7
    ends = {c.choices[0].index: c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason}
    assert ends == dict.fromkeys(range(4), "length")
    mixed = [c.choices[0].index for c in chunks[:-1]]
    assert mixed != sorted(mixed)  # side by side, not one after the other


def test_a_stop_string_is_never_seen(server: OpenAIServer, client: openai.OpenAI):
    whole = client.completions.create(model="small", prompt="1", max_tokens=LONG, temperature=0).choices[0].text
    stop = whole[3:6]
    chunks = list(
        client.completions.create(model="small", prompt="1", max_tokens=LONG, temperature=0, stop=[stop], stream=True)
    )
    assert "".join(c.choices[0].text for c in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_rows(server: OpenAIServer, client: openai.OpenAI, stream: bool):
    core, gone = server.engine.core, threading.Event()
    stand_still(core, 8, gone.is_set)
    if stream:
        chunks = client.chat.completions.create(model="small", messages=CHAT, n=2, max_tokens=LONG, stream=True)
        assert next(iter(chunks)).choices and core.table.count == 2
        chunks.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=2.0).chat.completions.create(model="small", messages=CHAT, n=2, max_tokens=LONG)
    until = time.monotonic() + 50
    while core.busy and time.monotonic() < until:
        time.sleep(0.01)
    assert not core.busy and core.table.count == 0 and core.counters.generated_tokens < 2 * LONG
    gone.set()
    again = client.chat.completions.create(model="small", messages=CHAT, n=2, max_tokens=4)
    assert len(again.choices) == 2 and not server.engine.token_streams


def test_a_write_to_a_client_that_has_gone_ends_the_answer_quietly(
    server: OpenAIServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def fails(self: web.StreamResponse, data: bytes) -> None:
        raise ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.StreamResponse, "write", fails)
    assert list(client.completions.create(model="small", prompt="1", max_tokens=LONG, stream=True)) == []
    monkeypatch.undo()
    assert len(client.completions.create(model="small", prompt="1", max_tokens=4).choices) == 1
    assert not server.engine.token_streams and "Error handling request" not in caplog.text


def test_what_is_wrong_is_told_before_the_stream_begins(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="90 prompt tokens leave no room for an answer in the 80"):
        client.completions.create(model="small", prompt=["1", "1" * 90], max_tokens=6, stream=True)
    with pytest.raises(openai.BadRequestError, match="stop must be a text"):
        client.completions.create(model="small", prompt="1", extra_body={"stop": [3]}, stream=True)
