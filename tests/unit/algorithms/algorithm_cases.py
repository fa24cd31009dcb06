"""Random packed batches for the tests of verl.algorithms, with several turns and sequences nobody sampled from."""

import itertools

import torch

from verl.data.batch import Batch, cumulative_lengths

MASKS = (  # one string per sequence: p prompt or tool token, s sampled token
    "pps",
    "ppsssspppsss",
    "pppp",
    "psssssssp",
    "pssspsp",
    "ppppsssss",
)
GROUPS = (7, 7, 3, 3, 3, 5)


def random_batch(seed: int = 0, dtype: torch.dtype = torch.float64, masks: tuple[str, ...] = MASKS) -> Batch:
    """Every column an algorithm reads, random where tokens were sampled and 0 elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([c == "s" for c in "".join(masks)])
    num_tokens, num_sequences = len(mask), len(masks)

    def column(scale: float = 1.0) -> torch.Tensor:
        return torch.randn(num_tokens, generator=generator, dtype=dtype) * scale * mask

    return Batch(
        cumulative_lengths(torch.tensor([len(m) for m in masks])),
        {
            "tokens": torch.randint(0, 50, (num_tokens,), generator=generator),
            "loss_mask": mask,
            "rollout_logprobs": column(),
            "old_logprobs": column(),
            "ref_logprobs": column(),
            "advantages": column(),
            "values": column(),
            "returns": column(),
        },
        {
            "rewards": torch.randn(num_sequences, generator=generator, dtype=dtype),
            "group_ids": torch.tensor([GROUPS[i % len(GROUPS)] for i in range(num_sequences)]),
        },
    )


def column_by_sequence(batch: Batch, name: str) -> list[list[float]]:
    """A token column as one list per sequence."""
    bounds = batch.cu_seqlens.tolist()
    return [batch[name][a:b].tolist() for a, b in itertools.pairwise(bounds)]
