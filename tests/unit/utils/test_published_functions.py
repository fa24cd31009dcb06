"""Functions of published code, called as that code calls them, against NumPy in float64 and plain Python."""

import asyncio
import os
import threading

import numpy as np
import pytest
import torch

from tests.rollout_adapters import letters_tokenizer
from verl.config import RunConfig
from verl.trainer.main_ppo import run_ppo
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.errors import ConfigError
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import (
    append_to_dict,
    list_of_dict_to_dict_of_list,
    temp_env_var,
    timeout_limit,
    union_two_dict,
)
from verl.utils.ray_utils import get_event_loop
from verl.utils.torch_functional import (
    clip_by_value,
    entropy_from_logits,
    get_response_mask,
    logprobs_from_logits,
    masked_mean,
    masked_sum,
    masked_var,
    masked_whiten,
    pad_sequence_to_length,
)

torch.manual_seed(0)
MASK = torch.rand(5, 7) < 0.6
VALUES = torch.where(MASK, torch.randn(5, 7, dtype=torch.float64), torch.nan)
KEPT = VALUES[MASK].numpy()


def test_sums_means_and_variances_look_inside_the_mask_only():
    rows = np.array([np.sum(row[kept]) for row, kept in zip(VALUES.numpy(), MASK.numpy(), strict=True)])
    np.testing.assert_allclose(masked_sum(VALUES, MASK, axis=-1), rows)
    np.testing.assert_allclose(masked_mean(VALUES, MASK, axis=-1), rows / (MASK.sum(-1).numpy() + 1e-8))
    np.testing.assert_allclose(masked_sum(VALUES, MASK.float()), KEPT.sum())
    np.testing.assert_allclose(masked_mean(VALUES, MASK), KEPT.mean(), rtol=1e-7)
    np.testing.assert_allclose(masked_var(VALUES, MASK), KEPT.var(ddof=1), rtol=1e-6)
    np.testing.assert_allclose(masked_var(VALUES, MASK, unbiased=False), KEPT.var(), rtol=1e-6)
    assert masked_mean(VALUES, torch.zeros_like(MASK)) == 0


@pytest.mark.parametrize("count", [0, 1])
def test_the_variance_of_fewer_than_two_values_is_an_error(count: int):
    with pytest.raises(ValueError, match=f"mask's sum is {count}"):
        masked_var(torch.ones(3), torch.arange(3) < count)


def test_whitened_values_have_the_mean_and_variance_that_were_asked_for():
    for shift_mean, mean in ((True, 0.0), (False, KEPT.mean())):
        found = masked_whiten(VALUES, MASK, shift_mean=shift_mean)[MASK].numpy()
        np.testing.assert_allclose([found.mean(), found.std(ddof=1)], [mean, 1.0], atol=1e-6)


def test_log_probs_and_entropy_are_those_of_the_softmax():
    logits, labels = 4 * torch.randn(2, 3, 11, dtype=torch.float64), torch.randint(0, 11, (2, 3))
    p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(-1, keepdims=True)
    chosen = np.take_along_axis(np.log(p), labels.numpy()[..., None], -1)[..., 0]
    np.testing.assert_allclose(logprobs_from_logits(logits, labels), chosen)
    np.testing.assert_allclose(
        logprobs_from_logits(logits.bfloat16(), labels, inplace_backward=False), chosen, atol=0.1
    )
    np.testing.assert_allclose(entropy_from_logits(logits), -(p * np.log(p)).sum(-1))
    masked = torch.tensor([0.0, 0.0, -torch.inf])
    np.testing.assert_allclose(entropy_from_logits(masked), np.log(2), rtol=1e-6)


def test_values_are_clipped_by_tensors_and_sequences_are_padded_and_cut_at_their_end():
    x, low, high = torch.tensor([-3.0, 0.5, 3.0]), torch.full((3,), -1.0), torch.tensor([1.0, 1.0, 2.0])
    assert clip_by_value(x, low, high).tolist() == [-1.0, 0.5, 2.0]
    ids = torch.tensor([[5, 2, 7, 2], [5, 6, 7, 8], [9, 5, 5, 5]])
    assert get_response_mask(ids).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    assert get_response_mask(ids, eos_token=[2, 9], dtype=torch.bool).sum(-1).tolist() == [2, 4, 1]
    assert pad_sequence_to_length(ids[:1], 6, 0).tolist() == [[5, 2, 7, 2, 0, 0]]
    assert pad_sequence_to_length(ids[:1], 6, 1, left_pad=True).tolist() == [[1, 1, 5, 2, 7, 2]]
    assert pad_sequence_to_length(ids, 3, 0) is ids or torch.equal(pad_sequence_to_length(ids, 3, 0), ids)


