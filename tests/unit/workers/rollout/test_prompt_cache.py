"""Long prompts of a group are held once by the native engine, and nothing that is sampled changes."""

import asyncio
import copy

import pytest
import torch

from tests.engine_work import work_of
from tests.unit.models.test_decoder import LEAN, largest_error, tiny_model
from tests.weight_layouts import use_layout
from verl.config.rollout import RolloutConfig
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native import core as native_core
from verl.workers.rollout.native.engine import NativeEngine

NAMES = ["qwen3, tied", "qwen2, biases", "llama, yarn, gelu, biases, no groups"]
SHAPES = [(20, 4), (5, 1), (31, 3), (20, 1), (12, 6), (31, 5), (40, 4), (9, 2)]  # prompt tokens, samples


def groups(shapes: list[tuple[int, int]] = SHAPES, new: int = 20) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(5)
    return [
        GenerationRequest(
            number,
            torch.randint(3, 61, (length,), generator=generator).tolist(),
            SamplingParams(temperature=0.8, n=n, max_tokens=new),
        )
        for number, (length, n) in enumerate(shapes)
    ]


def make(name: str = "qwen3, tied", rows: int = 64) -> NativeEngine:
    return NativeEngine(RolloutConfig(dtype="float32", max_model_len=64, max_num_seqs=rows), tiny_model(*LEAN[name]))


@pytest.mark.parametrize("rows", [64, 5])
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_shared_prompts_change_no_token_and_the_logprobs_stay_the_models_own(
    name: str, packs: bool, rows: int, monkeypatch: pytest.MonkeyPatch
):
    use_layout(monkeypatch, merged=packs)
    engine = make(name, rows)
    apart = engine.core.run(groups(), tuple(range(2, 9)))
    assert engine.decoder.prompt_cache.lengths == []
    monkeypatch.setattr(native_core, "_MIN_SHARED_PROMPT_TOKENS", 10)
    seen = []
    allocate_slots = engine.decoder.prompt_cache.allocate_slots
    monkeypatch.setattr(
        engine.decoder.prompt_cache, "allocate_slots", lambda lengths: seen.extend(lengths) or allocate_slots(lengths)
    )
    together = engine.core.run(groups(), tuple(range(2, 9)))
    assert sorted(seen) == [12, 20, 31, 31, 40]  # every long prompt of a group, once
    assert [c.token_ids for g in together for c in g] == [c.token_ids for g in apart for c in g]
    assert largest_error(engine.model, groups(), together) < 1e-5
    assert engine.decoder.prompt_cache.lengths == [] and engine.core.cached_prompts == []


@pytest.mark.parametrize("packed", [False, True])
def test_sharing_rounds_no_more_in_bfloat16(packed: bool, monkeypatch: pytest.MonkeyPatch):
    use_layout(monkeypatch, merged=packed)
    model = tiny_model(*LEAN["qwen3, tied"]).bfloat16()
    engine = NativeEngine(RolloutConfig(dtype="bfloat16", max_model_len=64, max_num_seqs=64), model)
    exact = copy.deepcopy(model).double()
    apart = largest_error(exact, groups(), engine.core.run(groups()))
    monkeypatch.setattr(native_core, "_MIN_SHARED_PROMPT_TOKENS", 10)
    assert largest_error(exact, groups(), engine.core.run(groups())) < 1.5 * apart + 0.01


def test_a_member_that_enters_later_needs_no_prefill(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native_core, "_MIN_SHARED_PROMPT_TOKENS", 10)
    engine = make(rows=3)
    request = groups([(20, 16)])
    got = engine.core.run(request)
    assert work_of(engine)["prefill_tokens"] == 20
    assert largest_error(engine.model, request, got) < 1e-5


def test_a_member_that_enters_after_new_weights_does_not_continue_the_old_ones_prompt(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native_core, "_MIN_SHARED_PROMPT_TOKENS", 10)
    engine = make(rows=2)
    [request] = groups([(20, 4)], new=12)
    state = engine.core.submit(request, ())
    engine.core.step()
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(1.1)
    asyncio.run(engine.update_weights(engine.model, 1))
    while not state.done:
        engine.core.step()
    late = [c for c in state.result() if c.policy_version == (1, 1)]
    assert len(late) == 2 and work_of(engine)["prompts_computed"] == 2
    assert largest_error(engine.model, [request], [late]) < 1e-5


def test_an_aborted_group_leaves_its_slot(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native_core, "_MIN_SHARED_PROMPT_TOKENS", 10)
    engine = make(rows=8)
    first, second = groups([(20, 3), (25, 3)])
    states = [engine.core.submit(request, ()) for request in (first, second)]
    engine.core.step()
    assert engine.decoder.prompt_cache.lengths == [20, 25]
    engine.core.abort(first.request_id)
    assert engine.decoder.prompt_cache.lengths == [25]
    while not states[1].done:
        engine.core.step()
    assert largest_error(engine.model, [second], [states[1].result()]) < 1e-5
