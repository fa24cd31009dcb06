"""Every rollout engine around a tiny random model: one token per letter."""

import asyncio
import copy
import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.standins import FakeOpenAIServer, FakeServer, FakeSGLangServer, FakeTGIServer
from verl.config.rollout import RolloutConfig, ServerConfig
from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.native.engine import NativeEngine
from verl.workers.rollout.sglang import SGLangEngine
from verl.workers.rollout.tgi import TGIEngine

CHARACTERS = [chr(c) for c in range(97, 123)]  # one token per letter
EOS = len(CHARACTERS)
PROMPT = [3, 1, 4, 1, 5]
CONFIG = RolloutConfig(dtype="float32", prompt_length=16, response_length=24, max_num_seqs=8)


def letters_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {token: i for i, token in enumerate([*CHARACTERS, "<eos>", "<pad>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<pad>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def small_model(tied: bool = True) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=EOS + 2, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, tie_word_embeddings=tied, eos_token_id=EOS, bos_token_id=None,
        pad_token_id=EOS + 1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def native(config: RolloutConfig, model: PreTrainedModel) -> RolloutEngine:
    return NativeEngine(config, model, letters_tokenizer())


@dataclass(frozen=True)
class Adapter:
    name: str
    build: Callable[[RolloutConfig, PreTrainedModel], RolloutEngine]


VLLM_ENGINES: dict[str, RolloutEngine] = {}  # starting one takes seconds: one per configuration, loaded anew


def vllm(config: RolloutConfig, model: PreTrainedModel) -> RolloutEngine:
    from verl.workers.rollout.vllm.engine import VLLMEngine

    config = replace(config, enforce_eager=True, kv_cache_bytes=1 << 24, disable_log_stats=False)
    key = f"{config} {model.config}"
    if key not in VLLM_ENGINES:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            VLLM_ENGINES[key] = VLLMEngine(config, folder, letters_tokenizer(), eos_token_ids=(EOS,))
    engine = VLLM_ENGINES[key]
    asyncio.run(engine.update_weights(model, 0))
    return engine


def native_behind(model: PreTrainedModel, config: RolloutConfig) -> NativeEngine:
    return NativeEngine(replace(config, free_cache_engine=True), copy.deepcopy(model), letters_tokenizer())


FAKE_SERVERS: list[FakeServer] = []  # closed after each test


def sglang(config: RolloutConfig, model: PreTrainedModel) -> RolloutEngine:
    FAKE_SERVERS.append(FakeSGLangServer(native_behind(model, config), letters_tokenizer()))
    server = ServerConfig(url=FAKE_SERVERS[-1].url, max_attempts=1)
    with tempfile.TemporaryDirectory() as folder:
        return SGLangEngine(replace(config, server=server, skip_tokenizer_init=False), folder, (EOS,))


def tgi(kind: type[FakeServer], config: RolloutConfig, model: PreTrainedModel) -> RolloutEngine:
    FAKE_SERVERS.append(kind(native_behind(model, config), letters_tokenizer()))
    return TGIEngine(
        replace(config, server=ServerConfig(url=FAKE_SERVERS[-1].url, max_attempts=1)), letters_tokenizer()
    )


ADAPTERS = [
    pytest.param(Adapter("native", native), id="native"),
    pytest.param(Adapter("vllm", vllm), id="vllm", marks=pytest.mark.vllm),
    pytest.param(Adapter("sglang", sglang), id="sglang"),
    pytest.param(Adapter("tgi", functools.partial(tgi, FakeTGIServer)), id="tgi"),
    pytest.param(Adapter("openai", functools.partial(tgi, FakeOpenAIServer)), id="openai"),
]


def own_logprobs(
    model: PreTrainedModel, ids: list[int], prompt: list[int] = PROMPT, temperature: float = 1.0
) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
