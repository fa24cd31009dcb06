"""head_dtype=float32 beside a bfloat16 model: log-probs, values and gradients are those of a float64 head."""

import pytest
import torch

from tests.engine_cases import build_engine, random_batch, save_tiny_model, tiny_qwen3
from tests.ranks import run_ranks
from tests.unit.workers.engine.test_sharding import ROWS, distance, train
from verl.algorithms.losses import make_actor_loss
from verl.config import ActorConfig
from verl.data.micro_batches import MicroBatching
from verl.models.head.token_outputs import OutputHead, token_logprobs, token_values
from verl.workers.engine.micro_batch_forward import head_input, write_outputs

OUTPUTS = ("logprobs", "entropy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), tiny_qwen3(tie_word_embeddings=False))


def built(folder, head_dtype: str, **more):
    return build_engine(folder, "bf16", head_dtype=head_dtype, **more)


def exact(engine, batch):
    """Outputs of a float64 head of the engine's own weight, from its own bfloat16 hidden states."""
    with torch.no_grad():
        (micro,) = engine._micro_batches(batch, (), MicroBatching())
        rows = head_input(engine.model.base_model, micro, engine.packed)
        head = engine.model.score if engine.has_value_head else engine.model.lm_head
        hidden, weight = rows.hidden.double(), head.weight.double()
        if engine.has_value_head:
            bias = None if head.bias is None else head.bias.double()
            outputs = {"values": token_values(hidden, weight, bias, rows.cu_seqlens, rows.needed)}
        else:
            where = (rows.tokens, rows.cu_seqlens, rows.needed)
            outputs = token_logprobs(hidden, *where, OutputHead(weight, 0.7, mode="eager"), with_entropy=True)
        out = {name: torch.zeros(batch.num_tokens, dtype=torch.float64) for name in outputs}
        write_outputs(out, rows.scatter_to_columns(outputs), micro)
        return out


def errors(found, expected):
    return {name: float((found[name].double() - expected[name]).abs().max()) for name in expected}


@pytest.mark.parametrize("mode", ["eager", "chunked"])
def test_the_outputs_are_those_of_a_float64_head(folder, mode):
    batch = random_batch()
    for head_dtype, low, high in (("float32", 0.0, 2e-6), ("auto", 1e-4, 0.1)):
        engine = built(folder, head_dtype, head_mode=mode)
        with engine.eval_mode():
            found = engine.forward(batch, OUTPUTS, temperature=0.7)
            assert found["logprobs"].dtype == torch.float32 and engine.model.lm_head.weight.dtype == torch.bfloat16
            for name, error in errors(found, exact(engine, batch)).items():
                assert low <= error <= high, (head_dtype, name)


def test_the_update_uses_it_too_and_its_gradient_reaches_the_model(folder):
    batch = random_batch()
    columns = {"advantages": torch.ones(batch.num_tokens), "loss_weights": batch["loss_mask"].float()}
    batch = batch.with_columns(**columns)
    loss = make_actor_loss(ActorConfig())
    gradients = {}
    for head_dtype in ("float32", "auto"):
        engine = built(folder, head_dtype)
        with engine.train_mode():
            found = engine.forward_backward(batch, loss, temperature=0.7).outputs
        expected = {"logprobs": exact(engine, batch)["logprobs"]}
        assert (errors(found, expected)["logprobs"] < 2e-6) == (head_dtype == "float32")
        gradients[head_dtype] = {name: g.detach().double() for name, g in engine.weights.full_gradients()}
    for name, gradient in gradients["float32"].items():
        other = gradients["auto"][name]
        assert gradient.norm() > 0 and (gradient - other).norm() < 0.1 * other.norm(), name


def test_values_of_a_critic_are_those_of_a_float64_head(folder):
    batch = random_batch()
    for head_dtype, low, high in (("float32", 0.0, 2e-6), ("auto", 1e-4, 0.1)):
        engine = built(folder, head_dtype, value_head=True)
        with torch.no_grad():
            engine.model.score.weight.normal_()  # a new one is 0
        with engine.eval_mode():
            error = errors(engine.forward(batch, ("values",)), exact(engine, batch))["values"]
        assert low <= error <= high, head_dtype


def test_a_float64_model_keeps_its_precision(folder):
    batch = random_batch()
    plain, wide = (build_engine(folder, head_dtype=head_dtype) for head_dtype in ("auto", "float32"))
    with plain.eval_mode(), wide.eval_mode():
        outputs = [engine.forward(batch, ("logprobs",))["logprobs"] for engine in (plain, wide)]
    assert outputs[1].dtype == torch.float64 and torch.equal(*outputs)


def test_ranks_that_share_the_parameters_give_the_same_log_probs(folder):
    settings = {"dtype": "bf16", "model_dtype": "fp32", "head_dtype": "float32"}
    ranks = run_ranks(2, train, folder, settings, 2)
    alone, narrow = (train(folder, {**settings, "head_dtype": dtype}) for dtype in ("float32", "auto"))
    found = torch.cat([torch.from_numpy(rank["before"]) for rank in ranks])
    tokens = (
        random_batch()
        .with_columns(place=torch.arange(random_batch().num_tokens))
        .select([*ROWS[2][0], *ROWS[2][1]])["place"]
    )
    assert (found - torch.from_numpy(alone["before"])[tokens]).abs().max() < 2e-6
    assert (found - torch.from_numpy(narrow["before"])[tokens]).abs().max() > 1e-4
    for rank in ranks:
        assert distance(rank["gradients"], alone["gradients"]) < 0.02
