"""Models are called after their experiment."""

from pathlib import Path

import pytest

from verl.utils.paths import model_name


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("checkpoints/project/sums/global_step_7/actor/huggingface", "sums-step-7"),
        ("checkpoints/project/sums/global_step_7/actor", "sums-step-7"),
        ("out/global_step_12/huggingface", "out-step-12"),
        ("models/Qwen3-0.6B", "Qwen3-0.6B"),
        ("models/exported/huggingface", "exported"),
    ],
)
def test_a_model_has_the_name_of_its_experiment_or_folder(tmp_path: Path, folder: str, name: str):
    assert model_name(tmp_path / folder) == name
