"""Decoder layers compiled once for every pack: as many graphs as kinds of passes, and the gradient of the eager run."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoConfig

from tests.engine_cases import SquaredLogprob, build_engine, random_batch, save_tiny_model
from tests.unit.models.test_attention import HEADS, SIZE, tensors, written_out
from verl.config import HFModelConfig
from verl.data.metrics import Metrics
from verl.data.micro_batches import MicroBatching
from verl.models.attention.packing import Packing
from verl.models.attention.sequence_attention import AttentionSpec, attend_sequences
from verl.models.compiled_layers import FEW_GRAPHS, LayerGraphs, compile_layers, layer_backend

SIZES = (20, 13, 30, 50)  # tokens of a micro-batch: other numbers of sequences and other lengths each time


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def forgotten():
    torch._dynamo.reset()
    counters.clear()


def gradients(folder, **model):
    """Gradients by name for each of `SIZES`, and the engine."""
    engine, out = build_engine(folder, "fp64", model=model), []
    for size in SIZES:
        engine.weights.zero_grad()
        result = engine.forward_backward(random_batch(), SquaredLogprob(), MicroBatching(max_tokens=size))
        out.append({name: p.grad.clone() for name, p in engine.weights.named_parameters})
    return out, engine, result.metrics.values()


def test_packs_of_all_lengths_share_one_graph_and_keep_the_gradient(folder):
    expected, engine, metrics = gradients(folder, compile_layers="off")
    assert engine.layer_graphs is None and "layer_graphs" not in metrics
    found, engine, metrics = gradients(folder, compile_layers="aot_eager")
    assert counters["stats"]["unique_graphs"] == engine.layer_graphs.count == metrics["layer_graphs"] == 1
    assert metrics["new_layer_graphs"] == 0 and not counters["graph_break"]
    for ours, eager in zip(found, expected, strict=True):
        for name, want in eager.items():
            assert (ours[name] - want).norm() <= 1e-12 * want.norm(), name


@pytest.mark.parametrize("window", [None, 3])
def test_the_operator_attends_as_the_written_out_mask_does(window):
    lengths, spec = (4, 4, 1, 6), AttentionSpec(None, 0.0, window, None, None)
    packing = Packing.of_lengths(lengths, torch.device("cpu"))
    ours, theirs = tensors(15, requires_grad=True), tensors(15, requires_grad=True)
    direction = torch.randn(1, 15, HEADS, SIZE, dtype=torch.float64)
    compiled = torch.compile(attend_sequences, backend="aot_eager", fullgraph=True, dynamic=True)
    found, expected = compiled(*ours, packing, spec), written_out(*theirs, lengths, window)
    torch.testing.assert_close(found, expected)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_the_operator_is_described_to_compilers_as_it_is():
    from verl.models.attention.flash_kernels import packed_flash

    packing = Packing.of_lengths((3, 4), torch.device("cpu"))
    inputs = (*tensors(7, requires_grad=True), packing.cu_seqlens, packing.boundaries, 0.3, 2)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(packed_flash, inputs, test_utils=tests)


def test_layers_that_do_not_compile_run_eagerly_and_say_so(folder, caplog, monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no such compiler")

    expected = gradients(folder, compile_layers="off")[0]
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: broken)
    found = gradients(folder, compile_layers="aot_eager")[0]
    assert [r.message for r in caplog.records if "does not compile" in r.message] == [
        "a decoder layer does not compile and runs eagerly: RuntimeError: no such compiler"
    ]
    for name, want in expected[0].items():
        assert (found[0][name] - want).norm() <= 1e-12 * want.norm(), name


def test_a_ninth_graph_is_a_line_and_every_new_one_a_metric(caplog):
    graphs, metrics = LayerGraphs("eager"), Metrics()
    module = torch.fx.symbolic_trace(torch.nn.Identity())
    for _ in range(FEW_GRAPHS):
        graphs(module, [])
    graphs.add_metrics(Metrics())
    assert not caplog.records
    graphs(module, [])
    graphs.add_metrics(metrics)
    assert "graph number 9" in caplog.text and "compile_layers=off" in caplog.text
    assert metrics.values() == {"layer_graphs": 9, "new_layer_graphs": 1}


def test_layers_are_compiled_by_default_on_gpus_only_and_for_plain_decoders(folder, monkeypatch, caplog):
    from transformers import AutoModelForCausalLM

    from verl.plugin.platform import get_platform

    def model_of(kind: str, **more: int):
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=11, **sizes, **more))

    plain, other, auto = model_of("qwen2"), model_of("olmo2"), HFModelConfig(path="x")
    assert layer_backend(plain, auto, 1) == "off" and compile_layers(plain, auto) is None
    monkeypatch.setattr(type(get_platform()), "compiles_triton", lambda self: True)
    assert [layer_backend(m, auto, n) for m, n in ((plain, 1), (other, 1), (plain, 2))] == ["inductor", "off", "off"]
    for key in ("use_liger", "enable_activation_offload"):
        assert layer_backend(plain, HFModelConfig(path="x", **{key: True}), 1) == "off"
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert layer_backend(plain, auto, 1) == "off" and "no C compiler" in caplog.text
