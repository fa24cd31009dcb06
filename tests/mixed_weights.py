"""The oracle of `kv_cache_on_publish=keep_kv`: what an answer is when its weights change and its KV cache stays."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


def mixed_logprobs(
    models: Mapping[int, PreTrainedModel], prompt: list[int], answer: list[int], segments: Sequence[Sequence[int]]
) -> Tensor:
    """(L,) float64 nats: the log-prob of each token of `answer`, where version v of `segments` (v, tokens that it
    sampled) read all tokens, except the newest, that were there before it sampled. `models` are float64, by version."""
    tokens, cache, logprobs = prompt + answer, DynamicCache(), []
    read, end = 0, len(prompt)
    for version, count in segments:
        end += count
        with torch.no_grad():
            logits = models[version](torch.tensor([tokens[read : end - 1]]), past_key_values=cache).logits[0, -count:]
        sampled = torch.tensor(tokens[end - count : end])
        logprobs.append(logits.log_softmax(-1).gather(1, sampled[:, None])[:, 0])
        read = end - 1
    return torch.cat(logprobs)
