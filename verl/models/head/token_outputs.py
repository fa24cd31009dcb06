"""The language-model head: log-prob and entropy of tokens from hidden states, without a (T, V) matrix of logits.

Shapes: T packed tokens, M of them needed, V vocabulary, D hidden. Only this file shifts: row t of the hidden states
predicts token t+1 of the same sequence; every output is indexed by the token that it is about.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from verl.config import FSDPEngineConfig, HFModelConfig
from verl.models.head.autograd import ChunkedHead, KnownGradient, PassOptions, make_kernels, one_pass_blocks
from verl.models.head.blockwise import BlockwiseHead
from verl.models.head.chosen_tokens import TopLogits, top_tokens
from verl.models.head.elementwise import statistics_dtype
from verl.plugin.platform import get_platform
from verl.utils.errors import ConfigError

MODES = ("eager", "chunked", "fused")

# (outputs, columns, None) -> (losses times loss weights (M,), token metrics by name (M,)), all of the same M tokens
PerTokenLoss = Callable[[dict[str, Tensor], dict[str, Tensor], None], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class OutputHead:
    """The weight of the head and how it is computed.

    `temperature`, which divides the logits, is a number or a (T,) column. `kernels` are "torch", "compiled" or
    "triton"; `chunk_size` is the number of rows in one block (None: chosen for speed within 16 MB, 40 in bfloat16, 256
    on a GPU).
    """

    weight_VD: Tensor
    temperature: float | Tensor = 1.0
    bias: Tensor | None = None
    mode: str = "chunked"
    kernels: str = "torch"
    chunk_size: int | None = None


class HeadSettings(NamedTuple):
    """The last three fields of an `OutputHead`."""

    mode: str
    kernels: str
    chunk_size: int | None


def head_settings(model: HFModelConfig, engine: FSDPEngineConfig) -> HeadSettings:
    """How the head is computed, from the configuration and this platform.

    `chunk_size` is None (the head chooses) unless `entropy_from_logits_with_chunking` is on.
    """
    chunk_size = engine.entropy_from_logits_chunk_size if engine.entropy_from_logits_with_chunking else None
    return HeadSettings(head_mode(model, engine), head_kernels(model, engine), chunk_size)


def head_mode(model: HFModelConfig, engine: FSDPEngineConfig) -> str:
    """How log-probs are computed from hidden states: `fsdp_config.head_mode` or, if that is auto, by older keys.

    `use_fused_kernels` means "fused". `entropy_from_logits_with_chunking` and `entropy_checkpointing` need at least
    "chunked", which is also the default on every device: it never stores the logits and recomputes them in backward.
    """
    asks_for_blocks = engine.entropy_from_logits_with_chunking or engine.entropy_checkpointing
    if engine.head_mode == "eager" and (asks_for_blocks or model.use_fused_kernels):
        raise ConfigError(
            "head_mode=eager holds all logits, which use_fused_kernels, entropy_from_logits_with_chunking and "
            "entropy_checkpointing ask not to do; leave head_mode at auto, or switch these three off"
        )
    if engine.head_mode != "auto":
        return engine.head_mode
    return "fused" if model.use_fused_kernels else "chunked"


def head_kernels(model: HFModelConfig, engine: FSDPEngineConfig) -> str:
    """The elementwise kernels of "chunked" and "fused": "torch", "compiled" or "triton".

    Compiling is for devices with Triton; on a CPU it takes longer than it ever saves.
    """
    if model.use_fused_kernels and model.fused_kernel_options.impl_backend == "triton":
        check_triton()
        return "triton"
    return "compiled" if engine.use_torch_compile and get_platform().compiles_triton() else "torch"


def check_triton() -> None:
    """Refuses devices that Triton has no compiler for, unless its interpreter is on."""
    platform = get_platform()
    if not platform.compiles_triton() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "model.fused_kernel_options.impl_backend=triton needs a GPU: Triton has no compiler for "
            f"{platform.device_name!r}; use impl_backend=torch "
            "(TRITON_INTERPRET=1 in the environment runs the kernels slowly anywhere, for tests)"
        )
    if find_spec("triton") is None:
        raise ConfigError("impl_backend=triton needs the package triton; pip install triton, or use impl_backend=torch")


def token_logprobs(
    hidden_TD: Tensor,
    tokens_T: Tensor,
    cu_seqlens: Tensor,
    needed_T: Tensor | None,
    head: OutputHead,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    ids_Tk: Tensor | None = None,
) -> dict[str, Tensor]:
    """`logprobs` (T,), and `entropy` (T,) if requested, in nats: entry t is about token t given those before it.

    `sum_pi_squared` (T,), if requested, is the sum of the squared probabilities of the vocabulary. It takes a second
    pass, at half the temperature: its log is logsumexp(2x) - 2 logsumexp(x), which is 2 log p(x) - log p(2x).
    `logprobs_at_ids` (T, k), with `ids_Tk`, are the log-probs of these tokens of the vocabulary, distinct in a row, at
    the same place: ids_Tk[t] are alternatives to token t.
    Zero where `needed_T` is False and at the first token of each sequence; only the needed rows go through the head.
    Differentiable in hidden states, weight and bias. float32, or float64 for float64 inputs.
    """
    positions = needed_positions(cu_seqlens, needed_T, tokens_T)
    inputs = _head_inputs(hidden_TD, tokens_T, positions, head)
    ids_Mk = None if ids_Tk is None else ids_Tk[positions]
    logprobs_M, entropy_M, at_ids_Mk = _run_head(inputs, head, with_entropy, ids_Mk)
    out_M = {"logprobs": logprobs_M} | ({"entropy": entropy_M} if with_entropy else {})
    if ids_Mk is not None:
        out_M["logprobs_at_ids"] = at_ids_Mk
    if with_sum_pi_squared:
        temperature_M = inputs[-1]
        halved = torch.full_like(logprobs_M, 0.5) if temperature_M is None else temperature_M / 2
        at_half, _, _ = _run_head((*inputs[:-1], halved), head)
        out_M["sum_pi_squared"] = (2 * logprobs_M - at_half).exp()
    return {name: _scatter_to_tokens(values_M, positions, len(tokens_T)) for name, values_M in out_M.items()}


def token_top(
    hidden_TD: Tensor, tokens_T: Tensor, cu_seqlens: Tensor, needed_T: Tensor | None, head: OutputHead, top: TopLogits
) -> dict[str, Tensor]:
    """`top_ids` (T, k) and `top_logprobs` (T, k): the most likely tokens in place of each, without gradient."""
    positions = needed_positions(cu_seqlens, needed_T, tokens_T)
    inputs = _head_inputs(hidden_TD, tokens_T, positions, head)
    ids_Mk, logprobs_Mk = top_tokens(*inputs[:4], inputs[-1], top, head.chunk_size, head.kernels)
    out_M = {"top_ids": ids_Mk, "top_logprobs": logprobs_Mk}
    return {name: _scatter_to_tokens(values_M, positions, len(tokens_T)) for name, values_M in out_M.items()}


class SummedLoss(NamedTuple):
    """A loss (0-d, attached to the graph), and what is kept of its tokens: detached, zero where not needed."""

    loss_sum: Tensor  # of losses times loss weights
    outputs: dict[str, Tensor]  # (T,)
    token_metrics: dict[str, Tensor]  # (T,)


def token_loss_one_pass(
    hidden_TD: Tensor,
    tokens_T: Tensor,
    cu_seqlens: Tensor,
    needed_T: Tensor | None,
    head: OutputHead,
    token_loss: PerTokenLoss,
    columns: dict[str, Tensor],
    with_entropy: bool = False,
) -> SummedLoss:
    """The loss of the needed tokens; the gradient is computed block by block.

    For losses that are per token: `token_loss` gets a few tokens at a time (`outputs` and `columns` of those tokens),
    and its derivatives by log-prob and entropy become the gradient of hidden states and weight while the logits exist.
    `backward` on the sum scales that gradient, once.
    """
    positions = needed_positions(cu_seqlens, needed_T, tokens_T)
    hidden_TD, weight_VD, bias, source, targets, temperature_M = _head_inputs(hidden_TD, tokens_T, positions, head)
    blocks = one_pass_blocks(weight_VD, len(positions), head.chunk_size)
    blockwise = BlockwiseHead(hidden_TD, weight_VD, bias, blocks, make_kernels(head.kernels))
    total = blockwise.new_gradients(*(x is not None and x.requires_grad for x in (hidden_TD, weight_VD, bias)))
    loss_sum = torch.zeros((), dtype=blockwise.dtype, device=hidden_TD.device)
    token_outputs = _TokenOutputs(positions, len(tokens_T), blockwise.dtype)
    with torch.no_grad(), torch.autocast(hidden_TD.device.type, enabled=False):
        for part in blocks.row_slices(len(positions)):
            where = positions[part]
            rows = blockwise.row_block(source, targets, temperature_M, part)
            stats = blockwise.statistics(rows, with_entropy)
            leaves = {"logprobs": stats.logprobs.detach().requires_grad_()}
            if stats.entropy is not None:
                leaves["entropy"] = stats.entropy.detach().requires_grad_()
            with torch.enable_grad():
                losses, metrics = token_loss(leaves, {name: column[where] for name, column in columns.items()}, None)
                loss = losses.sum()
            loss_sum += loss
            token_outputs.add(part, leaves, metrics)
            if total.wanted and loss.requires_grad:
                gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
                if any(gradient is not None for gradient in gradients):
                    grad_entropy = gradients[1] if with_entropy else None
                    blockwise.add_gradients(rows, stats, gradients[0], grad_entropy, total)
    gradients = total.finish(None if bias is None else bias.dtype)
    loss_sum = KnownGradient.apply(loss_sum, gradients, hidden_TD, weight_VD, bias)
    return SummedLoss(loss_sum, token_outputs.outputs, token_outputs.metrics)


# hidden states, weight, bias, the row that predicts each needed token, these tokens, their temperatures
_HeadInputs = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor | None]


def _head_inputs(hidden_TD: Tensor, tokens_T: Tensor, positions: Tensor, head: OutputHead) -> _HeadInputs:
    temperature_M = _temperature_column(head.temperature, positions)
    hidden_TD = hidden_TD.to(head.weight_VD.dtype)
    return hidden_TD, head.weight_VD, head.bias, positions - 1, tokens_T[positions], temperature_M


def _run_head(
    inputs: _HeadInputs, head: OutputHead, with_entropy: bool = False, ids_Mk: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropy, log-probs at `ids_Mk`) of the needed tokens; None for what was not requested."""
    if head.mode not in MODES:
        raise ConfigError(f"head mode {head.mode!r} is unknown; use one of {', '.join(MODES)}")
    if head.mode == "eager":
        return eager_head(*inputs, with_entropy, ids_Mk)
    options = PassOptions(head.chunk_size, with_entropy, head.kernels)
    out: tuple[Tensor, Tensor, Tensor] = ChunkedHead.apply(*inputs, options, ids_Mk)
    return out


