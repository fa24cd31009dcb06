"""Adapters that cannot be trained are refused with what to write instead."""

import peft
import pytest

from tests.engine_cases import build_engine, save_tiny_model
from verl.utils.errors import CheckpointError, ConfigError

LORA = {"lora_rank": 4, "lora_alpha": 10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": "nowhere"}, "no LoRA with model.target_modules='nowhere'"),
        ({"target_modules": ["q_proj", "v_porj"]}, "target_modules names 'v_porj', .* did you mean 'v_proj'"),
        ({"exclude_modules": ["nowhere"]}, "exclude_modules names 'nowhere', which is no linear layer; known: down_p"),
        ({"exclude_modules": ["self_attn"]}, "exclude_modules names 'self_attn', which is no linear layer"),
        (
            {"exclude_modules": "k_proj"},
            r"'k_proj' matches the whole path of no linear layer, as 'model\.",
        ),
        ({"target_modules": ".*("}, r"target_modules='\.\*\(' is no regular expression"),
        ({"target_modules": ["q_proj", "lm_head"]}, "adapters of lm_head; only linear layers below the head"),
        ({"target_modules": ["embed_tokens"]}, "adapters of model.embed_tokens; only linear"),
        ({"lora_rank": 10**9}, r"lora_rank=1000000000 makes adapters of \d+ GiB .*; at most \d+ would fit"),
        ({"lora_rank": 10**9, "target_modules": ".*q_proj"}, r"lora_rank=1000000000 makes adapters of \d+ GiB"),
        ({"lora_adapter_path": "nowhere"}, "nowhere has no adapter_config.json and no adapter_model.safetensors"),
    ],
)
def test_what_cannot_have_adapters_is_refused(folder, settings, message):
    with pytest.raises(ConfigError, match=message):
        build_engine(folder, model={**LORA, **settings})


def test_adapters_beyond_plain_lora_are_refused(folder, tmp_path):
    peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True).save_pretrained(tmp_path)
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(ConfigError, match="has use_dora=True; only plain LoRA"):
        build_engine(folder, model={"lora_adapter_path": str(tmp_path)})


def test_adapters_of_another_scale_are_refused_on_resume(folder, tmp_path):
    build_engine(folder, model=LORA).save(tmp_path / "saved")
    build_engine(folder, model=LORA).load(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"was trained with model\.lora_alpha=10, now 20; set it back"):
        build_engine(folder, model={**LORA, "lora_alpha": 20}).load(tmp_path / "saved")
