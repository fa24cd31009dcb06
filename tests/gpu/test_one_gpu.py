"""What one GPU computes against the CPU: decoding by device graphs, packed training, whole steps. `make test-gpu`."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.e2e import jobs
from verl.config import FSDPEngineConfig, HFModelConfig
from verl.config.rollout import RolloutConfig
from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching
from verl.data.trajectory import Trajectory
from verl.workers.engine.base import EngineRegistry
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import NativeEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ACTOR = "actor_rollout_ref.actor"
MIXED = [f"{ACTOR}.fsdp_config.dtype=bfloat16", "actor_rollout_ref.rollout.dtype=bfloat16"]
OFFLOAD = [f"{ACTOR}.fsdp_config.{part}_offload=True" for part in ("param", "optimizer")]
KINDS = {
    "grpo": [],
    "graphs off": ["actor_rollout_ref.rollout.enforce_eager=True"],
    "reference": [f"{ACTOR}.use_kl_loss=True", "actor_rollout_ref.ref.fsdp_config.dtype=float32"],
    "ppo": ["algorithm.adv_estimator=gae", "critic.fsdp.dtype=float32", "critic.optim.lr=1e-2"],
    "offload": OFFLOAD,
    "activations": ["actor_rollout_ref.model.enable_activation_offload=True"],
    "lora": ["actor_rollout_ref.model.lora_rank=4"],
    "fsdp2 rank": ["trainer.runtime=processes"],
    "bfloat16": MIXED,
    "bfloat16, offload": [*MIXED, *OFFLOAD],
    "bfloat16 rank": [*MIXED, "trainer.runtime=processes"],
}


def small_model(seed: int = 0) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=4099, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True,
        eos_token_id=1, pad_token_id=0, bos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def expected_logprobs(model: Qwen3ForCausalLM, ids: list[int]) -> torch.Tensor:
    """(len - 1,) of each token after the first, by transformers in float64 on the CPU."""
    with torch.no_grad():
        logits = model.double()(torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-4), ("bfloat16", 0.15)])
def test_graphed_decoding_has_the_log_probs_of_the_model(dtype: str, apart: float):
    model = small_model()
    oracle, device = small_model(), torch.device("cuda")
    config = RolloutConfig(dtype=dtype, prompt_length=40, response_length=300, max_num_seqs=12)
    engine = NativeEngine(config, model.to(device), device=device)
    assert engine.decoder.graphs is not None
    lengths = [5, 40, 17, 3]
    asked = [
        GenerationRequest(i, torch.arange(2 + i, 2 + i + n).tolist(), SamplingParams(max_tokens=300 - 60 * i, n=4))
        for i, n in enumerate(lengths)
    ]  # 16 samples for 12 rows, over more than one window of columns
    first = engine.core.run(asked, ())
    engine.core.free_cache()  # asleep and awake: graphs are captured anew
    second = engine.core.run(asked, ())
    for request, samples, again in zip(asked, first, second, strict=True):
        for sample, repeated in zip(samples, again, strict=True):
            assert sample.token_ids == repeated.token_ids or dtype == "bfloat16"
            expected = expected_logprobs(oracle, request.prompt_ids + sample.token_ids)[len(request.prompt_ids) - 1 :]
            assert (torch.tensor(sample.logprobs, dtype=torch.float64) - expected).abs().max() < apart


@pytest.mark.parametrize(("dtype", "apart"), [("fp32", 1e-4), ("bf16", 0.15)])
@pytest.mark.parametrize("head_mode", ["eager", "chunked", "fused"])
def test_packed_log_probs_are_those_of_the_model(tmp_path: Path, dtype: str, apart: float, head_mode: str):
    oracle = small_model()
    oracle.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 4099, (n,), generator=generator) for n in (7, 130, 33, 2, 64)]
    batch = Batch.pack(
        [Trajectory(ids, torch.arange(len(ids)) > 0, torch.zeros(len(ids)), group_id=0, reward=0.0) for ids in rows]
    )
    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        HFModelConfig(path=str(tmp_path)),
        FSDPEngineConfig(model_dtype="fp32", dtype=dtype, head_mode=head_mode, forward_only=True),
        None,
    )
    engine.initialize()
    got = engine.forward(batch, ("logprobs",), MicroBatching(160))["logprobs"].cpu().double()
    first = torch.zeros(1, dtype=torch.float64)  # no log-prob: nothing is before it
    expected = torch.cat([part for ids in rows for part in (first, expected_logprobs(oracle, ids.tolist()))])
    assert (got - expected).abs().max() < apart


@pytest.mark.parametrize("kind", KINDS)
def test_steps_on_a_gpu_equal_those_on_the_cpu(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path, layers=2)
    for device in ("cpu", "cuda"):
        jobs.train(tmp_path, device, "trainer.total_training_steps=2", f"trainer.device={device}", *KINDS[kind])
    on_cpu, on_gpu = (jobs.metrics(tmp_path, device) for device in ("cpu", "cuda"))
    rounding, apart = (5e-2, 2e-2) if "bfloat16" in kind else (1e-3, 1e-4)
    for step in (1, 2):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean", "response_length/mean"):
            assert on_gpu[step][name] == pytest.approx(on_cpu[step][name], rel=rounding, abs=apart), (step, name)
        assert on_gpu[step]["training/rollout_probs_diff_max"] < apart
        assert on_gpu[step]["actor/perf/max_memory_allocated_gb"] > 0


def test_colocated_asynchronous_steps_run_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path, layers=2)
    asynchronous = ["trainer.v1.trainer_mode=colocate_async", "async_training.staleness_threshold=1", *MIXED]
    jobs.train(tmp_path, "run", "trainer.total_training_steps=3", "trainer.save_freq=3", *asynchronous)
    jobs.train(tmp_path, "run", "trainer.total_training_steps=5", *asynchronous)
    rows = jobs.metrics(tmp_path, "run")
    assert {1, 2, 3, 4, 5} <= set(rows)
    assert all(0 < rows[step]["actor/grad_norm"] < 100 for step in (1, 2, 3, 4, 5))