def token_values(
    hidden_TD: Tensor, weight_1D: Tensor, bias: Tensor | None, cu_seqlens: Tensor, needed_T: Tensor
) -> Tensor:
    """(T,) float32 (or float64): entry t is the value of the state in which token t is chosen.

    That state is the tokens before it. Zero where `needed_T` is False and at the first token of each sequence.
    """
    positions = needed_positions(cu_seqlens, needed_T, needed_T)
    values_M = torch.nn.functional.linear(hidden_TD[positions - 1].to(weight_1D.dtype), weight_1D, bias).squeeze(1)
    return _scatter_to_tokens(values_M.to(torch.promote_types(values_M.dtype, torch.float32)), positions, len(needed_T))


def needed_positions(cu_seqlens: Tensor, needed_T: Tensor | None, tokens_T: Tensor) -> Tensor:
    """(M,) ascending positions of the needed tokens that have a token before them in their sequence."""
    mask = torch.ones_like(tokens_T, dtype=torch.bool) if needed_T is None else needed_T.to(torch.bool).clone()
    starts = cu_seqlens[:-1].to(mask.device, torch.int64)
    mask[starts[starts < len(mask)]] = False  # an empty last sequence starts at T
    return mask.nonzero().squeeze(1)


class _TokenOutputs:
    """Collects outputs and metrics of blocks of tokens in columns (T,)."""

    def __init__(self, positions: Tensor, num_tokens: int, dtype: torch.dtype):
        self.positions, self.num_tokens, self.dtype = positions, num_tokens, dtype
        self.outputs: dict[str, Tensor] = {}
        self.metrics: dict[str, Tensor] = {}

    def add(self, part: slice, outputs: dict[str, Tensor], metrics: dict[str, Tensor]) -> None:
        for into, values in ((self.outputs, outputs), (self.metrics, metrics)):
            for name, column in values.items():
                if name not in into:
                    into[name] = torch.zeros(self.num_tokens, dtype=self.dtype, device=self.positions.device)
                into[name][self.positions[part]] = column.detach().to(self.dtype)