def test_metrics_are_reduced_by_their_names():
    found = reduce_metrics({"actor/loss": [1.0, 2.0, 6.0], "length/max": [1, 5], "length/min": [4, 2]})
    assert found == {"actor/loss": 3.0, "length/max": 5, "length/min": 2}


def test_dictionaries_are_appended_joined_and_turned_round():
    data: dict = {"a/x": [1]}
    append_to_dict(data, {"x": 2, "a/y": 3}, prefix="a/")
    append_to_dict(data, {"z": [4]})
    assert data == {"a/x": [1, 2], "a/y": [3], "z": [[4]]}
    assert union_two_dict({"a": 1}, {"a": 1, "b": 2}) == {"a": 1, "b": 2}
    with pytest.raises(ValueError, match="'a' is 1 in one and 2 in the other"):
        union_two_dict({"a": 1}, {"a": 2})
    assert list_of_dict_to_dict_of_list([{"a": 1, "b": 2}, {"b": 3, "a": 4}]) == {"a": [1, 4], "b": [2, 3]}
    assert list_of_dict_to_dict_of_list([]) == {}
    with pytest.raises(ValueError, match="differ"):
        list_of_dict_to_dict_of_list([{"a": 1}, {"a": 1, "b": 2}])


def test_a_variable_is_set_in_the_block_and_back_after_an_error():
    for before in (None, "old"):
        os.environ.update({} if before is None else {"OF_A_TEST": before})
        with pytest.raises(KeyError), temp_env_var("OF_A_TEST", "new"):
            assert os.environ["OF_A_TEST"] == "new"
            raise KeyError
        assert os.environ.get("OF_A_TEST") == before
    del os.environ["OF_A_TEST"]


def test_a_call_that_takes_too_long_is_a_timeout_in_any_thread_and_another_keeps_its_outcome():
    ends = threading.Event()

    @timeout_limit(seconds=0.05)
    def waits(forever: bool, value: int = 3) -> int:
        if forever:
            ends.wait(60)
        if value < 0:
            raise LookupError("mine")
        return value

    async def inside_a_loop() -> int:
        return waits(False, value=7)

    assert waits(False) == 3 and asyncio.run(inside_a_loop()) == 7
    with pytest.raises(TimeoutError, match=r"waits took longer than 0\.05 seconds"):
        waits(True)
    with pytest.raises(LookupError, match="mine"):
        waits(False, value=-1)
    ends.set()


def test_the_event_loop_is_the_running_one_or_a_new_current_one():
    async def running() -> bool:
        return get_event_loop() is asyncio.get_running_loop()

    assert asyncio.run(running())
    loop = get_event_loop()
    assert (
        loop.run_until_complete(asyncio.sleep(0, 5)) == 5 and asyncio.get_event_loop_policy().get_event_loop() is loop
    )
    loop.close()
    asyncio.set_event_loop(None)


def test_a_tokenizer_comes_from_a_folder_with_a_padding_token_and_without_its_code(tmp_path, caplog):
    tokenizer = letters_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    assert hf_tokenizer(str(tmp_path), correct_pad_token=False, correct_gemma2=False).pad_token is None
    loaded = hf_tokenizer(tmp_path, padding_side="left", trust_remote_code=True)
    assert loaded.pad_token == loaded.eos_token == "<eos>" and loaded.padding_side == "left"
    assert "trust_remote_code=True has no effect" in caplog.text
    assert hf_processor(tmp_path, use_fast=True) is None  # a text model
    with pytest.raises(ConfigError, match="is not a folder"):
        hf_tokenizer("nowhere")


def test_gemma_2_ends_at_the_end_of_its_turn(tmp_path):
    tokenizer = letters_tokenizer()
    tokenizer.add_tokens(["<end_of_turn>"])
    tokenizer.save_pretrained(folder := tmp_path / "gemma-2-2b-it")
    assert hf_tokenizer(folder).eos_token == "<end_of_turn>"
    assert hf_tokenizer(folder, correct_gemma2=False).eos_token == "<eos>"


@pytest.mark.parametrize(
    ("given", "said"),
    [(({"trainer": {}}, {}), "got a dict"), ((RunConfig(), {"task_runner_class": object}), "task_runner_class")],
    ids=["another configuration", "a task runner"],
)
def test_run_ppo_says_what_to_write_instead_of_what_another_program_gives_it(given, said: str):
    with pytest.raises(ConfigError, match=rf"{said}: run_ppo\(verl\.config\.load_config\(overrides\)\) trains"):
        run_ppo(given[0], **given[1])
