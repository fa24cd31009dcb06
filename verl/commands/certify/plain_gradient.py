"""The gradient by definition: one sequence at a time, whole logits, every formula written out.

Slow on purpose; uses nothing of the engine that it checks: no packing, no chunks, no loss weights. The gradient by the
model's outputs is computed first, over the whole mini-batch. Then each sequence is run again alone and its part is
backpropagated to the parameters. Shapes: L tokens of one sequence, V vocabulary, W the longest response.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from verl.algorithms.kl import kl_penalty
from verl.algorithms.losses import ActorLoss, PolicyLoss, aggregation_mode, losses_per_token
from verl.algorithms.policy_loss import ReducingLoss
from verl.commands.certify import formulas
from verl.config import ActorConfig, CriticConfig
from verl.data.batch import Batch
from verl.utils.errors import ConfigError

NAIVE_ATTENTION = "verl_naive_attention"
TokenColumns = dict[str, Tensor]
Gradient = dict[str, Tensor]
ReferenceLoss = Callable[[list[TokenColumns], list[TokenColumns]], Tensor]  # (outputs, columns) by sequence -> scalar


def naive_attention(
    module, query, key, value, mask, scaling=None, sliding_window=None, softcap=None, s_aux=None, **kwargs
):
    """Causal attention of one whole sequence in the dtype of its inputs."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key.repeat_interleave(groups, 1))
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)[None]
    allowed = (distance >= 0) & (distance < (sliding_window or length))
    scores = torch.where(allowed, scores, float("-inf"))
    if s_aux is not None:  # attention sink: one learned logit per head, without a value
        scores = torch.cat([s_aux.view(1, -1, 1, 1).expand(len(scores), -1, length, 1).to(scores.dtype), scores], -1)
    weights = scores.softmax(-1)[..., -length:]
    return torch.einsum("bhqk,bhkd->bqhd", weights, value.repeat_interleave(groups, 1)), None


AttentionInterface.register(NAIVE_ATTENTION, naive_attention)


def model_outputs(model: nn.Module, sequences: list[TokenColumns], temperature: float) -> list[TokenColumns]:
    """For each token of each sequence: log-prob, entropy (nats) and the sum of squared probabilities, or the value.

    Entry t is for token t given the tokens before it, 0 for the first. Several sequences are padded on the right, which
    does not affect a causal model.
    """
    tokens_NL = pad_sequence([sequence["tokens"] for sequence in sequences], batch_first=True)
    logits_NLV = model(input_ids=tokens_NL, use_cache=False).logits
    logits_NLV = logits_NLV.to(torch.promote_types(logits_NLV.dtype, torch.float32))
    out = []
    for sequence, logits_LV in zip(sequences, logits_NLV, strict=True):
        logits_LV, first = logits_LV[: len(sequence["tokens"]) - 1], logits_LV.new_zeros(1)
        if logits_LV.shape[1] == 1:  # a value head
            out.append({"values": torch.cat([first, logits_LV[:, 0]])})
            continue
        logp_LV = torch.log_softmax(logits_LV / temperature, -1)
        logprobs = logp_LV.gather(1, sequence["tokens"][1:, None])[:, 0]
        entropy = -(logp_LV.exp() * logp_LV).sum(1)
        columns = {"logprobs": logprobs, "entropy": entropy, "sum_pi_squared": logp_LV.exp().square().sum(1)}
        out.append({name: torch.cat([first, column]) for name, column in columns.items()})
    return out


