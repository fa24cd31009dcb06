"""What a teacher takes from the settings of its student, and what not."""

from pathlib import Path

import pytest

from tests.engine_cases import save_tiny_model, tiny_qwen3
from verl.config import load_config
from verl.config.distillation import Teacher
from verl.utils.errors import ConfigError
from verl.workers.teacher import build_teacher_worker, check_same_vocabulary, check_topk, teacher_model

TEACHER = Teacher("big", "teachers/big", None, None)
MODEL = "actor_rollout_ref.model"


def test_a_teacher_is_its_own_folder_without_the_students_adapters_tokenizer_and_changes():
    student = (
        "path=student",
        "lora_rank=8",
        "lora_adapter_path=adapters",
        "hf_config_path=other",
        "tokenizer_path=tokens",
        "use_liger=True",
    )
    override = [f"+{MODEL}.override_config.{key}" for key in ("init_random=true", "num_hidden_layers=1")]
    override.append(f"+{MODEL}.override_config.attn_implementation=sdpa")
    config = load_config([*(f"{MODEL}.{key}" for key in student), *override])
    model = teacher_model(config, TEACHER)
    assert (model.path, model.lora_rank, model.lora_adapter_path) == ("teachers/big", 0, None)
    assert (model.hf_config_path, model.tokenizer_path) == (None, None)
    assert model.override_config == {"attn_implementation": "sdpa"} and model.use_liger


def test_the_smaller_vocabulary_bounds_topk(tmp_path):
    small, large = (
        save_tiny_model(tmp_path / name, tiny_qwen3(vocab_size=size)) for name, size in (("s", 40), ("l", 50))
    )
    for student, folder in ((small, large), (large, small)):
        keys = (f"{MODEL}.path={student}", "distillation.distillation_loss.topk")
        teacher = Teacher("one", str(folder), None, None)
        check_topk(load_config([keys[0], f"{keys[1]}=40"]), teacher)
        with pytest.raises(ConfigError, match=r"topk=41 is more than the 40 tokens"):
            check_topk(load_config([keys[0], f"{keys[1]}=41"]), teacher)


def test_the_most_likely_tokens_are_ids_of_the_policy(tmp_path: Path):
    student, padded = (
        save_tiny_model(tmp_path / name, tiny_qwen3(vocab_size=size)) for name, size in (("s", 40), ("t", 64))
    )
    keys = [f"{MODEL}.path={student}", "distillation.enabled=True", "distillation.distillation_loss.topk=7"]
    config = load_config([*keys, f"distillation.teacher_models.teacher_model.model_path={padded}"])
    top = build_teacher_worker(config, "teacher_model").engine.top
    assert (top.k, top.num_ids) == (7, 40)


def test_every_token_has_the_same_id_in_both_tokenizers():
    student = {"a": 0, "b": 1}
    check_same_vocabulary(student, {"b": 1, "a": 0}, TEACHER)
    for other, said in (
        ({"a": 1, "b": 0}, "2 tokens differ, first 'a', id 1 and not 0"),
        ({"a": 0}, "1 tokens differ, first 'b', id None and not 1"),
        ({"a": 0, "b": 1, "c": 2}, "1 tokens differ, first 'c', id 2 and not None"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_same_vocabulary(student, other, TEACHER)
