"""A micro-batch that does not fit costs a restart and nothing else: the same gradient, weights and metrics."""

import gc
import logging
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from tests.engine_cases import SquaredLogprob, build_engine, random_batch, save_tiny_model
from tests.ranks import run_ranks
from tests.tiers import each_once, slow
from verl.config import load_config
from verl.config.actor import SFT_BATCHING_KEYS
from verl.config.mesh import MeshShape
from verl.data.metrics import Metrics
from verl.data.micro_batches import MicroBatching
from verl.utils.errors import ConfigError
from verl.workers.engine.out_of_memory import OOMEvent, TokenLimit, is_out_of_memory
from verl.workers.engine.rank_mesh import RankMesh
from verl.workers.engine_worker import micro_batching

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def allocate_too_much() -> None:
    """The CPU allocator's own error."""
    torch.empty(2**62, dtype=torch.uint8)


def limit_memory(engine, place: str, most: int) -> list[int]:
    """Let the engine fit no micro-batch of more than `most` tokens at `place`; the sizes that were refused."""
    refused: list[int] = []

    def check(tensor: torch.Tensor) -> None:
        if tensor.numel() // tensor.shape[-1] > most:
            refused.append(tensor.numel() // tensor.shape[-1])
            allocate_too_much()

    layer = engine.model.model.layers[1]
    if place == "layer":
        layer.mlp.register_forward_pre_hook(lambda _, args: check(args[0]))
    elif place == "backward":
        layer.mlp.register_full_backward_hook(lambda _, inputs, outputs: check(outputs[0]))
    elif place == "heads":  # between the exchanges of ranks that share sequences, and those of the backward pass
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: check(args[0]))
    elif place == "embedding":
        engine.model.model.embed_tokens.register_forward_hook(lambda _, args, output: check(output))
    else:
        engine.model.model.norm.register_forward_hook(lambda _, args, output: check(output))
    return refused


def train(engine, batch, micro) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    """Weights after `STEPS` steps, and the metrics of each."""
    seen = []
    for _ in range(STEPS):
        with engine.train_mode():
            metrics = Metrics().merge(engine.forward_backward(batch, SquaredLogprob(), micro).metrics)
            seen.append(metrics.merge(engine.optim_step()).values())
    return {name: tensor.clone() for name, tensor in engine.export_weights()}, seen


def without_limit(metrics: dict[str, float]) -> dict[str, float]:
    return {n: v for n, v in metrics.items() if n not in ("micro_batch_token_limit", "out_of_memory_restarts")}


@pytest.mark.parametrize("place", ["layer", "backward", "embedding", "after the layers"])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_training_that_runs_out_of_memory_ends_with_the_same_weights(folder, place, checkpointing):
    batch, micro = random_batch(), MicroBatching(max_tokens=50)
    settings = {"model": {"enable_gradient_checkpointing": checkpointing}}
    expected, expected_metrics = train(build_engine(folder, **settings), batch, micro)
    engine = build_engine(folder, **settings)
    refused = limit_memory(engine, place, most=20)
    found, metrics = train(engine, batch, micro)
    assert refused, "the allocator never failed: this test would prove nothing"
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)
    for one, other in zip(metrics, expected_metrics, strict=True):
        assert without_limit(one) == pytest.approx(other, rel=1e-9)
    assert metrics[0]["micro_batch_token_limit"] == metrics[-1]["micro_batch_token_limit"] <= 25
    assert metrics[0]["out_of_memory_restarts"] == metrics[-1]["out_of_memory_restarts"] == 1


