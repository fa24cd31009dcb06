"""The gradient by definition: one sequence at a time, whole logits, every formula written out.

Slow on purpose, and without anything of the engine that it judges: no packing, no chunks, no loss weights. The
gradient by the model's outputs is taken first, over the whole mini-batch; each sequence then runs alone to carry its
part into the parameters. Shapes: L tokens of one sequence, V vocabulary, W the longest response.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from verl.algorithms.kl import kl_penalty
from verl.algorithms.losses import PolicyLoss, get_policy_loss
from verl.config import ActorConfig, CriticConfig
from verl.data.batch import Batch
from verl.trainer.ppo.padded import PolicyLossAdapter
from verl.utils.errors import ConfigError

WRITTEN_OUT = "verl_written_out"
Outputs = dict[str, Tensor]
Gradient = dict[str, Tensor]
LossOf = Callable[[list[Outputs], list[Outputs]], Tensor]  # (outputs, columns) of each sequence -> scalar


def attention(module, query, key, value, mask, scaling=None, sliding_window=None, softcap=None, s_aux=None, **kwargs):
    """Causal attention of one whole sequence in the type of its inputs."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(groups, 1))
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)[None]
    allowed = (distance >= 0) & (distance < (sliding_window or length))
    scores = torch.where(allowed, scores, float("-inf"))
    if s_aux is not None:  # one learnt score per head that takes its share of the attention and gives nothing
        scores = torch.cat([s_aux.view(1, -1, 1, 1).expand(len(scores), -1, length, 1).to(scores.dtype), scores], -1)
    weights = scores.softmax(-1)[..., -length:]
    return torch.einsum("bhqk,bhkd->bqhd", weights, value.repeat_interleave(groups, 1)), None


AttentionInterface.register(WRITTEN_OUT, attention)


def outputs_of(model: nn.Module, rows: list[Outputs], temperature: float) -> list[Outputs]:
    """What the model says about each token of each sequence: log-prob and entropy (nats), or the value.

    Entry t is about token t given those before it, 0 for the first. Several sequences are padded on the right, where a
    causal model never looks.
    """
    tokens_NL = pad_sequence([row["tokens"] for row in rows], batch_first=True)
    logits_NLV = model(input_ids=tokens_NL, use_cache=False).logits
    logits_NLV = logits_NLV.to(torch.promote_types(logits_NLV.dtype, torch.float32))
    out = []
    for row, logits_LV in zip(rows, logits_NLV, strict=True):
        logits_LV, first = logits_LV[: len(row["tokens"]) - 1], logits_LV.new_zeros(1)
        if logits_LV.shape[1] == 1:  # a value head
            out.append({"values": torch.cat([first, logits_LV[:, 0]])})
            continue
        logp_LV = torch.log_softmax(logits_LV / temperature, -1)
        logprobs = logp_LV.gather(1, row["tokens"][1:, None])[:, 0]
        entropy = -(logp_LV.exp() * logp_LV).sum(1)
        out.append({"logprobs": torch.cat([first, logprobs]), "entropy": torch.cat([first, entropy])})
    return out


def gradient(model: nn.Module, batch: Batch, loss_of: LossOf, temperature: float, together: int = 1) -> Gradient:
    """The gradient of `loss_of` by parameter name, added up in float64 over `together` sequences at a time."""
    rows = sequences(batch)
    parts = [rows[i : i + together] for i in range(0, len(rows), together)]
    with torch.no_grad():
        leaves = [leaf for part in parts for leaf in outputs_of(model, part, temperature)]
    leaves = [{name: column.double().requires_grad_() for name, column in leaf.items()} for leaf in leaves]
    loss = loss_of(leaves, rows)
    if not loss.requires_grad:
        raise ConfigError("the loss does not depend on what the model says: is something detached in it?")
    loss.backward()
    total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in model.named_parameters() if p.requires_grad}
    for i, part in enumerate(parts):
        found, part_leaves = outputs_of(model, part, temperature), leaves[i * together : (i + 1) * together]
        terms = [
            (out[name] * by_output.to(out[name].dtype)).sum()
            for out, leaf in zip(found, part_leaves, strict=True)
            for name in out
            if (by_output := leaf[name].grad) is not None
        ]
        if terms:  # a sequence without a sampled token has none
            torch.stack(terms).sum().backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                total[name] += parameter.grad
                parameter.grad = None
    return total


def sequences(batch: Batch) -> list[Outputs]:
    """The token columns of each sequence, floating ones in float64."""
    bounds = batch.cu_seqlens.tolist()
    columns = {n: c.double() if c.is_floating_point() else c for n, c in batch.token_columns.items()}
    spans = itertools.pairwise(bounds)
    return [{name: column[start:stop] for name, column in columns.items()} for start, stop in spans]


