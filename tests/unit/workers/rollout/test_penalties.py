"""Penalties and the most likely tokens, against their definitions."""

import pytest
import torch

from verl.workers.rollout.base import SamplingParams
from verl.workers.rollout.native.sampling import add_bias, most_likely, penalise


@pytest.mark.parametrize(
    ("presence", "frequency", "repetition"), [(0.5, 0, 1), (0, 1.5, 1), (0, 0, 2), (-1, 0.25, 1.3)]
)
def test_penalties_are_the_definition_token_by_token(presence: float, frequency: float, repetition: float):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(10, generator=generator)
    prompt, generated = [1, 1, 2], [3, 2, 3, 3]
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition)
    expected = []
    for token, value in enumerate(logits.tolist()):
        if token in prompt + generated:
            value = value / repetition if value > 0 else value * repetition
        expected.append(value - presence * (token in generated) - frequency * generated.count(token))
    assert params.has_penalties
    penalise(logits, torch.tensor(prompt), torch.tensor(generated), params)
    torch.testing.assert_close(logits, torch.tensor(expected))


def test_a_bias_is_added_to_the_logits_of_its_tokens_alone():
    logits = torch.arange(6.0)
    params = SamplingParams(logit_bias=((4, -2.5), (0, 100.0)))
    assert params.changes_logits and not params.has_penalties
    add_bias(logits, params)
    assert logits.tolist() == [100.0, 1.0, 2.0, 3.0, 1.5, 5.0]


def test_the_most_likely_tokens_are_those_of_the_softmax_at_the_temperature():
    logits = torch.tensor([0.0, 3.0, -1.0, 2.0])
    probabilities = torch.softmax(logits.double() / 0.7, -1)
    best = most_likely(logits, 0.7, 3)
    assert [token for token, _ in best] == [1, 3, 0]
    assert [value for _, value in best] == pytest.approx(probabilities.log()[[1, 3, 0]].tolist(), abs=1e-5)
    assert len(most_likely(logits, 1.0, 20)) == 4
