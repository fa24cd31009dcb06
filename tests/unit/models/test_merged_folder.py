"""The folder with merged adapters holds what peft's own merge gives."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine_cases import save_tiny_model, tiny_qwen3
from verl.config import HFModelConfig
from verl.models import export
from verl.models.merged_folder import merged_folder
from verl.utils.errors import ConfigError


@pytest.fixture
def settings(tmp_path):
    base, adapters = save_tiny_model(tmp_path / "base", tiny_qwen3(attention_bias=True)), tmp_path / "adapters"
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=4, lora_alpha=10, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).save_pretrained(adapters)
    return HFModelConfig(path=str(base), lora_adapter_path=str(adapters))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_that_of_pefts_merge_in_the_type_of_the_base(settings, dtype):
    AutoModelForCausalLM.from_pretrained(settings.path, dtype=dtype).save_pretrained(settings.path)
    found = AutoModelForCausalLM.from_pretrained(merged_folder(settings), dtype="auto").state_dict()
    base = AutoModelForCausalLM.from_pretrained(settings.path, dtype=torch.float32)
    expected = peft.PeftModel.from_pretrained(base, settings.lora_adapter_path).merge_and_unload().to(dtype)
    assert found.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-6)


def test_a_full_disk_is_an_error_with_advice(settings, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_layers", full)
    with pytest.raises(ConfigError, match="No space left on device; let TMPDIR name a folder with more room"):
        merged_folder(settings)