def aggregate(losses: list[Tensor], masks: list[Tensor], mode: str, scale: float) -> Tensor:
    """One number from the losses (L,) of every sequence of the mini-batch."""
    kept = [loss[mask.bool()] for loss, mask in zip(losses, masks, strict=True) if mask.any()]
    if mode == "token-mean":
        return torch.cat(kept).mean()
    if mode == "token-sum":
        return torch.cat(kept).sum()
    if mode == "seq-mean-token-sum":
        return torch.stack([loss.sum() for loss in kept]).mean()
    if mode == "seq-mean-token-mean":
        return torch.stack([loss.mean() for loss in kept]).mean()
    if mode == "seq-mean-token-sum-norm":
        return torch.stack([loss.sum() / scale for loss in kept]).mean()
    raise ConfigError(f"no definition of loss_agg_mode={mode!r} to compare with")


def actor_loss(config: ActorConfig, scale: float) -> LossOf:
    """The loss of the policy: the registered policy loss, the entropy bonus and the KL term."""
    policy_loss = get_policy_loss(config.policy_loss.loss_mode)
    outside = policy_loss.function if isinstance(policy_loss.function, PolicyLossAdapter) else None

    def loss_of(outputs: list[Outputs], rows: list[Outputs]) -> Tensor:
        masks = [row["loss_mask"] for row in rows]
        logprobs = [out["logprobs"] * mask for out, mask in zip(outputs, masks, strict=True)]
        losses = [torch.zeros_like(one) for one in logprobs]
        for i, (out, row) in enumerate(zip(outputs, rows, strict=True)):
            if outside is None:
                losses[i] = losses[i] + policy_loss_alone(policy_loss, logprobs[i], row, config)
            if config.entropy_coeff:
                losses[i] = losses[i] - config.entropy_coeff * out["entropy"]
            if config.use_kl_loss:
                kl = kl_penalty(logprobs[i], row["ref_logprobs"], config.kl_loss_type)
                losses[i] = losses[i] + config.kl_loss_coef * kl
        total = aggregate(losses, masks, config.loss_agg_mode, scale)
        return total if outside is None else total + outside_loss(outside, logprobs, rows, config, scale)

    return loss_of


def policy_loss_alone(policy_loss: PolicyLoss, logprobs: Tensor, row: Outputs, config: ActorConfig) -> Tensor:
    """(L,) a registered loss of one sequence that never meets another."""
    alone = Batch(torch.tensor([0, len(logprobs)]), dict(row), {})
    return policy_loss(logprobs, row["old_logprobs"], row["advantages"], alone, config)[0]


def outside_loss(
    adapter: PolicyLossAdapter, logprobs: list[Tensor], rows: list[Outputs], config: ActorConfig, scale: float
) -> Tensor:
    """A loss written for padded tensors, called once on the whole mini-batch; `agg_loss` aggregates for good."""
    starts = [int(row["loss_mask"].nonzero()[0]) if row["loss_mask"].any() else len(row["tokens"]) for row in rows]

    def padded(columns: list[Tensor]) -> Tensor:
        return pad_sequence([c[start:] for c, start in zip(columns, starts, strict=True)], batch_first=True)

    old, advantages = (padded([row[name] for row in rows]) for name in ("old_logprobs", "advantages"))
    mask = padded([row["loss_mask"].long() for row in rows])
    loss, _ = adapter.call(_Whole(scale), config, padded(logprobs), old, advantages, mask)  # type: ignore[arg-type]
    return loss


class _Whole:
    """Stands where `agg_loss` looks for the trainer: the mini-batch is whole, so its value is the true one."""

    def __init__(self, scale: float):
        self.scale = scale

    def add(self, loss_mat: Tensor, loss_mask: Tensor, mode: str) -> Tensor:
        return aggregate(list(loss_mat), list(loss_mask), mode, self.scale)


def value_loss(config: CriticConfig, scale: float) -> LossOf:
    """The clipped squared error of the values."""

    def loss_of(outputs: list[Outputs], rows: list[Outputs]) -> Tensor:
        losses = []
        for out, row in zip(outputs, rows, strict=True):
            near = row["values"] + (out["values"] - row["values"]).clamp(
                -config.cliprange_value, config.cliprange_value
            )
            errors = torch.stack([(out["values"] - row["returns"]) ** 2, (near - row["returns"]) ** 2])
            losses.append(errors.amax(0) / 2)
        return aggregate(losses, [row["loss_mask"] for row in rows], config.loss_agg_mode, scale)

    return loss_of


def likelihood_loss(outputs: list[Outputs], rows: list[Outputs]) -> Tensor:
    """The mean negative log-likelihood of the trained tokens."""
    return aggregate([-out["logprobs"] for out in outputs], [row["loss_mask"] for row in rows], "token-mean", 1.0)
