"""Every override string of the tuning guides and hardware guides loads as it is written there."""

import shlex

import pytest

from verl.config import load_config
from verl.config.load import ConfigWarning

SGLANG = r"""
actor_rollout_ref.rollout.name=sglang \
+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend="ascend" \
++actor_rollout_ref.rollout.engine_kwargs.sglang.deepep_mode="auto" \
++actor_rollout_ref.rollout.engine_kwargs.sglang.moe_a2a_backend="deepep" \
+actor_rollout_ref.rollout.engine_kwargs.sglang.enable_dp_attention=False \
+actor_rollout_ref.rollout.engine_kwargs.sglang.chunked_prefill_size=-1
"""
VEOMNI = r"""
actor_rollout_ref.actor.strategy=veomni \
actor_rollout_ref.actor.veomni.fsdp_size=16 \
actor_rollout_ref.actor.veomni.expert_parallel_size=1 \
actor_rollout_ref.actor.veomni.attn_implementation=veomni_flash_attention_2_with_sp \
actor_rollout_ref.actor.veomni.moe_implementation=fused \
actor_rollout_ref.actor.veomni.param_offload=True \
actor_rollout_ref.actor.veomni.optimizer_offload=True
"""
SINGLE = [
    ("actor_rollout_ref.actor.fsdp_config.param_offload=True", True),
    ("actor_rollout_ref.actor.fsdp_config.optimizer_offload=True", True),
    ("trainer.device=npu", "npu"),
    ("actor_rollout_ref.rollout.cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32, 64]", [1, 2, 4, 8, 16, 32, 64]),
    ("actor_rollout_ref.rollout.enforce_eager=False", False),
    ("actor_rollout_ref.rollout.disable_log_stats=False", False),
    ("actor_rollout_ref.rollout.gpu_memory_utilization=0.7", 0.7),
    ("actor_rollout_ref.rollout.max_num_seqs=512", 512),
    ("actor_rollout_ref.rollout.max_num_batched_tokens=4096", 4096),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", 2),
    ("actor_rollout_ref.rollout.tensor_parallel_size=2", None),
    ("actor_rollout_ref.model.use_remove_padding=True", True),
    ("actor_rollout_ref.model.enable_gradient_checkpointing=True", True),
    ("critic.model.enable_gradient_checkpointing=True", True),
    ("actor_rollout_ref.model.enable_activation_offload=True", True),
    ("critic.model.enable_activation_offload=True", True),
    ("actor_rollout_ref.model.use_liger=True", True),
    ("actor_rollout_ref.model.use_fused_kernels=True", True),
    ("actor_rollout_ref.actor.use_dynamic_bsz=true", True),
    ("actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True", True),
    ("critic.use_dynamic_bsz=True", True),
    ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", 4),
    ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8", 8),
    ("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8", 8),
    ("critic.ppo_micro_batch_size_per_gpu=8", 8),
    ("critic.forward_micro_batch_size_per_gpu=16", 16),
    ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576", 24576),
    ("critic.ppo_max_token_len_per_gpu=98304", 98304),
    ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=32768", 32768),
    ("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=32768", 32768),
    ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", 2),
    ("actor_rollout_ref.ref.ulysses_sequence_parallel_size=2", 2),
    ("critic.ulysses_sequence_parallel_size=2", 2),
    ("actor_rollout_ref.actor.fsdp_config.forward_prefetch=True", True),
    ("actor_rollout_ref.ref.entropy_from_logits_with_chunking = True", True),
    ("actor_rollout_ref.actor.entropy_checkpointing = True", True),
    ("actor_rollout_ref.actor.strategy=fsdp2", "fsdp2"),
    ("global_profiler.steps=[5,6,7,8,9,10]", [5, 6, 7, 8, 9, 10]),
    ("actor_rollout_ref.actor.profiler.enable=True", True),
    ("actor_rollout_ref.actor.profiler.all_ranks=True", True),
]


def words(text: str) -> list[str]:
    """What a shell passes on."""
    return shlex.split(text.replace("\\\n", " "))


def at(config: object, path: str) -> object:
    for name in path.split("."):
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    return config


def test_sglang_strings_reach_the_engine_arguments():
    kwargs = load_config(words(SGLANG)).actor_rollout_ref.rollout.engine_kwargs.sglang
    assert kwargs == {
        "attention_backend": "ascend",
        "deepep_mode": "auto",
        "moe_a2a_backend": "deepep",
        "enable_dp_attention": False,
        "chunked_prefill_size": -1,
    }


def test_veomni_strings_reach_the_engine_section():
    with pytest.warns(ConfigWarning, match="attn_implementation.*: the engine takes the fastest kernels"):
        actor = load_config(words(VEOMNI)).actor_rollout_ref.actor
    assert actor.strategy == "veomni" and actor.engine.fsdp_size == 16
    assert actor.engine.param_offload and actor.engine.optimizer_offload


@pytest.mark.filterwarnings("ignore:.*old spelling")
@pytest.mark.parametrize(("string", "value"), SINGLE, ids=[string for string, _ in SINGLE])
def test_a_single_string_sets_its_key(string, value):
    config = load_config([string])
    path = string.partition("=")[0].strip()
    if value is None:
        assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 2
    else:
        assert at(config, path) == value and type(at(config, path)) is type(value)


def test_nsys_steps_five_to_ten_load():
    config = load_config(["global_profiler.tool=nsys", "global_profiler.steps=[5,6,7,8,9,10]"])
    assert config.actor_rollout_ref.actor.profiler.tool == "nsys"


def test_liger_in_sft_loads():
    assert load_config(["model.use_liger=True"], "sft_trainer").model.use_liger is True
