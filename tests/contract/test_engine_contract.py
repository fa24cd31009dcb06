"""What every engine promises; add an adapter to ENGINES and it runs the same cases."""

import pytest
import torch

from tests.engine_cases import SquaredLogprob, SquaredValue, build_engine, random_batch, save_tiny_model
from verl.data.micro_batches import MicroBatching

ENGINES = ["language_model", "value_model"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=ENGINES)
def engine(request, folder):
    return build_engine(folder, value_head=request.param == "value_model")


def loss_of(engine):
    return SquaredValue() if engine.has_value_head else SquaredLogprob()


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


def test_one_step_lowers_the_loss_and_reports_it(engine):
    batch, loss = random_batch(), loss_of(engine)
    first = engine.forward_backward(batch, loss).metrics.values()["loss"]
    metrics = engine.optim_step().values()
    assert metrics["grad_norm"] > 0 and metrics["lr"] == pytest.approx(1e-2) and metrics["skipped"] == 0
    assert engine.forward_backward(batch, loss).metrics.values()["loss"] < first


def test_forward_changes_neither_weights_nor_gradients(engine):
    before = weights(engine)
    engine.forward(random_batch(), loss_of(engine).outputs, MicroBatching(max_tokens=20))
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(engine).items())
    assert all(p.grad is None for p in engine.model.parameters())


def test_gradients_add_up_over_calls(engine):
    batch, loss = random_batch(), loss_of(engine)
    engine.forward_backward(batch, loss)
    engine.forward_backward(batch, loss)
    twice = engine.optim_step().values()["grad_norm"]
    other = build_engine(engine.model_config.path, value_head=engine.has_value_head)
    other.forward_backward(batch, loss)
    assert twice == pytest.approx(2 * other.optim_step().values()["grad_norm"], rel=1e-9)


def test_the_outputs_of_a_training_pass_are_those_of_a_forward_pass(engine):
    batch, loss = random_batch(), loss_of(engine)
    expected = engine.forward(batch, loss.outputs, MicroBatching(max_sequences=2))
    found = engine.forward_backward(batch, loss, MicroBatching(max_tokens=30)).outputs
    for name in loss.outputs:
        torch.testing.assert_close(found[name], expected[name])
        assert not found[name].requires_grad


def test_a_batch_without_a_sampled_token_does_nothing(engine):
    batch = random_batch()
    empty = torch.zeros_like(batch["loss_mask"])
    batch = batch.with_columns(loss_mask=empty, loss_weights=batch["loss_weights"] * 0)
    before = weights(engine)
    assert engine.forward_backward(batch, loss_of(engine)).metrics.values() == {}
    engine.optim_step()
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(engine).items())


def test_modes_are_contexts_and_devices_by_name(engine):
    with engine.train_mode():
        assert engine.model.training
    with engine.eval_mode():
        assert not engine.model.training
    engine.to("cpu")
    engine.to("device")


def test_a_missing_column_is_named(engine):
    batch = random_batch().select_columns(["loss_weights"])
    with pytest.raises(KeyError, match="targets"):
        engine.forward_backward(batch, loss_of(engine))
