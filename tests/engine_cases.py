"""Tiny random models, batches and losses for tests of models and engines."""

from pathlib import Path

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, Qwen3Config

from verl.config import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.data.batch import Batch
from verl.data.trajectory import Trajectory
from verl.workers.engine.fsdp_engine import FSDPEngineWithLMHead, FSDPEngineWithValueHead

VOCABULARY = 61
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def plain_attention(
    module, query, key, value, mask, scaling=None, sliding_window=None, softcap=None, s_aux=None, **kwargs
):
    """Attention of whole rows, written out. The library's eager attention takes its softmax in float32."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(groups, 1))
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    distance = torch.arange(length)[:, None] - torch.arange(length)[None]
    allowed = (distance >= 0) & (distance < (sliding_window or length))
    scores = torch.where(allowed, scores, float("-inf"))
    if s_aux is not None:  # a sink per head: one more score, whose weight goes nowhere
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("bhqk,bhkd->bqhd", weights, value.repeat_interleave(groups, 1)), None


AttentionInterface.register("plain_test", plain_attention)


def tiny_qwen3(**changes) -> Qwen3Config:
    return Qwen3Config(**{**SHAPE, "tie_word_embeddings": True, **changes})


def save_tiny_model(folder: Path, config: PreTrainedConfig | None = None, seed: int = 0) -> Path:
    """A random model in `folder`, its weights spread enough for log-probs to differ."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config or tiny_qwen3(), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return folder


def build_engine(
    folder: Path,
    dtype: str = "fp64",
    value_head: bool = False,
    optim: dict | None = None,
    model: dict | None = None,
    **engine,
):
    kind = FSDPEngineWithValueHead if value_head else FSDPEngineWithLMHead
    built = kind(
        HFModelConfig(path=str(folder), **(model or {})),
        FSDPEngineConfig(**{"model_dtype": dtype, "dtype": dtype, **engine}),
        FSDPOptimizerConfig(**{"lr": 1e-2, **(optim or {})}),
        CheckpointConfig(),
    )
    built.initialize()
    return built


def random_batch(seed: int = 0, shapes=((3, 5), (6, 2), (2, 9), (4, 4), (1, 7), (5, 4))) -> Batch:
    """Prompts and responses of these lengths, with weights that differ from token to token."""
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()

    rows = [Trajectory.from_completion(ids(p), ids(r), [0.0] * r, group_id=i // 2) for i, (p, r) in enumerate(shapes)]
    batch = Batch.pack(rows)
    weights = torch.rand(batch.num_tokens, generator=generator) * batch["loss_mask"] / 10
    return batch.with_columns(loss_weights=weights, targets=torch.randn(batch.num_tokens, generator=generator))


class SquaredLogprob:
    """(logprob - target)^2: a loss whose gradient depends on every log-prob in a different way."""

    outputs = ("logprobs", "entropy")
    columns = ("targets", "loss_weights")
    optional_columns = ()

    def __init__(self, per_token: bool = True):
        self.per_token = per_token

    def __call__(self, outputs, columns, cu_seqlens=None):
        losses = (outputs["logprobs"] - columns["targets"]) ** 2 - 0.3 * outputs["entropy"]
        metrics = {"square_loss": losses.detach(), "logprob": outputs["logprobs"].detach()}
        return losses * columns["loss_weights"], metrics


class SquaredValue:
    outputs = ("values",)
    columns = ("targets", "loss_weights")
    optional_columns = ()
    per_token = True

    def __call__(self, outputs, columns, cu_seqlens=None):
        losses = (outputs["values"] - columns["targets"]) ** 2
        return losses * columns["loss_weights"], {"vf_loss": losses.detach()}


def naive_logprobs(model, tokens: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """(L, V) log-softmax at each position, for the sequence alone, through the model's own forward."""
    return torch.log_softmax(model(input_ids=tokens[None], use_cache=False).logits[0] / temperature, dim=-1)
