"""`verl serve` and `verl generate` over the real vLLM, and adapters that are trained while it samples."""

import importlib.util
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import import_or_skip, skip_or_fail, skip_without_vllm
from tests.e2e import jobs
from verl.commands import generate_answers
from verl.commands.quickstart.addition_task import CHARACTERS
from verl.commands.quickstart.small_model import make_model
from verl.config import load_config
from verl.models.load import load_causal_lm

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.enforce_eager=True", f"{ROLLOUT}.kv_cache_bytes=16777216"]
LONG = 48

pytestmark = pytest.mark.vllm


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    skip_without_vllm()
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    make_model(tmp_path / "model", CHARACTERS, 0, hidden=128, layers=1)  # vLLM wants heads of at least 32 on a CPU
    return tmp_path


def overrides(folder: Path, *extra: str) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={folder / 'model'}", f"data.train_files={folder / 'data' / 'train.jsonl'}",
        f"data.output_path={folder / 'answers.jsonl'}", "data.max_prompt_length=16", "data.max_response_length=64",
        f"{ROLLOUT}.dtype=float32", *VLLM, *extra,
    ]  # fmt: skip


@pytest.mark.parametrize("server", [None, sys.executable], ids=["in-process", "server"])
def test_a_file_is_answered_as_the_native_engine_answers_it(folder: Path, server: str | None):
    said = []
    for engine in ([f"{ROLLOUT}.server.python={server}"] if server else [], [f"{ROLLOUT}.name=native"]):
        greedy = [f"{ROLLOUT}.do_sample=False", "data.max_response_length=8", *engine]
        assert generate_answers.main(overrides(folder, *greedy)) == 0
        said.append([json.loads(line)["responses"] for line in (folder / "answers.jsonl").read_text().splitlines()])
        (folder / "answers.jsonl").unlink()
    assert said[0] == said[1] and len(said[0]) == 12 and any(text for [text] in said[0])


def test_adapters_are_merged_for_an_engine_that_reads_a_folder(folder: Path):
    """The answers are those of the native engine, which has the adapters beside the weights; the base has others."""
    peft = import_or_skip("peft")
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=4, lora_alpha=64, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(load_causal_lm(folder / "model"), settings).save_pretrained(folder / "adapters")
    adapters = f"actor_rollout_ref.model.lora_adapter_path={folder / 'adapters'}"
    said = []
    for more in ([adapters], [adapters, f"{ROLLOUT}.name=native"], []):
        assert generate_answers.main(overrides(folder, f"{ROLLOUT}.do_sample=False", *more)) == 0
        said.append([json.loads(line)["responses"] for line in (folder / "answers.jsonl").read_text().splitlines()])
        (folder / "answers.jsonl").unlink()
    assert said[0] == said[1] != said[2]


def open_server(folder: Path, *extra: str) -> Any:
    from verl.commands.serve.server import OpenAIServer
    from verl.models.load import load_tokenizer
    from verl.trainer.ppo.rollout_setup import build_standalone_engine

    config = load_config(overrides(folder, *extra))
    tokenizer = load_tokenizer(config.actor_rollout_ref.model)
    return OpenAIServer(build_standalone_engine(config, tokenizer), tokenizer, "small", 80)


def test_the_official_client_reads_an_answer_while_vllm_decodes_it(folder: Path):
    server = open_server(folder)
    server.engine.eos_token_ids = ()  # a random model would end anywhere
    openai = import_or_skip("openai")
    from tests.e2e.serving import serving

    engine, seen, steps = server.engine, threading.Event(), []
    step = engine.llm.step

    def halting() -> list[Any]:
        if len(steps) >= LONG // 2 and not seen.wait(30):
            pytest.fail("no delta came before the last token was decoded")
        steps.append(1)
        return step()

    with serving(server) as address:
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)
        chat: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "12+13="}], "temperature": 0}
        engine.llm.step = halting
        chunks = client.chat.completions.create(**chat, max_tokens=LONG, stream=True)
        first = next(iter(chunks))
        assert len(steps) <= LONG // 2
        seen.set()
        text = first.choices[0].delta.content + "".join(c.choices[0].delta.content for c in chunks)
        whole = client.chat.completions.create(**chat, max_tokens=LONG, n=2, logprobs=True)
        assert [choice.message.content for choice in whole.choices] == [text, text] and len(text) == LONG
        assert len(whole.choices[0].logprobs.content) == LONG

        seen.clear(), steps.clear()
        chunks = client.chat.completions.create(**chat, max_tokens=LONG, stream=True)
        next(iter(chunks))
        chunks.close()
        time.sleep(1.0)
        seen.set()
        until = time.monotonic() + 20
        while (engine._pending or engine.llm.has_unfinished_requests()) and time.monotonic() < until:
            time.sleep(0.01)
        assert not engine._pending and len(steps) < LONG


def test_a_server_process_tells_tokens_as_they_come_and_drops_what_nobody_reads(folder: Path):
    openai = import_or_skip("openai")
    from tests.e2e.serving import serving

    server = open_server(folder, f"{ROLLOUT}.server.python={sys.executable}")
    with serving(server) as address:
        client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=60)
        chat: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "12+13="}], "temperature": 0}
        chunks = list(client.chat.completions.create(**chat, max_tokens=LONG, stream=True))
        whole = client.chat.completions.create(**chat, max_tokens=LONG)
        assert "".join(c.choices[0].delta.content for c in chunks) == whole.choices[0].message.content
        if whole.choices[0].finish_reason == "length":
            assert len(chunks) > LONG / 2
        for _ in range(3):  # an answer nobody reads must not end the reader of all others
            chunks = client.chat.completions.create(**chat, max_tokens=LONG, stream=True)
            next(iter(chunks))
            chunks.close()
        again = client.chat.completions.create(**chat, max_tokens=LONG)
        assert again.choices[0].message.content == whole.choices[0].message.content


TWO = ["trainer.device=cpu", "trainer.n_gpus_per_node=2", f"{ROLLOUT}.num_replicas=2"]


@pytest.mark.parametrize(("merge", "words"), [(True, []), (False, []), (False, TWO)], ids=["merged", "alone", "ranks"])
def test_vllm_samples_from_adapters_merged_or_alone(folder: Path, merge: bool, words: list[str]):
    if importlib.util.find_spec("peft") is None:
        skip_or_fail("peft is not installed beside vLLM; pip install -e '.[lora]'")
    lora = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_alpha=16"]
    lora.append(f"actor_rollout_ref.model.lora.merge={merge}")
    jobs.train(folder, "run", *VLLM, *lora, *words, f"{ROLLOUT}.checkpoint_engine.probe_every=1")
    rows = jobs.metrics(folder, "run")
    assert (rows[2]["weight_sync/tensors_sent"] == 2 * 7) != merge
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for step, row in rows.items() if step)
    assert rows[1]["actor/grad_norm"] > 0 and len(rows) == 7
