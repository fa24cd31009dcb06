"""Sequences of a batch that begin with the same prompt: their groups and the lengths of their prompts."""

import torch

from verl.data.batch import Batch


def prompt_groups(batch: Batch) -> list[list[int]]:
    """Groups of sequences with the same prompt (tokens before the first sampled one), in order of appearance."""
    tokens = batch["tokens"].cpu().numpy()
    groups: dict[bytes, list[int]] = {}
    for i, (start, length) in enumerate(zip(batch.cu_seqlens[:-1].tolist(), prompt_lengths(batch), strict=True)):
        groups.setdefault(tokens[start : start + length].tobytes(), []).append(i)
    return list(groups.values())


def prompt_lengths(batch: Batch) -> list[int]:
    """Number of tokens before the first sampled one, per sequence; its length if nothing was sampled."""
    first_sampled = torch.where(batch["loss_mask"].cpu(), batch.position_ids().cpu(), batch.num_tokens)
    lengths = batch.lengths.cpu()
    return lengths.scatter_reduce(0, batch.sequence_ids().cpu(), first_sampled, "amin").tolist()


def repeated_prompt_lengths(batch: Batch) -> list[int]:
    """Prompt lengths of the sequences whose prompt is that of an earlier sequence."""
    lengths = prompt_lengths(batch)
    return [lengths[i] for group in prompt_groups(batch) for i in group[1:]]


def common_prefix(batch: Batch, members: list[int]) -> int:
    """Length of the common prefix of the sequences `members`: the prompt, and possibly more tokens."""
    starts, shortest = batch.cu_seqlens.tolist(), int(batch.lengths[members].min())
    rows = torch.stack([batch["tokens"][starts[i] : starts[i] + shortest] for i in members])
    return int((rows == rows[0]).all(0).long().cumprod(0).sum())
