"""Metrics of a batch, under their public names."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregation import loss_weights
from verl.algorithms.policy_loss import LOG_RATIO_LIMIT, limited_log_ratio
from verl.algorithms.token_rewards import conversation_numbers, mean_per_conversation
from verl.data.batch import Batch
from verl.data.trajectory import Trajectory, conversations_of

LOG_PROB_FLOOR = 1e-12


def data_metrics(batch: Batch, max_prompt_length: int, max_response_length: int) -> dict[str, float]:
    """Scores and rewards of one step's conversations; advantages, returns, values and lengths of its sequences."""
    out: dict[str, float] = {}
    conversation = conversation_numbers(batch)
    out.update(mean_max_min("critic/score", mean_per_conversation(batch["rewards"], conversation)))
    out.update(reward_metrics(batch))
    rewards = mean_per_conversation(batch.sum_per_sequence(batch["token_rewards"]), conversation)
    out.update(mean_max_min("critic/rewards", rewards))
    trained = trained_mask(batch)
    out.update(mean_max_min("critic/advantages", batch["advantages"][trained]))
    out.update(mean_max_min("critic/returns", batch["returns"][trained]))
    if "values" in batch:
        values, returns = batch["values"][trained].double(), batch["returns"][trained].double()
        out.update(mean_max_min("critic/values", values))
        residual, spread = (returns - values).var(unbiased=False), returns.var(unbiased=False)
        out["critic/vf_explained_var"] = float(1.0 - residual / (spread + 1e-5))
    prompt, response = prompt_and_response_lengths(batch)
    out.update(mean_max_min("response_length", response))
    out["response_length/clip_ratio"] = float((response >= max_response_length).double().mean())
    answered = response[response > 0]
    out.update(mean_max_min("response_length_non_aborted", answered))
    out["response/aborted_ratio"] = float((response == 0).double().mean())
    out.update(mean_max_min("prompt_length", prompt))
    out["prompt_length/clip_ratio"] = float((prompt >= max_prompt_length).double().mean())
    return out


def trained_mask(batch: Batch) -> Tensor:
    """(T,) the sampled tokens that rollout correction has not rejected."""
    mask = batch["loss_mask"]
    return mask & ~batch["rejected_tokens"] if "rejected_tokens" in batch else mask


def variance_proxy_metrics(batch: Batch, grad_norm: float | None) -> dict[str, float]:
    """variance_proxy/*: estimates of the variance of the policy gradient; `grad_norm` is the step's, if it has one.

    The gradient of log p by the logits has the squared norm 1 - 2 p + sum(pi^2); times the squared importance weight,
    summed over an answer, it is W. Source: arXiv 2602.07078.
    """
    mask = trained_mask(batch)
    energy = 1 - 2 * batch["old_logprobs"].double().exp() + batch["sum_pi_squared"].double()
    if "rollout_is_weights" in batch:
        energy = energy * batch["rollout_is_weights"].double().square()
    squares = batch["advantages"].double().square()
    count = batch.sum_per_sequence(mask.double())
    answers = count > 0

    def mean_over_answers(values: Tensor) -> float:
        return float(values[answers].mean()) if bool(answers.any()) else 0.0

    power = mean_over_answers(batch.sum_per_sequence(torch.where(mask, squares * energy, 0.0)))
    mean_square = batch.sum_per_sequence(torch.where(mask, squares, 0.0)) / count.clamp(min=1)
    out = {
        "proxy2_total_power": power,
        "expected_a_squared": mean_over_answers(mean_square),
        "expected_w": mean_over_answers(batch.sum_per_sequence(torch.where(mask, energy, 0.0))),
    }
    if grad_norm is not None:
        out["proxy1_signal_strength"] = grad_norm**2
        out["proxy3_pure_noise"] = max(power - grad_norm**2, 0.0) / max(int(answers.sum()) - 1, 1)
    return {f"variance_proxy/{name}": value for name, value in out.items()}


def reward_metrics(batch: Batch) -> dict[str, float]:
    """reward/std of the conversations, reward/groups_without_spread: the share of groups whose rewards are all equal,
    and, where conversations have several outputs, reward/unequal_outputs: the share with different rewards for them."""
    if batch.num_sequences == 0:
        return {}
    conversation, (_, group) = conversation_numbers(batch), batch["group_ids"].unique(return_inverse=True)
    rewards = mean_per_conversation(batch["rewards"], conversation)
    without_spread = _all_equal(rewards, group.new_zeros(len(rewards)).scatter(0, conversation, group))
    out = {
        "reward/std": float(rewards.std(unbiased=False)),
        "reward/groups_without_spread": float(without_spread.double().mean()),
    }
    if len(rewards) < batch.num_sequences:
        out["reward/unequal_outputs"] = float((~_all_equal(batch["rewards"], conversation)).double().mean())
    return out


