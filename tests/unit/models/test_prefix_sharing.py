"""Prompts computed once: the same attention, log-probs and gradients as without sharing, in float64."""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.engine_cases import (
    SHAPE,
    VOCABULARY,
    SquaredLogprob,
    SquaredValue,
    build_engine,
    save_tiny_model,
    tiny_qwen3,
)
from tests.unit.models.test_attention import HEADS, KV_HEADS, SIZE, written_out
from verl.data.balance import assign_shards
from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching, split_micro_batches
from verl.data.trajectory import Trajectory
from verl.models.attention import prefix_sharing, sequence_attention
from verl.models.attention.packed import packed_attention
from verl.models.attention.prefix_sharing import plan_prefix_sharing, prefix_sharing_order, shared_beginnings
from verl.utils.errors import ConfigError
from verl.workers.engine import micro_batch_forward

CPU = torch.device("cpu")
# (prompt, responses) of each group; a prompt of its own where there is one response
GROUPS = ((5, (4, 2, 4, 1)), (3, (6,)), (7, (3, 3)), (2, (1, 5, 1)), (6, (2,)))


def grouped_batch(groups=GROUPS, seed: int = 0) -> Batch:
    """Groups with a prompt in common; sequences of different groups take turns."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    rows = []
    for number, (prompt, responses) in enumerate(groups):
        prompt_ids = ids(prompt)
        rows += [
            (k, Trajectory.from_completion(prompt_ids, ids(r), [0.0] * r, group_id=number))
            for k, r in enumerate(responses)
        ]
    batch = Batch.pack([row for _, row in sorted(rows, key=lambda row: row[0])])
    weights = torch.rand(batch.num_tokens, generator=generator) * batch["loss_mask"] / 10
    return batch.with_columns(loss_weights=weights, targets=torch.randn(batch.num_tokens, generator=generator))


# --- groups of sequences alone ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_beginnings_are_shared_so_that_the_fewest_tokens_are_repeated(seed: int):
    draw = random.Random(seed)
    sequences = [[draw.randrange(2) for _ in range(draw.randrange(0, 7))] for _ in range(8)]
    ordered = sorted(sequences)

    def common(group: list[list[int]]) -> int:
        columns = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*group, strict=False))
        return sum(1 for _ in columns) if len(group) > 1 else 0

    best = 0
    for cuts in itertools.product((False, True), repeat=len(ordered) - 1):  # every way to cut the order into runs
        edges = [0, *(i for i, cut in enumerate(cuts, 1) if cut), len(ordered)]
        runs = [ordered[a:b] for a, b in itertools.pairwise(edges)]
        best = max(best, sum((len(run) - 1) * common(run) for run in runs))
    beginnings = shared_beginnings(sequences)
    heads = Counter(tuple(s[:n]) for s, n in zip(sequences, beginnings, strict=True) if n)
    assert sum((count - 1) * len(head) for head, count in heads.items()) >= best


# --- the layout -------------------------------------------------------------------------------------------------------


def test_each_prompt_is_laid_out_once_and_every_token_is_found():
    batch = grouped_batch()
    part = batch.select(prefix_sharing_order(batch))
    layout = plan_prefix_sharing(part, CPU)
    assert layout.packing.sizes == [5 + 7 + 2, 11 + 6 + 7, 9 + 8]
    assert len(layout.computed) == sum(p + sum(r) for p, r in GROUPS)
    assert torch.equal(part["tokens"][layout.computed][layout.computed_index], part["tokens"])
    assert torch.equal(part.position_ids()[layout.computed][layout.computed_index], part.position_ids())


def test_what_responses_begin_with_in_common_is_shared_too():
    rows = [
        Trajectory.from_completion([5, 6], tail, [0.0] * len(tail), group_id=0)
        for tail in ([7, 8, 9], [7, 8], [7, 8, 4, 4])
    ]
    batch = Batch.pack(rows)
    layout = plan_prefix_sharing(batch, CPU)
    assert layout.packing.prefixes.lengths == (4,) and layout.packing.suffixes.lengths == (1, 2)


def test_prompts_that_differ_are_not_shared():
    rows = [Trajectory.from_completion(p, [7], [0.0], group_id=0) for p in ([5, 6], [5, 4], [5, 6, 6])]
    assert plan_prefix_sharing(Batch.pack(rows), CPU) is None


# --- attention --------------------------------------------------------------------------------------------------------

SPECS = [{}, {"sliding_window": 4}, {"sliding_window": 1}, {"sliding_window": 64}, {"softcap": 2.0}]
SPECS += [{"sliding_window": 3, "softcap": 1.5}, {"sinks": True}, {"scaling": 0.3}]


def attend_both(how: dict, batch: Batch | None = None):
    """(shared, unshared) outputs about the tokens of a batch, and the gradients of what was given to attention."""
    batch = batch or grouped_batch()
    part = batch.select(prefix_sharing_order(batch))
    layout, generator = plan_prefix_sharing(part, CPU), torch.Generator().manual_seed(0)
    shapes = [(1, n, len(layout.computed), SIZE) for n in (HEADS, KV_HEADS, KV_HEADS)]
    given = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    direction = torch.randn(1, part.num_tokens, HEADS, SIZE, generator=generator, dtype=torch.float64)
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64) if how.get("sinks") else None
    results = []
    for shared in (True, False):
        leaves = [x.clone().requires_grad_() for x in given]
        if shared:
            known = {k: v for k, v in how.items() if k != "sinks"}
            out, _ = packed_attention(
                torch.nn.Identity(), *leaves, None, cu_seqlens=layout.packing, s_aux=sinks, **known
            )
            out = out[:, layout.computed_index]
        else:
            query, key, value = (x[:, :, layout.computed_index] for x in leaves)
            query = query * how.get("scaling", SIZE**-0.5) * SIZE**0.5
            window, softcap = how.get("sliding_window"), how.get("softcap")
            out = written_out(query, key, value, part.lengths.tolist(), window, softcap, sinks)
        (out * direction).sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    return results


@pytest.mark.parametrize("how", SPECS, ids=str)
@pytest.mark.parametrize("merging", [True, False])
def test_attention_and_its_gradient_equal_those_of_whole_sequences(how, merging, monkeypatch):
    if not merging:
        monkeypatch.setattr(prefix_sharing, "_can_merge", lambda *args: False)
    for found, expected in zip(*attend_both(how), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("answers", [([7, 8], [7, 8]), ([7, 8], [7, 8], [7, 8])], ids=str)
@pytest.mark.parametrize("merging", [True, False])
def test_a_group_of_equal_sequences_leaves_no_suffix(answers, merging, monkeypatch):
    if not merging:
        monkeypatch.setattr(prefix_sharing, "_can_merge", lambda *args: False)
    prompts = [([3, 4], answers), ([5, 6, 9], ([7], [8, 8])), ([4, 3], answers)]
    rows = [
        Trajectory.from_completion(prompt, answer, [0.0] * len(answer), group_id=number)
        for number, (prompt, group) in enumerate(prompts)
        for answer in group
    ]
    for found, expected in zip(*attend_both({}, Batch.pack(rows)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_plain_layers_merge_two_kernels_and_windows_take_rows(monkeypatch):
    calls = []
    for owner, name in ((prefix_sharing._MergedAttention, "apply"), (prefix_sharing, "_attend_suffix_rows")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, real=real, name=name: (calls.append(name), real(*a))[1])
    prefix_sharing._merge_works.cache_clear()
    for how in ({}, {"sliding_window": 64}, {"sliding_window": 4}, {"softcap": 2.0}):
        attend_both(how)
    used = [name for name in calls if name is not None]
    assert used[-2:] == ["_attend_suffix_rows"] * 2 and used.count("apply") == 3  # one of them the trial


# --- micro-batches ----------------------------------------------------------------------------------------------------


def tokens_computed(batch: Batch, part: list[int]) -> int:
    return len(micro_batch_forward.MicroBatch.of(batch, part, CPU, share=True).input_ids)


@pytest.mark.parametrize("budget", [12, 16, 30, 10_000])
def test_micro_batches_keep_groups_together_and_count_prompts_once(budget):
    batch = grouped_batch()
    parts = split_micro_batches(batch, MicroBatching(max_tokens=budget, share_prefixes=True))
    assert sorted(i for part in parts for i in part) == list(range(batch.num_sequences))
    assert all(tokens_computed(batch, part) <= budget for part in parts)
    groups = batch["group_ids"].tolist()
    for number, (prompt, responses) in enumerate(GROUPS):
        holding = sum(any(groups[i] == number for i in part) for part in parts)
        assert holding == 1 or prompt + sum(responses) > budget
    unshared = split_micro_batches(batch, MicroBatching(max_tokens=budget))
    assert len(parts) <= len(unshared)


def test_micro_batches_of_so_many_sequences_keep_groups_together():
    parts = split_micro_batches(grouped_batch(), MicroBatching(max_sequences=5, share_prefixes=True))
    assert [len(part) for part in parts] == [5, 5, 1]
    both = MicroBatching(max_tokens=20, max_sequences=2, share_prefixes=True)
    assert all(len(part) <= 2 for part in split_micro_batches(grouped_batch(), both))


def test_a_sequence_over_the_budget_is_refused():
    with pytest.raises(ConfigError, match="a sequence of 10 tokens"):
        split_micro_batches(grouped_batch(), MicroBatching(max_tokens=9, share_prefixes=True))


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("micro", [MicroBatching(16), MicroBatching(30), MicroBatching(max_sequences=4)], ids=str)
def test_groups_stay_together_when_ranks_share_a_batch(balanced, micro):
    micro, batch = replace(micro, share_prefixes=True), grouped_batch(GROUPS * 4)
    shards = assign_shards(batch, 2, micro, attention_length=30.0, balanced=balanced)
    assert sorted(row for shard in shards for row in shard.indices) == list(range(batch.num_sequences))
    computed, of_whole_groups = [], 4 * sum(prompt + sum(responses) for prompt, responses in GROUPS)
    for shard in shards:
        part = batch.select(shard.indices)
        sizes = [tokens_computed(part, list(rows)) for rows in shard.micro.plan if rows]
        assert max(sizes) <= (micro.max_tokens or of_whole_groups)
        assert all(len(rows) <= (micro.max_sequences or batch.num_sequences) for rows in shard.micro.plan)
        computed.append(sum(sizes))
    if micro.max_tokens is None or micro.max_tokens > 16:  # no group has to be cut
        assert sum(computed) <= of_whole_groups
    if balanced:
        assert max(computed) <= 1.1 * min(computed)


# --- the engine -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def trained(engine, loss, micro: MicroBatching):
    batch = grouped_batch()
    result = engine.forward_backward(batch, loss, micro, temperature=0.7)
    gradient = {name: p.grad.clone() for name, p in engine.weights.named_parameters}
    engine.optimizer.zero_grad()
    return result, gradient


def assert_same(found, expected):
    torch.testing.assert_close(found[0].outputs, expected[0].outputs, rtol=1e-10, atol=1e-13)
    metrics = {name: value for name, value in found[0].metrics.values().items() if "_tokens" not in name}
    assert metrics == pytest.approx(expected[0].metrics.values(), rel=1e-10)
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-10 * gradient.norm(), name


@pytest.mark.parametrize("mode", ["eager", "chunked", "fused"])
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_the_gradient_equals_the_unshared_one(folder, mode, per_token, checkpointing):
    engine = build_engine(folder, head_mode=mode, model={"enable_gradient_checkpointing": checkpointing})
    expected = trained(engine, SquaredLogprob(per_token), MicroBatching())
    for limits in ({}, {"max_tokens": 16}, {"max_sequences": 3}, {"max_tokens": 40}):
        found = trained(engine, SquaredLogprob(per_token), MicroBatching(**limits, share_prefixes=True))
        assert_same(found, expected)


def test_fewer_tokens_are_computed(folder):
    engine, seen = build_engine(folder), []
    engine.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    trained(engine, SquaredLogprob(), MicroBatching(share_prefixes=True))
    assert seen == [sum(prompt + sum(responses) for prompt, responses in GROUPS)]


def test_log_probs_without_gradient_equal_the_unshared_ones(folder):
    engine, batch = build_engine(folder), grouped_batch()
    found = engine.forward(batch, ("logprobs", "entropy"), MicroBatching(max_tokens=20, share_prefixes=True))
    torch.testing.assert_close(found, engine.forward(batch, ("logprobs", "entropy")), rtol=1e-10, atol=1e-13)


def test_values_of_a_critic_equal_the_unshared_ones(folder):
    engine = build_engine(folder, value_head=True)
    expected = trained(engine, SquaredValue(), MicroBatching())
    engine.optim_step()
    assert_same(trained(engine, SquaredValue(), MicroBatching(share_prefixes=True)), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_several_responses_learn_through_the_last_prompt_token(tmp_path, tied):
    """Only the first token of each response has weight: all gradient flows through one hidden state per group."""
    engine = build_engine(save_tiny_model(tmp_path, tiny_qwen3(tie_word_embeddings=tied)))
    batch = grouped_batch()
    first = torch.zeros(batch.num_tokens, dtype=torch.bool)
    first[(batch["loss_mask"].int().diff() == 1).nonzero().squeeze(1) + 1] = True
    batch = batch.with_columns(loss_weights=batch["loss_weights"] * first)
    gradients = []
    for share in (False, True):
        engine.forward_backward(batch, SquaredLogprob(), MicroBatching(share_prefixes=share))
        gradients.append({name: p.grad.clone() for name, p in engine.weights.named_parameters})
        engine.optimizer.zero_grad()
    for name, gradient in gradients[0].items():
        assert (gradients[1][name] - gradient).norm() <= 1e-10 * gradient.norm(), name


def test_a_model_that_runs_padded_is_refused_by_name(folder, tmp_path):
    from transformers import AutoConfig

    padded = save_tiny_model(tmp_path, AutoConfig.for_model("gpt_neox", **SHAPE))
    with pytest.raises(ConfigError, match=r"gpt_neox.*nobody has tested it packed"):
        build_engine(padded).forward(grouped_batch(), micro=MicroBatching(share_prefixes=True))
    with pytest.raises(ConfigError, match="use_remove_padding=False"):
        engine = build_engine(folder, model={"use_remove_padding": False})
        engine.forward(grouped_batch(), micro=MicroBatching(share_prefixes=True))


def test_kernels_are_tried_alike_without_gradients_and_inside_a_checkpointed_layer(monkeypatch):
    monkeypatch.setattr(sequence_attention, "_attend_varlen", sequence_attention._attend_by_length_runs)
    saved = []
    for tried in (prefix_sharing._merge_works, sequence_attention._varlen_works):
        answers = []
        for context in (torch.enable_grad(), torch.no_grad(), saved_tensors_hooks(lambda t: saved.append(t) or t, id)):
            tried.cache_clear()
            with context:
                answers.append(tried("cpu", torch.float32, SIZE))
        tried.cache_clear()  # of an answer about a kernel that is not the real one
        assert answers == [True, True, True] and not saved


def test_kernels_that_fail_or_give_wrong_numbers_are_named_and_left(monkeypatch, caplog):
    merged, varlen = prefix_sharing._MergedAttention, sequence_attention
    trials = [
        (merged, "apply", merged.apply, prefix_sharing._try_merge),
        (varlen, "_attend_varlen", varlen._attend_by_length_runs, varlen._try_varlen),
    ]
    for owner, name, right, tried in trials:
        kernels = {
            "instead: inconsistent": lambda *args: torch.zeros(2) @ torch.zeros(3),
            "wrong numbers": lambda *args, right=right: right(*args) * 2,
        }
        for words, kernel in kernels.items():
            monkeypatch.setattr(owner, name, kernel)
            caplog.clear()
            assert not tried("cpu", torch.float32, SIZE)
            assert words in caplog.text
