"""vLLM's log-probs as the trainer computes them: of the whole vocabulary, at the sampling temperature.

Its own `processed_logprobs` are those of the distribution that is sampled, without the tokens that top-p, top-k, min-p
or min_tokens forbid and with penalties; its `raw_logprobs` know no temperature. Both of its samplers are changed, in
every process that imports this module.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.sampler import Sampler

MODE, LEAST_TEMPERATURE = "processed_logprobs", 1e-5  # below it vLLM is greedy


def _forward(self: Any, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
    self.policy_logprobs = None
    if self.logprobs_mode == MODE and sampling_metadata.max_num_logprobs is not None:
        temperature, policy = sampling_metadata.temperature, logits.float()
        if temperature is not None:  # some row is not greedy
            policy = policy / temperature.where(temperature >= LEAST_TEMPERATURE, 1.0).unsqueeze(1)
        self.policy_logprobs = policy.log_softmax(-1)
    return _FORWARD(self, logits, sampling_metadata, *args, **kwargs)


def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
    tokens, logprobs = _SAMPLE(self, *args, **kwargs)
    return tokens, logprobs if self.policy_logprobs is None else self.policy_logprobs


def _sample_on_gpu(self: Any, logits: Tensor, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
    """For the sampler of its newer model runner, which takes log-probs of the logits that `sample` returns."""
    policy = logits.to(torch.float32, copy=True)  # the logits may be overwritten
    tokens, processed = _SAMPLE_ON_GPU(self, logits, rows, *args, **kwargs)
    if self.logprobs_mode != MODE or self.return_sampling_mask:
        return tokens, processed
    self.sampling_states.apply_temperature(policy, rows, args[1])
    return tokens, policy


_FORWARD, _SAMPLE = Sampler.forward, Sampler.sample
Sampler.forward, Sampler.sample = _forward, _sample
try:
    from vllm.v1.worker.gpu.sample.sampler import Sampler as GPUSampler

    _SAMPLE_ON_GPU = GPUSampler.sample
    GPUSampler.sample = _sample_on_gpu
except ImportError:  # a version or a platform without it
    pass
