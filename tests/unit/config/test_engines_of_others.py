"""Scripts of other training engines run on the one that is here: their keys arrive at its section."""

from typing import Any

import pytest

from verl.config import ConfigError, load_config
from verl.config.check import check_can_start
from verl.config.engine import FSDPEngineConfig
from verl.config.load import ConfigWarning

ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
MIXTURE = [
    "model_engine=veomni",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.model.path=/m",
    f"{ACTOR}.veomni.param_offload=True",
    f"{ACTOR}.veomni.optimizer_offload=True",
    f"{ACTOR}.veomni.fsdp_size=4",
    f"{ACTOR}.veomni.ulysses_parallel_size=2",
    f"{ACTOR}.veomni.expert_parallel_size=4",
    f"{ACTOR}.veomni.enable_full_shard=False",
    f"{ACTOR}.veomni.mixed_precision=False",
    f"{ACTOR}.veomni.seed=7",
]


def loaded(*words: str, name: str = "ppo_trainer") -> Any:
    with pytest.warns(ConfigWarning):
        return load_config(words, name)


def test_keys_of_veomni_arrive_and_those_of_the_reference_follow_the_actors():
    config = loaded(*MIXTURE)
    arr = config.actor_rollout_ref
    expected = FSDPEngineConfig(
        param_offload=True,
        optimizer_offload=True,
        fsdp_size=4,
        ulysses_sequence_parallel_size=2,
        expert_parallel_size=4,
        reshard_after_forward=False,
        forward_prefetch=True,
        dtype="fp32",
        seed=7,
        use_torch_compile=False,
    )
    assert arr.actor.engine == expected
    assert (arr.ref.strategy, config.critic.strategy) == ("veomni", "veomni")
    assert arr.ref.engine.forward_only and arr.ref.engine.expert_parallel_size == 4 and arr.ref.engine.param_offload
    mesh = arr.actor.engine.mesh(8)
    assert (mesh.context, mesh.experts, mesh.data, mesh.sharded) == (2, 4, 4, 4)
    check_can_start(config)


def test_one_line_says_which_engine_runs():
    with pytest.warns(ConfigWarning, match=r"^model_engine: the fsdp2 engine runs, by the keys of veomni$"):
        load_config(["model_engine=veomni", "actor_rollout_ref.model.path=/m"])


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("attn_implementation=flash_attention_2", "the fastest kernels"),
        ("moe_implementation=fused", "the fastest kernels"),
        ("rms_norm_implementation=liger_kernel", "the fastest kernels"),
        ("init_device=meta", "only the first rank reads weights"),
        ("ckpt_manager=dcp", "one form of checkpoint"),
        ("pad_to_length_bucket=512", "nothing is padded"),
    ],
)
def test_what_chooses_nothing_here_is_read_with_the_reason(word: str, why: str):
    with pytest.warns(ConfigWarning, match=why):
        load_config([*MIXTURE, f"{ACTOR}.veomni.{word}"])


@pytest.mark.filterwarnings("ignore::verl.config.load.ConfigWarning")
@pytest.mark.parametrize(
    ("word", "says"),
    [
        (f"{ACTOR}.veomni.router_replay.mode=R3", "routing replay is still to come"),
        (f"{ACTOR}.veomni.load_checkpoint_path=/c", "weights are read from model.path"),
        (f"{ACTOR}.optim.lr_min=1e-7", "set lr_scheduler_type=cosine with min_lr_ratio"),
        (f"{ACTOR}.veomni.expert_parallel_size=0", "expert_parallel_size=0"),
        (f"{ACTOR}.veomni.expert_paralel_size=2", "expert_parallel_size"),
    ],
)
def test_what_does_not_act_is_refused_with_what_to_do(word: str, says: str):
    with pytest.raises(ConfigError, match=says):
        load_config([*MIXTURE, word])


def test_fine_tuning_takes_the_names_of_veomni_too():
    words = ["engine.strategy=veomni", "engine.ulysses_parallel_size=2", "engine.expert_parallel_size=2"]
    config = loaded("model.path=/m", *words, "engine.attn_implementation=sdpa", name="sft_trainer")
    engine = config.training_engine
    assert (engine.ulysses_sequence_parallel_size, engine.expert_parallel_size) == (2, 2)
    check_can_start(config)