def gradient(
    model: nn.Module, batch: Batch, reference_loss: ReferenceLoss, temperature: float, sequences_per_forward: int = 1
) -> Gradient:
    """The gradient of `reference_loss` by parameter name, summed in float64, `sequences_per_forward` at a time."""
    sequences = split_sequences(batch)
    parts = [sequences[i : i + sequences_per_forward] for i in range(0, len(sequences), sequences_per_forward)]
    with torch.no_grad():
        leaves = [leaf for part in parts for leaf in model_outputs(model, part, temperature)]
    leaves = [{name: column.double().requires_grad_() for name, column in leaf.items()} for leaf in leaves]
    loss = reference_loss(leaves, sequences)
    if not loss.requires_grad:
        raise ConfigError("the loss does not depend on what the model says: is something detached in it?")
    loss.backward()
    total = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in model.named_parameters() if p.requires_grad}
    for i, part in enumerate(parts):
        outputs = model_outputs(model, part, temperature)
        part_leaves = leaves[i * sequences_per_forward : (i + 1) * sequences_per_forward]
        terms = [
            (out[name] * by_output.to(out[name].dtype)).sum()
            for out, leaf in zip(outputs, part_leaves, strict=True)
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


def split_sequences(batch: Batch) -> list[TokenColumns]:
    """The token columns of each sequence, floating ones in float64, and `group` (L,), the number of its prompt."""
    bounds, groups = batch.cu_seqlens.tolist(), batch["group_ids"]
    columns = {n: c.double() if c.is_floating_point() else c for n, c in batch.token_columns.items()}
    spans = itertools.pairwise(bounds)
    return [
        {name: column[start:stop] for name, column in columns.items()} | {"group": group.expand(stop - start)}
        for (start, stop), group in zip(spans, groups, strict=True)
    ]


def aggregate(
    losses: list[Tensor], sequences: list[TokenColumns], mode: str, scale: float, masks: Sequence[Tensor] = ()
) -> Tensor:
    """One number from the losses (L,) of every sequence of the mini-batch; `masks` where they are not `loss_mask`."""
    masks = masks or [sequence["loss_mask"] for sequence in sequences]
    rows = [loss[mask.bool()] for loss, mask in zip(losses, masks, strict=True)]
    return formulas.aggregated(rows, [int(sequence["group"][0]) for sequence in sequences], mode, scale)


def actor_loss(config: ActorConfig, loss: ActorLoss, scale: float) -> ReferenceLoss:
    """The loss of the policy: the registered policy loss of `loss`, importance weights, entropy bonus and KL term."""
    policy_loss = loss.policy_loss
    external = policy_loss.function if isinstance(policy_loss.function, ReducingLoss) else None

    def reference_loss(outputs: list[TokenColumns], sequences: list[TokenColumns]) -> Tensor:
        masks = [sequence["loss_mask"] for sequence in sequences]
        logprobs = [out["logprobs"] * mask for out, mask in zip(outputs, masks, strict=True)]
        losses = [torch.zeros_like(one) for one in logprobs]
        for i, (out, sequence) in enumerate(zip(outputs, sequences, strict=True)):
            if external is None:
                seen = sequence | {name: out[name] for name in policy_loss.outputs}
                weight = sequence["rollout_is_weights"] if loss.multiplied else 1.0
                losses[i] = losses[i] + weight * single_sequence_policy_loss(policy_loss, logprobs[i], seen, config)
            if config.entropy_coeff:
                losses[i] = losses[i] - config.entropy_coeff * out["entropy"]
            if config.use_kl_loss:
                kl = kl_penalty(logprobs[i], sequence["ref_logprobs"], config.kl_loss_type)
                losses[i] = losses[i] + config.kl_loss_coef * kl
        total = aggregate(losses, sequences, aggregation_mode(config), scale)
        return total if external is None else total + external_policy_loss(external, logprobs, sequences, config, scale)

    return reference_loss


def single_sequence_policy_loss(
    policy_loss: PolicyLoss, logprobs: Tensor, sequence: TokenColumns, config: ActorConfig
) -> Tensor:
    """(L,) a registered loss, computed on one sequence alone."""
    alone = Batch(torch.tensor([0, len(logprobs)]), dict(sequence), {})
    returned = policy_loss.function(logprobs, sequence["old_logprobs"], sequence["advantages"], alone, config)
    return losses_per_token(f"policy loss {config.policy_loss.loss_mode!r}", returned, logprobs)[0]


def external_policy_loss(
    external: ReducingLoss, logprobs: list[Tensor], sequences: list[TokenColumns], config: ActorConfig, scale: float
) -> Tensor:
    """A loss written for padded tensors, called once on the whole mini-batch, so `agg_loss` gives the final value."""
    starts = [
        int(sequence["loss_mask"].nonzero()[0]) if sequence["loss_mask"].any() else len(sequence["tokens"])
        for sequence in sequences
    ]

    def padded(columns: list[Tensor]) -> Tensor:
        return pad_sequence([c[start:] for c, start in zip(columns, starts, strict=True)], batch_first=True)

    old, advantages = (padded([sequence[name] for sequence in sequences]) for name in ("old_logprobs", "advantages"))
    mask = padded([sequence["loss_mask"].long() for sequence in sequences])

    def reduce(losses: Tensor, mask: Tensor, mode: str) -> Tensor:
        return aggregate(list(losses), sequences, mode, scale, list(mask))

    columns = {"log_prob": padded(logprobs), "old": old, "advantages": advantages, "mask": mask}
    return external.reduced(reduce, config, columns)


def value_loss(config: CriticConfig, scale: float) -> ReferenceLoss:
    """The clipped squared error of the values."""

    def reference_loss(outputs: list[TokenColumns], sequences: list[TokenColumns]) -> Tensor:
        losses = []
        for out, sequence in zip(outputs, sequences, strict=True):
            clipped_values = sequence["values"] + (out["values"] - sequence["values"]).clamp(
                -config.cliprange_value, config.cliprange_value
            )
            errors = torch.stack(
                [(out["values"] - sequence["returns"]) ** 2, (clipped_values - sequence["returns"]) ** 2]
            )
            losses.append(errors.amax(0) / 2)
        return aggregate(losses, sequences, config.loss_agg_mode, scale)

    return reference_loss


def likelihood_loss(outputs: list[TokenColumns], sequences: list[TokenColumns]) -> Tensor:
    """The mean negative log-likelihood of the trained tokens."""
    return aggregate([-out["logprobs"] for out in outputs], sequences, "token-mean", 1.0)
