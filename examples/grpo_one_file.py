"""GRPO in one file: plain torch and transformers, padded tensors, every formula written out. Read it top to bottom.

    python examples/grpo_one_file.py

trains a tiny random Llama to count down ("start 5" -> "4 3 2 1 0 stop") and prints the reward rising, in less than
a minute on a CPU. It is also the oracle of the library's tests: slow, naive, and independent of `verl`.

Legend: P prompts, G samples of each (a group), B = P * G sequences, L tokens of the longest, V vocabulary.
Column t of every (B, L) tensor is about token t; `mask` is True on the sampled tokens.

Papers: PPO 1707.06347 · dual clip 1912.09729 · GRPO 2402.03300 · DAPO 2503.14476 (clip-higher, token mean) · Dr.GRPO
2503.20783 (no std, constant length).
"""

import argparse
import copy
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

START, STOP, PAD = 10, 11, 12  # tokens 0..9 are the digits
VOCABULARY = 13


@dataclass(frozen=True)
class Settings:
    """Everything the loss and the update depend on."""

    clip_low: float = 0.2
    clip_high: float = 0.28  # DAPO "clip-higher", eq. 10
    clip_dual: float = 3.0  # 1912.09729, c in eq. 5
    entropy_coeff: float = 0.03
    kl_coeff: float = 0.0  # weight of KL(policy || reference) in the loss
    kl_estimator: str = "k3"
    aggregation: str = "token-mean"
    max_length: int = 12  # only for seq-mean-token-sum-norm
    divide_by_std: bool = True
    temperature: float = 1.0
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0


# ---------------------------------------------------------------------------------------------------- the task


def countdown_prompts(num_prompts: int, generator: torch.Generator) -> Tensor:
    """(P, 2) "start digit"."""
    digits = torch.randint(0, 10, (num_prompts,), generator=generator)
    return torch.stack([torch.full_like(digits, START), digits], dim=1)


def countdown_reward(prompt: list[int], answer: list[int]) -> float:
    """Share of tokens that are one less than the previous one (stop after 0); 1.0 only for the exact countdown."""
    steps = zip([prompt[-1], *answer], answer, strict=False)
    hits = sum(after == (before - 1 if 1 <= before <= 9 else STOP) for before, after in steps)
    return hits / max(len(answer), prompt[-1] + 1)


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.1,  # large enough for a model this small to distinguish its inputs
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=STOP,
    )
    return LlamaForCausalLM(config)


# ---------------------------------------------------------------------------------------------------- sampling


