"""What is particular to the native engine: its cache, its copies, its scheduling."""

import asyncio

import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.engine_work import work_of
from tests.weight_layouts import use_layout
from verl.config.rollout import RolloutConfig
from verl.utils.errors import ConfigError, WorkerError
from verl.workers.rollout.base import Completion, GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import NativeEngine

CONFIG = RolloutConfig(dtype="float32", prompt_length=8, response_length=8, max_num_seqs=8)


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=True, eos_token_id=3, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def ask(number: int = 0, prompt: tuple[int, ...] = (5, 6, 7), **sampling: object) -> GenerationRequest:
    return GenerationRequest(number, list(prompt), SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **sampling}))


def complete(engine: NativeEngine, *requests: GenerationRequest) -> list[list[Completion]]:
    async def together() -> list[list[Completion]]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return asyncio.run(together())


def test_requests_awaited_together_share_one_prefill_and_every_step(model: PreTrainedModel):
    engine = NativeEngine(CONFIG, model)
    complete(engine, *(ask(i, prompt=(5, 6, i)) for i in range(8)))
    stats = work_of(engine)
    assert stats["decode_steps"] == 7 and stats["occupancy"] == 1.0 and stats["prompts_computed"] == 8


def test_the_prompt_of_a_group_is_computed_once(model: PreTrainedModel):
    engine = NativeEngine(CONFIG, model)
    complete(engine, ask(0, n=4), ask(1, n=4))
    assert work_of(engine)["prompts_computed"] == 1  # both groups have the same prompt
    complete(engine, ask(0, n=4), ask(1, n=4, prompt=(9, 9)))
    assert work_of(engine)["prefill_tokens"] == 3 + 5


