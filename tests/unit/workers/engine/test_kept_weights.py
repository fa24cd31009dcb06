"""The weights of before compute as they did, in whichever way they are held, and training does not see them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine_cases import SquaredLogprob, build_engine, random_batch, save_tiny_model
from tests.ranks import run_ranks
from verl.data.micro_batches import MicroBatching

MICRO = MicroBatching(max_sequences=2)
SETTINGS: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "offload": {"param_offload": True, "optimizer_offload": True},
    "no reshard, offload": {"param_offload": True, "reshard_after_forward": False},
    "offload policy": {"offload_policy": True},
    "adapters": {"model": {"lora_rank": 2, "lora_alpha": 4}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def keep_and_train(folder, settings: dict[str, Any], size: int = 1) -> list[int]:
    """Bytes that this rank keeps of each of the settings."""
    return [_keep_and_train(folder, one, size) for one in settings.values()]


def _keep_and_train(folder, settings: dict[str, Any], size: int) -> int:
    rank = dist.get_rank() if size > 1 else 0
    batch = random_batch().select(range(rank, 6, size))
    engine, other = (build_engine(folder, **{"dtype": "fp32", **settings}) for _ in range(2))

    def logprobs() -> torch.Tensor:
        with engine.eval_mode():
            return engine.forward(batch, ("logprobs",), MICRO)["logprobs"]

    def weights_of(one) -> dict[str, torch.Tensor]:
        with one.eval_mode():
            return {name: tensor.clone() for name, tensor in one.export_weights()}

    before, num_bytes = logprobs(), 0
    for step in range(2):
        num_bytes = engine.keep_weights()
        kept = logprobs()
        for one in (engine, other):
            with one.train_mode():
                one.forward_backward(batch, SquaredLogprob(), MICRO)
                one.optim_step()
        trained = logprobs()
        engine.swap_weights()
        assert torch.equal(logprobs(), kept) and not torch.equal(trained, kept)
        assert torch.equal(kept, before) or step
        engine.swap_weights()
        assert torch.equal(logprobs(), trained)
    expected = weights_of(other)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(engine).items())
    return num_bytes


def test_one_rank_computes_by_kept_weights_also_where_it_computes_in_another_type(folder):
    kept = keep_and_train(folder, {"same": {}, "mixed": {"model_dtype": "fp32", "dtype": "bf16"}, **SETTINGS})
    engine = build_engine(folder, dtype="fp32")
    numbers = sum(parameter.numel() for parameter in engine.model.parameters())
    assert kept[0] == kept[1] == 4 * numbers and kept[-1] < numbers


def test_two_ranks_keep_their_shards(folder):
    kept = run_ranks(2, keep_and_train, folder, SETTINGS, 2)
    whole = keep_and_train(folder, {"alone": {}})[0]
    assert [a + b for a, b in zip(*kept, strict=True)][:4] == [whole] * 4
