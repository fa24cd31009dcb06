"""A reward model on ranks gives what `transformers` gives for each sequence alone."""

import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from tests.engine_cases import SHAPE, tiny_qwen3
from tests.reward_models import oracle_scores, save_reward_model
from verl.config import load_config
from verl.runtime.inline import InlineGroup
from verl.workers.rank_workers import RankWorkers
from verl.workers.reward_model import RewardModel

KEY = "reward.reward_model"
FAMILIES = {"qwen3": tiny_qwen3, "llama": lambda: LlamaConfig(**SHAPE)}
TYPES = {"fp64": (torch.float64, 1e-6), "fp32": (torch.float32, 2e-5)}


def sequences(count: int = 14, seed: int = 3) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 60) for _ in range(draw.randrange(1, 40))] for _ in range(count)]


def build(folder: Path, dtype: str, *keys: str) -> RewardModel:
    words = [f"{KEY}.enable=True", f"{KEY}.model_path={folder}", *(f"{KEY}.fsdp_config.{n}={dtype}" for n in
             ("model_dtype", "dtype")), *keys]  # fmt: skip
    config = load_config([*words, f"trainer.default_local_dir={folder / 'run'}"])
    return RewardModel(config, InlineGroup(RankWorkers(config, 1, ("reward_model",))).for_role("reward_model"))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(tmp_path: Path, family: str, dtype: str):
    folder, (kind, tolerance) = save_reward_model(tmp_path / "rm", FAMILIES[family]()), TYPES[dtype]
    asked = sequences()
    found = torch.tensor(build(folder, dtype).scores(asked))
    torch.testing.assert_close(found, torch.tensor(oracle_scores(folder, asked, kind)), rtol=tolerance, atol=tolerance)
    assert found.std() > 0.1


@pytest.mark.parametrize(
    "keys",
    [
        ["forward_micro_batch_size_per_gpu=1"],
        ["forward_micro_batch_size_per_gpu=5"],
        ["use_dynamic_bsz=True", "forward_max_token_len_per_gpu=41"],
        ["forward_max_token_len_per_gpu=97"],
    ],
)
def test_scores_do_not_depend_on_the_micro_batches_or_the_order(tmp_path: Path, keys: list[str]):
    folder, asked = save_reward_model(tmp_path / "rm", tiny_qwen3()), sequences()
    whole = build(folder, "fp64").scores(asked)
    model = build(folder, "fp64", *(f"{KEY}.{key}" for key in keys))
    assert model.scores(asked) == pytest.approx(whole, abs=1e-6)
    assert model.scores(asked[::-1])[::-1] == pytest.approx(whole, abs=1e-6)
    assert [model.scores([ids])[0] for ids in asked] == pytest.approx(whole, abs=1e-6)


def test_answers_to_one_prompt_have_it_computed_once_and_score_the_same(tmp_path: Path):
    folder, draw = save_reward_model(tmp_path / "rm", tiny_qwen3()), random.Random(5)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, 60) for _ in range(count)]

    asked = [prompt + ids(n) for prompt in (ids(20), ids(7), ids(30)) for n in (3, 1, 6)] + [[5], [5]]
    draw.shuffle(asked)
    model = build(folder, "fp64")
    found = torch.tensor(model.scores(asked))
    torch.testing.assert_close(found, torch.tensor(oracle_scores(folder, asked)), rtol=1e-6, atol=1e-6)
    assert model.dispatcher.shares_prompts