def test_masters_in_another_type_forget_the_gradient_of_what_did_not_fit(folder):
    batch, settings = random_batch(), {"model_dtype": "fp32", "dtype": "fp64"}
    plain = build_engine(folder, **settings)
    plain.forward_backward(batch, SquaredLogprob(), MicroBatching(max_tokens=20))
    engine = build_engine(folder, **settings)
    assert limit_memory(engine, "backward", most=20) == []
    engine.forward_backward(batch, SquaredLogprob(), MicroBatching(max_tokens=40))
    for (name, one), (_, other) in zip(engine.weights.named_parameters, plain.weights.named_parameters, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_forward_pass_learns_a_limit_of_its_own(folder):
    batch, engine = random_batch(), build_engine(folder)
    expected = engine.forward(batch)["logprobs"]
    refused = limit_memory(engine, "layer", most=30)
    for _ in range(2):
        torch.testing.assert_close(engine.forward(batch)["logprobs"], expected, rtol=1e-10, atol=1e-12)
    assert len(refused) == 1 and engine.forward_limit.tokens == batch.num_tokens // 2
    assert engine.train_limit.tokens is None


def test_the_budget_halves_until_it_fits_and_long_sequences_run_alone(folder, caplog):
    batch, engine = random_batch(), build_engine(folder)
    longest = int(batch.lengths.max())
    refused = limit_memory(engine, "layer", most=longest)
    with caplog.at_level(logging.WARNING):
        engine.forward_backward(batch, SquaredLogprob())
    assert refused == sorted(refused, reverse=True) and engine.train_limit.tokens < longest
    first, *_, last = [record.getMessage() for record in caplog.records]
    assert f". Setting *max_token_len_per_gpu={batch.num_tokens // 2} saves" in first
    assert last.endswith(f"at most {engine.train_limit.tokens} tokens per micro-batch from now on")  # no key may say it


@pytest.mark.parametrize(
    ("size", "sharers", "advice"),
    [
        ({"data.max_token_len_per_gpu": 100}, 1, "Setting data.max_token_len_per_gpu=25 saves the restart"),
        ({"data.max_token_len_per_gpu": 50}, 2, "Setting data.max_token_len_per_gpu=12 saves the restart"),
        (
            {"data.use_dynamic_bsz": False},
            2,
            "Setting data.use_dynamic_bsz=True and data.max_token_len_per_gpu=12 saves the restart",
        ),
    ],
)
def test_the_advice_names_the_key_that_decides_and_what_it_counts_on_one_rank(size, sharers, advice, caplog):
    keys = [f"{key}={value}" for key, value in {"data.max_length": 50, **size}.items()]
    micro = micro_batching(load_config(keys, config_name="sft_trainer").data, SFT_BATCHING_KEYS, sharers)
    limit = TokenLimit(RankMesh(shape=MeshShape(context=sharers)), torch.device("cpu"), "training")
    found = iter([OOMEvent(50, 6, "no memory"), None])
    with caplog.at_level(logging.WARNING):
        for attempt in limit.attempts(random_batch(), micro, lambda: None):
            attempt.oom = next(found)
    assert advice in caplog.text


@pytest.mark.parametrize("checkpointing", [True, False])
def test_memory_options_that_are_set_already_are_no_advice(folder, checkpointing):
    engine = build_engine(folder, model={"enable_gradient_checkpointing": checkpointing})
    limit_memory(engine, "layer", most=3)
    with pytest.raises(ConfigError, match=r"training the language model ran out.*data\.max_length") as training:
        engine.forward_backward(random_batch(), SquaredLogprob())
    with pytest.raises(ConfigError, match="the forward pass of the language model") as forward:
        engine.forward(random_batch())
    assert ("enable_gradient_checkpointing" in str(training.value)) is not checkpointing
    assert "enable_gradient_checkpointing" not in str(forward.value)


@pytest.mark.parametrize("place", ["layer", "backward"])
def test_nothing_holds_the_activations_of_what_did_not_fit(folder, place, monkeypatch):
    engine = build_engine(folder, model={"enable_gradient_checkpointing": False})
    activations, alive, zero_grad = [], [], engine.weights.zero_grad
    saved = engine.model.model.layers[0].mlp.down_proj  # whose input the backward pass needs
    saved.register_forward_pre_hook(lambda _, args: activations.append(weakref.ref(args[0])))
    limit_memory(engine, place, most=20)

    def undo() -> None:
        alive.append(sum(activation() is not None for activation in activations))
        zero_grad()

    monkeypatch.setattr(engine.weights, "zero_grad", undo)
    gc.disable()  # memory that only the collector frees comes too late
    try:
        engine.forward_backward(random_batch(), SquaredLogprob(), MicroBatching(max_tokens=50))
    finally:
        gc.enable()
    assert activations and alive == [0]


def test_one_sequence_that_does_not_fit_is_an_error_that_says_so(folder):
    batch, engine = random_batch(), build_engine(folder)
    limit_memory(engine, "layer", most=int(batch.lengths.max()) - 1)
    with pytest.raises(ConfigError, match=rf"one sequence alone: {int(batch.lengths.max())} tokens did not fit.*Alloc"):
        engine.forward_backward(batch, SquaredLogprob())


def test_a_gradient_of_an_earlier_call_is_not_lost_silently(folder):
    batch, engine = random_batch(), build_engine(folder)
    engine.forward_backward(batch, SquaredLogprob())
    limit_memory(engine, "layer", most=20)
    with pytest.raises(ConfigError, match="an earlier call"):
        engine.forward_backward(batch, SquaredLogprob())


ROWS = [[0, 3, 4], [1, 2, 5]]


def train_on_two(folder, place: str, starved: list[int], settings: dict) -> tuple[dict, list[dict], list[int]]:
    """`train` on this rank's rows; ranks in `starved` cannot fit everything."""
    rank, settings = dist.get_rank(), dict(settings)
    micro, most = MicroBatching(max_tokens=settings.pop("max_tokens", 50)), settings.pop("most", 20)
    engine = build_engine(folder, **settings)
    refused = limit_memory(engine, place, most if rank in starved else 1000)
    shard = random_batch().select(ROWS[rank])
    with engine.eval_mode():
        logprobs = engine.forward(shard, micro=micro)["logprobs"]
    weights, metrics = train(engine, shard, micro)
    restarts = engine.train_limit.restarts
    weights["log-probs"] = logprobs
    return {n: w.numpy() for n, w in weights.items()}, metrics, [len(refused), restarts, engine.train_limit.tokens]


STARVED = {
    "one rank": ([1], {}),
    "no checkpoints": ([0], {"model": {"enable_gradient_checkpointing": False}}),
    "both ranks": ([0, 1], {"reshard_after_forward": False}),
    "prefetch": ([1], {"forward_prefetch": True}),
    "micro-batches": ([0, 1], {"max_tokens": 20, "most": 15}),
    "gathered ones": ([0], {"max_tokens": 20, "most": 15, "reshard_after_forward": False}),
    "copies": ([1], {"fsdp_size": 1}),
}
PLACES = ["layer", "backward", "embedding", "after the layers"]


@pytest.mark.parametrize(("who", "place"), each_once([*STARVED], PLACES))
def test_a_rank_that_runs_out_of_memory_does_not_keep_the_other_waiting(folder, who, place):
    starved, settings = STARVED[who]
    engine = build_engine(folder)
    logprobs = engine.forward(random_batch())["logprobs"]
    expected, _ = train(engine, random_batch(), MicroBatching(max_tokens=50))
    for rank, (weights, _, (refused, restarts, limit)) in enumerate(
        run_ranks(2, train_on_two, folder, place, starved, settings)
    ):
        assert (refused > 0) == (rank in starved), "the allocator never failed: this test would prove nothing"
        assert restarts == 1
        assert limit == (8 if "most" in settings else 12 if 0 in starved else 14)  # half of 16, 24 or 28 tokens
        expected["log-probs"] = random_batch().with_columns(found=logprobs).select(ROWS[rank])["found"]
        for name, tensor in expected.items():
            torch.testing.assert_close(torch.from_numpy(weights[name]), tensor, rtol=1e-10, atol=1e-12)


COPIES = {"fsdp_size": 2}  # of the parameters, on each two of four ranks


@pytest.mark.parametrize("place", ["backward", *slow(["layer", "after the layers"])])
def test_a_rank_that_shares_a_copy_of_the_parameters_does_not_keep_the_others_waiting(folder, place):
    expected, _ = train(build_engine(folder), random_batch(), MicroBatching(max_tokens=50))
    for weights, restarts in run_ranks(4, train_on_four, folder, place, COPIES):
        assert restarts == 1
        for name, tensor in expected.items():
            torch.testing.assert_close(torch.from_numpy(weights[name]), tensor, rtol=1e-10, atol=1e-12)


def train_on_four(folder, place: str, settings: dict) -> tuple[dict, int]:
    """`train` on this rank's rows; rank 2 cannot fit two of them."""
    rank = dist.get_rank()
    engine = build_engine(folder, **settings)
    refused = limit_memory(engine, place, 12 if rank == 2 else 1000)
    weights, _ = train(engine, random_batch().select([[0, 5], [1], [2, 3], [4]][rank]), MicroBatching(max_tokens=50))
    assert bool(refused) == (rank == 2), "the allocator never failed: this test would prove nothing"
    return {n: w.numpy() for n, w in weights.items()}, engine.train_limit.restarts


ALLOCATIONS = (  # for an all-gather, after one, for a reduction
    (_fsdp_param_group, "foreach_all_gather"),
    (_fsdp_param_group, "foreach_all_gather_copy_out"),
    (_fsdp_param_group, "foreach_reduce"),
)


def gradients_with_a_failed_allocation(folder, settings: dict) -> tuple[dict, list[tuple[dict, int]]]:
    """The gradient without fault, and with rank 1 out of memory in each call of FSDP's own; and its restarts."""

    def gradients(break_call: int | None = None, where: tuple = ALLOCATIONS[0]) -> tuple[dict, int, int]:
        engine = build_engine(folder, **settings)
        shard = random_batch(seed=dist.get_rank(), shapes=((3, 5), (6, 2), (2, 4), (4, 4)))
        calls, real = [0], getattr(*where)

        def failing(*args, **kwargs):
            calls[0] += 1
            if calls[0] - 1 == break_call and dist.get_rank() == 1:
                allocate_too_much()
            return real(*args, **kwargs)

        setattr(*where, failing)
        try:
            engine.forward_backward(shard, SquaredLogprob(), MicroBatching(max_sequences=2))
        finally:
            setattr(*where, real)
        found = {name: gradient.numpy() for name, gradient in engine.weights.full_gradients()}
        return found, engine.train_limit.restarts, calls[0]

    expected, found = gradients()[0], []
    for where in ALLOCATIONS:
        for call in range(gradients(None, where)[2]):
            found.append(gradients(call, where)[:2])
    return expected, found


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({}, 15),  # root and layers, of two micro-batches, and one reduction each
        pytest.param({"forward_prefetch": True}, 15, marks=pytest.mark.slow),
        pytest.param({"reshard_after_forward": False}, 15, marks=pytest.mark.slow),
        ({"fsdp_size": 1}, 3),
    ],
    ids=str,
)
def test_memory_that_runs_out_while_fsdp_gathers_or_reduces_costs_a_restart(folder, settings, calls):
    for expected, found in run_ranks(2, gradients_with_a_failed_allocation, folder, settings):
        assert len(found) >= calls
        for gradients, restarts in found:
            assert restarts == 1
            for name, gradient in expected.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-12)