@torch.no_grad()
def sample(
    model: torch.nn.Module, prompts: Tensor, max_new: int, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(B, L) tokens and mask of one answer per row of `prompts`; the whole prefix runs for every token."""
    tokens, mask = prompts, torch.zeros_like(prompts, dtype=torch.bool)
    running = torch.ones(len(prompts), 1, dtype=torch.bool)
    for _ in range(max_new):
        logits = model(input_ids=tokens).logits[:, -1] / temperature  # (B, V)
        chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, torch.where(running, chosen, PAD)], dim=1)
        mask = torch.cat([mask, running], dim=1)
        running = running & (chosen != STOP)
        if not running.any():
            break
    return tokens, mask


# ---------------------------------------------------------------------------------------------------- the maths


def group_advantages(rewards: Tensor, divide_by_std: bool) -> Tensor:
    """(P, G) rewards -> (P, G) advantages. GRPO §4.1.2; without the division Dr.GRPO."""
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    return advantages / (rewards.std(dim=1, keepdim=True) + 1e-6) if divide_by_std else advantages


def token_logprobs(model: torch.nn.Module, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(B, L) log p(token t | tokens before t) and entropy (nats) of the distribution token t is drawn from.

    Rows are padded on the right, where causal attention never looks. Both are 0 for the first token (it has no prefix).
    """
    logits = model(input_ids=tokens).logits[:, :-1] / temperature  # (B, L-1, V): logits at t-1 predict token t
    log_p = logits - logits.logsumexp(dim=-1, keepdim=True)
    chosen = log_p.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    first = torch.zeros_like(chosen[:, :1])
    return torch.cat([first, chosen], dim=1), torch.cat([first, entropy], dim=1)


def dual_clip_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, s: Settings) -> Tensor:
    """(B, L) losses: -min(r A, clip(r) A) (PPO eq. 7), at least c A where A < 0 (dual clip eq. 5)."""
    ratio = (logprobs - old_logprobs).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - s.clip_low, 1 + s.clip_high) * advantages)
    bounded = torch.maximum(objective, s.clip_dual * advantages)
    return -torch.where(advantages < 0, bounded, objective)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, name: str) -> Tensor:
    """(B, L) estimates of KL(policy || reference); k3 is GRPO eq. 4."""
    log_ratio = ref_logprobs - logprobs
    return {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": log_ratio.exp() - log_ratio - 1}[name]


def aggregate(losses: Tensor, mask: Tensor, mode: str, max_length: int) -> Tensor:
    """One number from the (B, L) losses of the whole mini-batch."""
    rows = [row[m] for row, m in zip(losses, mask, strict=True) if m.any()]
    if mode == "token-mean":  # DAPO §3.3
        return torch.cat(rows).mean()
    if mode == "token-sum":
        return torch.cat(rows).sum()
    per_sequence = {
        "seq-mean-token-sum": lambda row: row.sum(),
        "seq-mean-token-mean": lambda row: row.mean(),  # GRPO eq. 3
        "seq-mean-token-sum-norm": lambda row: row.sum() / max_length,  # Dr.GRPO
    }[mode]
    return torch.stack([per_sequence(row) for row in rows]).mean()


def grpo_loss(
    model: torch.nn.Module,
    tokens: Tensor,
    mask: Tensor,
    advantages: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    s: Settings,
) -> Tensor:
    """The loss of one mini-batch. `advantages` (B,) or (B, L); the other tensors (B, L)."""
    logprobs, entropy = token_logprobs(model, tokens, s.temperature)
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(logprobs)
    losses = dual_clip_loss(logprobs, old_logprobs, advantages, s) - s.entropy_coeff * entropy
    if ref_logprobs is not None:
        losses = losses + s.kl_coeff * kl_estimate(logprobs, ref_logprobs, s.kl_estimator)
    return aggregate(losses, mask, s.aggregation, s.max_length)


def grpo_gradient(model: torch.nn.Module, *inputs: Tensor | None, s: Settings) -> dict[str, Tensor]:
    """The gradient of `grpo_loss(model, *inputs, s)` by parameter name; it also stays in `.grad`."""
    model.zero_grad(set_to_none=True)
    grpo_loss(model, *inputs, s).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def make_optimizer(model: torch.nn.Module, s: Settings) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=s.learning_rate, betas=s.betas, weight_decay=s.weight_decay)


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor | None, s: Settings) -> float:
    """One optimiser step on one mini-batch; returns the gradient norm before clipping."""
    grpo_gradient(model, *inputs, s=s)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.max_grad_norm)
    optimizer.step()
    return float(norm)


# ---------------------------------------------------------------------------------------------------- the loop


def train(steps: int, num_prompts: int, group_size: int, s: Settings, seed: int = 0) -> list[float]:
    """Mean reward of every step."""
    model, generator = tiny_model(seed), torch.Generator().manual_seed(seed)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer, history = make_optimizer(model, s), []
    for step in range(steps):
        prompts = countdown_prompts(num_prompts, generator).repeat_interleave(group_size, dim=0)  # (B, 2)
        tokens, mask = sample(model, prompts, s.max_length, s.temperature, generator)
        pairs = [(row[:2].tolist(), row[m].tolist()) for row, m in zip(tokens, mask, strict=True)]
        rewards = torch.tensor([countdown_reward(prompt, answer) for prompt, answer in pairs])
        advantages = group_advantages(rewards.view(num_prompts, group_size), s.divide_by_std).flatten()
        with torch.no_grad():
            old_logprobs, _ = token_logprobs(model, tokens, s.temperature)
            ref_logprobs = token_logprobs(reference, tokens, s.temperature)[0] if s.kl_coeff else None
        for rows in torch.randperm(len(tokens), generator=generator).chunk(2):  # two updates, so ratios differ from 1
            ref = None if ref_logprobs is None else ref_logprobs[rows]
            update(model, optimizer, tokens[rows], mask[rows], advantages[rows], old_logprobs[rows], ref, s=s)
        history.append(float(rewards.mean()))
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:3d}  reward {history[-1]:.3f}  {'#' * int(50 * history[-1])}", flush=True)
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO on a toy task with a tiny random model")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--kl-coeff", type=float, default=Settings.kl_coeff)
    parser.add_argument("--entropy-coeff", type=float, default=Settings.entropy_coeff)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    settings = Settings(kl_coeff=args.kl_coeff, entropy_coeff=args.entropy_coeff)
    train(args.steps, args.prompts, args.group_size, settings, args.seed)
