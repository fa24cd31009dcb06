"""Sequences that begin with the same prompt: which they are, and micro-batches that keep them together."""

import torch

from verl.data.batch import Batch


def prompt_groups(batch: Batch) -> list[list[int]]:
    """Sequences with the same tokens before the first sampled one, groups in order of first appearance."""
    tokens = batch["tokens"].cpu().numpy()
    groups: dict[bytes, list[int]] = {}
    for i, (start, length) in enumerate(zip(batch.cu_seqlens[:-1].tolist(), prompt_lengths(batch), strict=True)):
        groups.setdefault(tokens[start : start + length].tobytes(), []).append(i)
    return list(groups.values())


def prompt_lengths(batch: Batch) -> list[int]:
    """Tokens before the first sampled one; all of them where nothing was sampled."""
    place = torch.where(batch["loss_mask"].cpu(), batch.position_ids().cpu(), batch.num_tokens)
    lengths = batch.lengths.cpu()
    return lengths.scatter_reduce(0, batch.sequence_ids().cpu(), place, "amin").tolist()


def repeated_prompt_lengths(batch: Batch) -> list[int]:
    """Length of the prompt of every sequence that begins with the prompt of an earlier one."""
    lengths = prompt_lengths(batch)
    return [lengths[i] for group in prompt_groups(batch) for i in group[1:]]


def common_prefix(batch: Batch, members: list[int]) -> int:
    """How many tokens the sequences have in common from their start: the prompt, and perhaps more."""
    starts, shortest = batch.cu_seqlens.tolist(), int(batch.lengths[members].min())
    rows = torch.stack([batch["tokens"][starts[i] : starts[i] + shortest] for i in members])
    return int((rows == rows[0]).all(0).long().cumprod(0).sum())