def eager_head(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias: Tensor | None,
    source: Tensor,
    targets: Tensor,
    temperature: Tensor | None,
    with_entropy: bool,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The oracle: all logits of the needed rows at once, with autograd's gradient."""
    logits_MV = torch.nn.functional.linear(hidden_TD[source], weight_VD, bias).to(statistics_dtype(weight_VD))
    if temperature is not None:
        logits_MV = logits_MV / temperature.to(logits_MV.dtype).unsqueeze(1)
    logp_MV = logits_MV.log_softmax(1)
    entropy = -(logp_MV.exp() * logp_MV).sum(1) if with_entropy else None
    return logp_MV.gather(1, targets.unsqueeze(1)).squeeze(1), entropy, None if ids is None else logp_MV.gather(1, ids)


def _temperature_column(temperature: float | Tensor, positions: Tensor) -> Tensor | None:
    """(M,) temperatures of the needed tokens; None when all are 1."""
    if isinstance(temperature, Tensor) and temperature.dim() > 0:
        return temperature.to(positions.device)[positions]
    value = float(temperature)
    if not value > 0:
        raise ConfigError(f"the head's temperature must be above 0, got {value}; greedy decoding trains at 1.0")
    return None if value == 1.0 else torch.full(positions.shape, value, dtype=torch.float64, device=positions.device)


def _scatter_to_tokens(values_M: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """(M, ...) values at their positions among T, zero elsewhere."""
    return values_M.new_zeros(num_tokens, *values_M.shape[1:]).index_copy(0, positions, values_M)