def test_a_short_prompt_is_not_padded_to_a_long_one(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    config = RolloutConfig(dtype="float32", max_model_len=220, max_num_seqs=4)
    engine = NativeEngine(config, model)
    prefill, passes = engine.decoder.prefill, []
    monkeypatch.setattr(
        engine.decoder, "prefill", lambda prompts, target: passes.append(prompts) or prefill(prompts, target)
    )
    requests = [ask(i, prompt=(5, 6, 7 + i) + (9,) * (length - 3)) for i, length in enumerate((3, 200, 60, 110))]
    answers = complete(engine, *requests)
    assert [[len(prompt) for prompt in prompts] for prompts in passes] == [[3, 60], [110, 200]]
    alone = [complete(NativeEngine(config, model), request)[0] for request in requests]
    assert [group[0].token_ids for group in answers] == [group[0].token_ids for group in alone]


def test_rows_are_refilled_as_sequences_end(model: PreTrainedModel):
    engine = NativeEngine(RolloutConfig(dtype="float32", max_model_len=40, max_num_seqs=4), model)
    complete(engine, *(ask(i, max_tokens=30 if i == 0 else 3) for i in range(30)))
    # 29 steps for the long one; the 29 short ones pass through the other three rows meanwhile, not in 7 waves after it.
    assert work_of(engine)["decode_steps"] <= 30


def test_an_ended_sequence_is_replaced_in_the_next_step_and_the_batch_shrinks_when_nothing_waits(
    model: PreTrainedModel,
):
    core = NativeEngine(RolloutConfig(dtype="float32", max_model_len=40, max_num_seqs=8), model).core
    for number, tokens in enumerate([2, 12, 12, 12, 12, 12, 12, 12, 3, 5, 9]):
        core.submit(ask(number, prompt=(5, 6, 7, number)[: 2 + number % 3], max_tokens=tokens), ())
    in_flight = []
    while core.busy:
        core.step()
        in_flight.append(core.table.count)
    # Row 0 ends in step 1 and its successors in steps 4 and 9: each is replaced in the step after. When nothing waits
    # any more the seven others end together in step 11, and the last one is decoded alone.
    assert in_flight == [7, 8, 8, 7, 8, 8, 8, 8, 7, 8, 1, 1, 1, 1, 1, 1, 1, 0]
    assert core.counters.row_steps == 8 + 7 + 8 + 8 + 7 + 8 + 8 + 8 + 8 + 7 + 8 + 7 * 1


def test_a_cast_copy_is_counted_versioned_and_refreshed(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    use_layout(monkeypatch)
    engine = NativeEngine(RolloutConfig(dtype="bfloat16", prompt_length=8, response_length=8), model)
    parameters, head = sum(p.numel() for p in model.parameters()), model.lm_head.weight.numel()
    held = 2 * (parameters + head)  # the tied head has a layout of its own
    assert work_of(engine)["copied_weight_bytes"] == held
    with torch.no_grad():
        model.model.embed_tokens.weight.neg_()
    asyncio.run(engine.update_weights(model, 1))
    [[fresh]] = complete(engine, ask(temperature=0.0))
    assert fresh.policy_version == (1, 1) and engine.decoder.weights_version == 1
    assert work_of(engine)["copied_weight_bytes"] == held
    with torch.no_grad():
        logits = model.bfloat16()(torch.tensor([[5, 6, 7]])).logits[0, -1].float()
    assert fresh.token_ids[0] == int(logits.argmax())
    assert abs(fresh.logprobs[0] - float(logits.log_softmax(-1).max())) < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_changed_in_place_but_not_published_are_refused(model: PreTrainedModel, dtype: str):
    engine = NativeEngine(RolloutConfig(dtype=dtype, prompt_length=8, response_length=8), model)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    with pytest.raises(WorkerError, match=r"changed in place after version 0 .* update_weights\(model, 1\)"):
        complete(engine, ask())
    asyncio.run(engine.update_weights(model, 1))
    assert complete(engine, ask())[0][0].policy_version == (1, 1)


def test_sleep_frees_the_cache_and_the_copy(model: PreTrainedModel):
    engine = NativeEngine(RolloutConfig(dtype="bfloat16", prompt_length=8, response_length=8), model)
    before = complete(engine, ask())
    asyncio.run(engine.sleep())
    assert not engine.decoder.keys and work_of(engine)["copied_weight_bytes"] == 0
    asyncio.run(engine.wake())
    assert complete(engine, ask()) == before


def test_waking_after_an_unpublished_change_waits_for_the_weights(model: PreTrainedModel):
    engine = NativeEngine(RolloutConfig(dtype="bfloat16", prompt_length=8, response_length=8), model)
    asyncio.run(engine.sleep())
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    asyncio.run(engine.wake())
    with pytest.raises(WorkerError, match="update_weights"):
        complete(engine, ask())
    asyncio.run(engine.update_weights(model, 5))
    assert complete(engine, ask())[0][0].policy_version == (5, 5)


def test_the_cache_follows_its_budget(model: PreTrainedModel):
    engine = NativeEngine(RolloutConfig(dtype="float32", prompt_length=8, response_length=8), model)
    per_row = engine.limits.columns * (2 * 2 * 1 * 16 * 4 + 12)
    config = RolloutConfig(dtype="float32", prompt_length=8, response_length=8, kv_cache_bytes=5 * per_row + 3)
    engine = NativeEngine(config, model)
    assert engine.limits.rows == 5
    assert len(complete(engine, ask(n=13))[0]) == 13


def test_a_sequence_that_cannot_fit_is_refused_with_the_numbers(model: PreTrainedModel):
    config = RolloutConfig(dtype="float32", prompt_length=4096, response_length=4096, kv_cache_bytes=1 << 20)
    with pytest.raises(ConfigError, match=r"8192 tokens needs 2\.\d+ MiB .* 1\.00 MiB; raise .*kv_cache_bytes"):
        NativeEngine(config, model)


def test_an_unknown_dtype_is_refused(model: PreTrainedModel):
    with pytest.raises(ConfigError, match=r"rollout\.dtype='int7' is not one of float32"):
        NativeEngine(RolloutConfig(dtype="int7"), model)


def test_logits_that_are_not_finite_stop_the_request_and_leave_the_engine_usable(model: PreTrainedModel):
    engine = NativeEngine(CONFIG, model)
    good = model.model.norm.weight.detach().clone()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    asyncio.run(engine.update_weights(model, 1))
    with pytest.raises(WorkerError, match=r"request 0 are not finite at weights version 1"):
        complete(engine, ask())
    with torch.no_grad():
        model.model.norm.weight.copy_(good)
    asyncio.run(engine.update_weights(model, 2))
    assert len(complete(engine, ask())[0][0].token_ids) == 8


def test_a_cancelled_request_leaves_the_batch(model: PreTrainedModel):
    engine = NativeEngine(CONFIG, model)

    async def scenario() -> list[Completion]:
        doomed = asyncio.create_task(engine.generate(ask(0)))
        other = asyncio.create_task(engine.generate(ask(1)))
        for _ in range(4):
            await asyncio.sleep(0)
        doomed.cancel()
        return await other

    assert len(asyncio.run(scenario())[0].token_ids) == 8
    assert not engine.core.busy