def _all_equal(values: Tensor, owner: Tensor) -> Tensor:
    """Whether all values of an owner, numbered from 0, are equal."""
    start = values.new_zeros(int(owner.max()) + 1)
    low, high = (start.scatter_reduce(0, owner, values, how, include_self=False) for how in ("amin", "amax"))
    return low == high


def numeric_parts(answer: Trajectory) -> dict[str, object]:
    """Parts of a score, and fields of an agent loop, that can be averaged; and `pred`, on which maj@k votes."""
    return {
        name: value
        for name, value in {**answer.loop_fields, **answer.score_parts}.items()
        if name not in ("num_turns", "data_source") and (isinstance(value, int | float) or name == "pred")
    }


def whole_score(outputs: Sequence[Trajectory]) -> tuple[float | None, dict[str, object]]:
    """The reward of a conversation and its `numeric_parts`: means over its scored outputs; of `pred` the last."""
    rewards = [one.reward for one in outputs if one.reward is not None]
    values: dict[str, list[Any]] = {}
    for one in outputs:
        for name, value in numeric_parts(one).items() if one.reward is not None else ():
            values.setdefault(name, []).append(value)
    parts = {name: found[-1] if name == "pred" else fmean(found) for name, found in values.items()}
    return fmean(rewards) if rewards else None, parts


def reward_part_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """reward/<part>/{mean,max,min} over the conversations whose scored outputs have the part, for its numbers."""
    values: dict[str, list[float]] = {}
    for outputs in conversations_of(trajectories):
        for name, value in whole_score(outputs)[1].items():
            if name != "pred" and isinstance(value, int | float):
                values.setdefault(name, []).append(float(value))
    out: dict[str, float] = {}
    for name, numbers in values.items():
        out |= mean_max_min(f"reward/{name}", torch.tensor(numbers, dtype=torch.float64))
    return out


def entropy_metrics(batch: Batch, loss_agg_mode: str, loss_scale_factor: float) -> dict[str, float]:
    """actor/entropy: nats per sampled token of the policy before this step's update, aggregated as the loss is.

    Empty for a step in which the policy ran no forward pass (critic_warmup with bypass_mode).
    """
    if "entropy" not in batch:
        return {}
    weights = loss_weights(batch, loss_agg_mode, loss_scale_factor, torch.float64)
    return {"actor/entropy": float((weights * batch["entropy"].double()).sum())}


