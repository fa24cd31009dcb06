"""One random mini-batch with many edge cases to compare gradients on; the same seed gives the same batch.

Groups that share a prompt, log-normal lengths, several turns with tool tokens between them, single tokens outside
the loss mask, a sequence with one sampled token and one with none.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from verl.algorithms.advantages import compute_advantages, get_advantage, with_token_rewards
from verl.algorithms.losses import with_chosen_tokens
from verl.commands.certify.plain_gradient import model_outputs, split_sequences
from verl.config import ActorConfig, AlgorithmConfig
from verl.data.batch import Batch
from verl.data.columns import REWARD_PART
from verl.data.trajectory import Trajectory

MAX_TURNS = 3


def random_trajectories(
    num_sequences: int,
    group_size: int,
    longest: int,
    vocab_size: int,
    generator: torch.Generator,
    prompts: Sequence[Sequence[int]] = (),
) -> list[Trajectory]:
    """Trajectories of at most `longest` tokens; they begin with `prompts`, or with random tokens."""

    def tokens(count: int) -> Tensor:
        return torch.randint(0, vocab_size, (count,), generator=generator)

    def length(median: float) -> int:
        return max(1, min(longest, round(median * math.exp(float(torch.randn((), generator=generator))))))

    out: list[Trajectory] = []
    while len(out) < num_sequences:
        group = len(out) // group_size
        prompt_tokens = (
            torch.tensor(prompts[group % len(prompts)]) % vocab_size if prompts else tokens(length(longest / 8))
        )
        prompt = prompt_tokens[-max(1, longest // 2) :]
        for _ in range(min(group_size, num_sequences - len(out))):
            parts, mask = [prompt], [torch.zeros(len(prompt), dtype=torch.bool)]
            for turn in range(1 + int(torch.randint(MAX_TURNS, (), generator=generator))):
                answer = tokens(length(longest / 6))
                tool = tokens(length(2) if turn else 0)  # what a tool returned, before every turn but the first
                parts += [tool, answer]
                uncounted = torch.rand(len(answer), generator=generator) < (0.2 if len(out) % 4 == 1 else 0.0)
                mask += [torch.zeros(len(tool), dtype=torch.bool), ~uncounted]
            token_ids, sampled = torch.cat(parts)[:longest], torch.cat(mask)[:longest]
            limit = {0: len(token_ids), 1: 1, 2: 0}[max(0, len(out) - num_sequences + 3)]  # the last two are special
            sampled &= sampled.cumsum(0) <= limit
            reward = float(torch.randn((), generator=generator))
            out.append(Trajectory(token_ids, sampled, torch.zeros(len(token_ids)), group_id=group, reward=reward))
    return out


def with_loss_columns(
    batch: Batch,
    model: nn.Module,
    algorithm: AlgorithmConfig,
    temperature: float,
    generator: torch.Generator,
    actor: ActorConfig | None = None,
) -> Batch:
    """Adds the losses' inputs: log-probs of an older policy and of a reference, values, advantages and returns.

    And what else the advantage estimator reads, at random, and the tokens that the policy loss of `actor` chooses.

    The older policies are `model` with noise on every log-prob, so that ratios leave the clip range on both sides. A
    value model gets log-probs that are noise alone. All numbers are exact in float32.
    """
    mask, device = batch["loss_mask"], next(model.parameters()).device
    with torch.no_grad():
        outputs = [model_outputs(model, [sequence], temperature)[0] for sequence in split_sequences(batch.to(device))]
    model_columns = {name: torch.cat([out[name] for out in outputs]) for name in outputs[0]}
    zeros = torch.zeros(batch.num_tokens, dtype=torch.float64)

    def noisy(name: str, scale: float) -> Tensor:
        values = model_columns.get(name, zeros).cpu()
        noise = torch.randn(len(values), generator=generator)
        return ((values + scale * noise) * mask).float()

    columns = {name: noisy("logprobs", 0.3) for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")}
    columns["values"] = noisy("values", 0.5)
    if algorithm.rollout_correction.weighs_loss:
        columns["rollout_is_weights"] = torch.rand(batch.num_tokens, generator=generator) * 2 * mask
    batch = with_token_rewards(batch.with_columns(**columns))
    entry, sizes = get_advantage(algorithm.adv_estimator), {True: batch.num_sequences, False: batch.num_tokens}
    for name in (*entry.columns_for(algorithm), *entry.outputs):
        if name not in batch:
            is_reward = name.startswith(REWARD_PART) or name == "reward_baselines"
            batch = batch.with_columns(**{name: torch.rand(sizes[is_reward], generator=generator)})
    batch = compute_advantages(batch, algorithm)
    if actor is None:
        return batch
    at_beginning = {"current_logprobs": noisy("logprobs", 0.1)}
    batch = batch.with_columns(**at_beginning)
    return with_chosen_tokens(batch, actor, torch.rand(batch.num_tokens, generator=generator))