def train_sharing(folder, place: str, starved: int, settings: dict) -> tuple[dict, int, int]:
    """`train` where pairs of ranks share sequences; rank `starved` cannot fit everything."""
    rank = dist.get_rank()
    engine = build_engine(folder, ulysses_sequence_parallel_size=2, **settings)
    refused = limit_memory(engine, place, 8 if rank == starved else 1000)
    shard = random_batch() if dist.get_world_size() == 2 else random_batch().select(ROWS[rank // 2])
    weights, _ = train(engine, shard, MicroBatching(max_tokens=30))
    return {n: w.numpy() for n, w in weights.items()}, len(refused), engine.train_limit.restarts


@pytest.mark.parametrize(("place", "sharers"), each_once([*PLACES, "heads"], [(2, True), (2, False), (4, True)]))
def test_ranks_that_share_sequences_restart_together(folder, place, sharers):
    ranks, checkpointing = sharers
    settings = {"model": {"enable_gradient_checkpointing": checkpointing}}
    expected, _ = train(build_engine(folder), random_batch(), MicroBatching(max_tokens=50))
    results = run_ranks(ranks, train_sharing, folder, place, ranks - 1, settings)
    for rank, (weights, refused, restarts) in enumerate(results):
        assert (refused > 0) == (rank == ranks - 1), "the allocator never failed: this test would prove nothing"
        assert restarts >= 1
        for name, tensor in expected.items():
            torch.testing.assert_close(torch.from_numpy(weights[name]), tensor, rtol=1e-10, atol=1e-12)


def train_on_one_too_long(folder) -> str:
    rank = dist.get_rank()
    engine = build_engine(folder)
    limit_memory(engine, "layer", most=10 if rank == 1 else 1000)
    with pytest.raises(ConfigError) as caught:
        engine.forward_backward(random_batch().select(ROWS[rank]), SquaredLogprob())
    return str(caught.value)


def test_all_ranks_end_where_one_sequence_alone_does_not_fit_on_one(folder):
    first, second = run_ranks(2, train_on_one_too_long, folder)
    assert "on another rank" in first and "11 tokens did not fit" in second


def train_before_torch_2_13(folder) -> str:
    del FSDPModule.reset_iter_state
    engine = build_engine(folder)
    limit_memory(engine, "layer", most=20)
    with pytest.raises(ConfigError) as caught:
        engine.forward_backward(random_batch().select(ROWS[dist.get_rank()]), SquaredLogprob())
    return str(caught.value)


def test_an_older_torch_cannot_go_on_after_an_error_in_fsdp2(folder):
    for message in run_ranks(2, train_before_torch_2_13, folder):
        assert "use torch 2.13 or later, or smaller micro-batches" in message


def test_other_errors_pass(folder):
    batch, engine = random_batch(), build_engine(folder)

    def fail(*_):
        raise RuntimeError("shapes do not match")

    engine.model.model.norm.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="shapes"):
        engine.forward_backward(batch, SquaredLogprob())


def test_allocator_errors_are_told_from_others():
    with pytest.raises(RuntimeError) as caught:
        allocate_too_much()
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
