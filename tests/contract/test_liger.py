"""What our adapter relies on in liger-kernel, checked on the installed package."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import skip_or_fail
from tests.engine_cases import tiny_qwen3
from verl.models.liger import DISABLED_KERNELS, liger_arguments, liger_function
from verl.utils.errors import ConfigError

try:
    import liger_kernel  # noqa: F401
except ImportError:
    skip_or_fail("liger-kernel is not installed")

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "deepseek_v3"]

REPLACED = """
import types
import torch
from transformers import AutoModelForCausalLM
from tests.engine_cases import tiny_qwen3
from verl.models import liger

model = AutoModelForCausalLM.from_config(tiny_qwen3())
names = [name for name, _ in model.named_parameters()]
liger.get_platform = lambda: types.SimpleNamespace(compiles_triton=lambda: True)
liger.use_liger(model)
layer = model.model.layers[0]
for module in (model.model.norm, layer.input_layernorm, layer.self_attn.q_norm, layer.mlp):
    assert module.forward.__func__.__module__.startswith("liger_kernel."), module
assert model.forward.__func__.__module__.startswith("transformers."), "the head must stay ours"
assert torch.nn.functional.cross_entropy.__module__ == "torch.nn.functional"
from transformers.models.qwen3 import modeling_qwen3
assert modeling_qwen3.apply_rotary_pos_emb.__module__.startswith("liger_kernel.")
assert names == [name for name, _ in model.named_parameters()]
print("replaced")
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_are_wanted_and_no_cross_entropy_is(family):
    arguments = liger_arguments(liger_function(family))
    assert arguments["rms_norm"] is True
    assert [arguments[name] for name in DISABLED_KERNELS] == [False, False]


def test_parts_that_liger_has_off_for_a_family_stay_off():
    assert "rope" not in liger_arguments(liger_function("deepseek_v3"))


def test_a_family_without_kernels_is_refused_with_those_that_have_some():
    with pytest.raises(ConfigError, match=r"'starcoder2'; it has .*llama.*qwen3"):
        liger_function("starcoder2")


def test_a_model_gets_kernels_for_norm_mlp_and_rotary_embedding_and_keeps_its_head():
    done = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "replaced", done.stderr[-2000:]


def test_plain_models_are_not_touched_by_asking_which_kernels_there_are():
    model = AutoModelForCausalLM.from_config(tiny_qwen3())
    liger_function("qwen3")
    assert model.model.norm(torch.ones(1, 32)).shape == (1, 32)