def balance_metrics(lengths: Sequence[int], tokens_per_rank: Sequence[float]) -> dict[str, float]:
    """global_seqlen/{min,max,minmax_diff,mean,balanced_min,balanced_max}: tokens of a step on one data-parallel rank.

    The first four assume the sequences in order, equally many per rank. `balanced_*` come from the `tokens_per_rank` of
    the update, and are left out without an update.
    """
    ranks = len(tokens_per_rank)
    edges = [-(-len(lengths) * rank // ranks) for rank in range(ranks + 1)]
    unbalanced = [float(sum(lengths[start:stop])) for start, stop in pairwise(edges)]
    out = {
        "min": min(unbalanced),
        "max": max(unbalanced),
        "minmax_diff": max(unbalanced) - min(unbalanced),
        "mean": sum(unbalanced) / ranks,
    }
    if any(tokens_per_rank):
        out["balanced_min"], out["balanced_max"] = min(tokens_per_rank), max(tokens_per_rank)
    return {f"global_seqlen/{name}": value for name, value in out.items()}


def prompt_and_response_lengths(batch: Batch) -> tuple[Tensor, Tensor]:
    """(N,) tokens before the first sampled one, and from it to the end (tool tokens included)."""
    starts, lengths = batch.cu_seqlens[:-1], batch.lengths
    sampled = batch["loss_mask"].nonzero().squeeze(1)
    batch_end = sampled.new_tensor([batch.num_tokens])
    first = torch.cat([sampled, batch_end])[torch.searchsorted(sampled, starts)]  # may lie in a later sequence
    prompt = torch.minimum(first - starts, lengths)
    return prompt, lengths - prompt


def mean_max_min(name: str, values: Tensor) -> dict[str, float]:
    """`name`/mean, /max, /min; empty without values."""
    if values.numel() == 0:
        return {}
    values = values.double()
    low, high = torch.aminmax(values)
    return {f"{name}/mean": float(values.mean()), f"{name}/max": float(high), f"{name}/min": float(low)}


def turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """{num_turns, tool_call_counts, timing_s/agent_loop/…}/{min,max,mean}; the last two for agent loops only. And
    tool_errors/<tool>, the calls whose tool failed."""
    turns = [float(t.num_turns) for t in trajectories]
    calls = [float(len(t.tool_rewards)) for t in trajectories if t.tool_rewards is not None]
    out = mean_max_min("num_turns", torch.tensor(turns)) | mean_max_min("tool_call_counts", torch.tensor(calls))
    failed = Counter(f"tool_errors/{name}" for t in trajectories for name, _ in t.tool_errors)
    out |= {name: float(count) for name, count in failed.items()}
    seconds = [t.loop_timings for t in trajectories if t.loop_timings is not None]
    for name in dict.fromkeys(name for timings in seconds for name in timings):
        values = torch.tensor([float(timings[name]) for timings in seconds if name in timings])
        out |= mean_max_min(f"timing_s/agent_loop/{name}", values)
    return out


def mismatch_metrics(batch: Batch, trainer_logprobs: Tensor) -> dict[str, float]:
    """How far the rollout's log-probs are from the trainer's for the same weights, over sampled tokens.

    Probabilities: training/rollout_probs_diff_{max,mean,std} and their Pearson correlation. Log-probs (nats):
    KL(rollout || trainer) by k1 and k3, chi-squared of tokens and of whole sequences, and perplexities of sequences.
    """
    mask = batch["loss_mask"]
    rollout, trainer = batch["rollout_logprobs"][mask].double(), trainer_logprobs[mask].double()
    if rollout.numel() == 0:
        return {"training/rollout_probs_diff_valid": 0.0}
    difference = (rollout.exp() - trainer.exp()).abs()
    out = {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_std": float(difference.std(unbiased=False)),
    }
    pair = torch.stack([rollout.exp(), trainer.exp()])
    if rollout.numel() > 1 and bool((pair.std(dim=1) > LOG_PROB_FLOOR).all()):
        out["training/rollout_actor_probs_pearson_corr"] = float(torch.corrcoef(pair)[0, 1])
    log_ratio = trainer - rollout
    out["rollout_corr/kl"] = float(-log_ratio.mean())
    out["rollout_corr/k3_kl"] = float((log_ratio.exp() - 1 - log_ratio).mean())
    limited = limited_log_ratio(trainer_logprobs, batch["rollout_logprobs"]).double().masked_fill(~mask, 0.0)
    sums = batch.sum_per_sequence(limited)[batch.sum_per_sequence(mask.long()) > 0]
    out["rollout_corr/chi2_token"] = float((2 * limited[mask]).exp().mean() - 1)
    out["rollout_corr/chi2_seq"] = float((2 * sums.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).exp().mean() - 1)
    out.update(_perplexities(batch, trainer_logprobs))
    return out


def off_policy_metrics(batch: Batch, current_logprobs: Tensor, version: int) -> dict[str, float]:
    """Two ratios apart, over sampled tokens: rollout against trainer at one version, and version against version.

    `current_logprobs` (T,) nats are the trainer's at `version`. Answers of that version alone give `mismatch_metrics`;
    all others compare their `old_logprobs`, of the version that sampled them, with it: KL by k1 and k3, nats.
    """
    fresh = batch["policy_versions"][:, 0] == version
    out: dict[str, float] = {}
    if bool(fresh.any()):
        kept = fresh[batch.sequence_ids()]
        out |= mismatch_metrics(batch.select(fresh.nonzero().squeeze(1)), current_logprobs[kept])
    return out | staleness_metrics(batch, current_logprobs, version)


def staleness_metrics(batch: Batch, current_logprobs: Tensor, version: int) -> dict[str, float]:
    """Version against version, over the sampled tokens of answers that are not of `version` alone: KL by k1 and k3, in
    nats, of their `old_logprobs` and `current_logprobs` (T,), the trainer's at `version`."""
    stale = batch["loss_mask"] & (batch["policy_versions"][:, 0] != version)[batch.sequence_ids()]
    if not bool(stale.any()):
        return {}
    log_ratio = (current_logprobs - batch["old_logprobs"])[stale].double()
    return {
        "training/off_policy/staleness_kl": float(-log_ratio.mean()),
        "training/off_policy/staleness_k3_kl": float((log_ratio.exp() - 1 - log_ratio).mean()),
        "training/off_policy/staleness_ratio_max": float(log_ratio.abs().max().exp()),
    }


def _perplexities(batch: Batch, trainer_logprobs: Tensor) -> dict[str, float]:
    mask = batch["loss_mask"]
    count = batch.sum_per_sequence(mask.double())
    has_sampled = count > 0

    def mean_logprob(logprobs: Tensor) -> Tensor:
        return (batch.sum_per_sequence(torch.where(mask, logprobs.double(), 0.0)) / count.clamp(min=1))[has_sampled]

    rollout, trainer = mean_logprob(batch["rollout_logprobs"]), mean_logprob(trainer_logprobs)
    difference = rollout - trainer
    return {
        "rollout_corr/training_ppl": float((-trainer).exp().mean()),
        "rollout_corr/rollout_ppl": float((-rollout).exp().mean()),
        "rollout_corr/training_log_ppl": float(-trainer.mean()),
        "rollout_corr/rollout_log_ppl": float(-rollout.mean()),
        "rollout_corr/log_ppl_diff": float(difference.mean()),
        "rollout_corr/log_ppl_abs_diff": float(difference.abs().mean()),
        "rollout_corr/log_ppl_diff_max": float(difference.max()),
        "rollout_corr/log_ppl_diff_min": float(difference.min()),
        "rollout_corr/ppl_ratio": float(difference.exp().mean()),
    }
