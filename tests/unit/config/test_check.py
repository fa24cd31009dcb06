"""Combinations that cannot work are refused with the numbers; what is to come is refused by name."""

import pytest

from verl.config import ConfigError, RunConfig, load_config
from verl.config.check import check_can_start

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
SFT = "--config-name=sft_trainer"
FILTER = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc", f"{ROLLOUT}.n=4"]
PARTS = ["algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1,1]"]
KL_IN_REWARD = "algorithm.use_kl_in_reward=True"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=16"], ["8", "16"]),
        (["data.train_batch_size=8", "critic.ppo_mini_batch_size=16"], ["critic.ppo_mini_batch_size=16", "8"]),
        (["data.train_batch_size=10", "data.gen_batch_size=4"], ["10", "4"]),
        (["trainer.n_gpus_per_node=3", "data.train_batch_size=4", f"{ROLLOUT}.n=4"], ["16 sequences", "3", "=3, or"]),
        (["data.max_response_length=40000"], ["16384", "40512"]),
        (["critic.ppo_max_token_len_per_gpu=100"], ["critic", "100", "1024"]),
        (["critic.forward_max_token_len_per_gpu=100"], ["critic.forward_max_token_len_per_gpu=100", "1024"]),
        ([f"{ROLLOUT}.max_model_len=1000"], ["1000", "1024"]),
        ([f"{ROLLOUT}.enable_chunked_prefill=False", f"{ROLLOUT}.max_num_batched_tokens=100"], ["100", "512"]),
        ([f"{ROLLOUT}.temperature=0"], ["temperature"]),
        ([f"{ROLLOUT}.top_k=0"], ["top_k=0"]),
        ([f"{ROLLOUT}.top_p=1.5"], ["at most 1"]),
        ([f"{ROLLOUT}.min_tokens=600"], ["600", "512"]),
        ([f"{ROLLOUT}.expert_parallel_size=3", f"{ROLLOUT}.tensor_model_parallel_size=2"], ["3", "2"]),
        ([f"{ROLLOUT}.pipeline_model_parallel_size=2"], ["2"]),
        ([f"{ROLLOUT}.val_kwargs.temperature=-1"], ["val_kwargs.temperature=-1"]),
        (["critic.enable=False"], ["gae"]),
        ([f"{ACTOR}.clip_ratio_c=1.0"], ["above 1"]),
        (["algorithm.filter_groups.enable=True"], ["metric"]),
        ([*FILTER, "actor_rollout_ref.rollout.n=1"], ["filter_groups.enable", "rollout.n=1"]),
        (
            [*FILTER, "algorithm.filter_groups.metric=seq_final_reward", KL_IN_REWARD],
            ["seq_reward", "use_kl_in_reward"],
        ),
        (["data.train_batch_size=4", "data.gen_batch_size=12"], ["filter_groups.enable=True it may"]),
        ([*FILTER, "data.train_batch_size=4", "data.gen_batch_size=6"], ["train_batch_size=4", "gen_batch_size=6"]),
        (["reward.weights.acc=yes"], ["reward.weights.acc='yes' must be a number"]),
        (["reward.weights.acc=1", "algorithm.gdpo_reward_keys=[acc,format]"], ["keep only reward.weights"]),
        ([*PARTS, "reward.weights.a=1", "reward.weights.b=2"], ["say the same thing differently"]),
        (["algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1]"], ["1 numbers for the 2 parts"]),
        (["algorithm.gdpo_reward_weights=[1]"], ["1 numbers for the 0 parts"]),
        ([f"{ACTOR}.policy_loss.loss_mode=dro"], ["dro_beta"]),
        (["algorithm.gamma=1.1"], ["gamma=1.1"]),
        (["model_engine=megatron", f"{ACTOR}.strategy=fsdp2"], ["megatron", "fsdp2"]),
        (
            [f"{ACTOR}.ulysses_sequence_parallel_size=2", "actor_rollout_ref.model.use_remove_padding=False"],
            ["use_remove_padding"],
        ),
        (
            [f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.strategy=fsdp2"],
            ["strategy=fsdp2", "keep only"],
        ),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=/a/b"], ["global_step_N", "/a/b"]),
        (["data.custom_cls.path=x.py"], ["custom_cls"]),
        (["trainer.val_only=True", "data.val_files=null"], ["val_files"]),
        (["trainer.val_only=True"], ["val_files"]),
        (["reward.scorer=gsm8", "actor_rollout_ref.model.path=m"], ["reward.scorer", "gsm8k"]),
        ([f"{ACTOR}.optim.lr=nan"], ["optim.lr must be float, but it is nan"]),
        (
            ["data.train_batch_size=31", f"{ROLLOUT}.n=6", "trainer.n_gpus_per_node=8"],
            ["x rollout.n=6 = 186 sequences", "set data.train_batch_size=32, or a multiple of 4"],
        ),
        (["data.max_length=9000", SFT], ["9000", "8192"]),
        (["trainer.save_freq=sometimes", SFT], ["after_each_epoch"]),
        (["trainer.profile_interval=[1]", SFT], ["[first, last]"]),
        (["engine.ulysses_sequence_parallel_size=2", "model.use_remove_padding=False", SFT], ["use_remove_padding"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and "=" in value[0] else "",
)
def test_an_impossible_combination_is_one_error_with_its_numbers(overrides, words):
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spelling", ["ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"])
def test_ranks_that_share_sequences_hold_longer_ones_and_need_fewer_sequences(spelling):
    long = ["algorithm.adv_estimator=grpo", "data.max_response_length=20000", "trainer.n_gpus_per_node=2"]
    batches = ["data.train_batch_size=3", f"{ACTOR}.ppo_mini_batch_size=3", f"{ACTOR}.use_dynamic_bsz=True"]
    load_config([*long, *batches, f"{ACTOR}.{spelling}=2"])
    with pytest.raises(ConfigError, match="cannot be shared by 2 data-parallel ranks"):
        load_config([*long, *batches])


def test_unused_parts_are_not_held_against_a_run():
    grpo = ["algorithm.adv_estimator=grpo"]
    load_config([*grpo, "critic.ppo_mini_batch_size=4096", "critic.use_dynamic_bsz=False"])
    load_config([*grpo, "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=False"])


@pytest.mark.parametrize(
    ("override", "feature"),
    [
        (f"{ACTOR}.strategy=torchtitan", "the torchtitan engine"),
        ("model_engine=megatron", "the Megatron-LM engine"),
    ],
)
def test_a_feature_to_come_loads_and_is_refused_by_name_before_the_run(override, feature):
    config = load_config([override, "actor_rollout_ref.model.path=/m"])
    with pytest.raises(ConfigError, match=rf"is not supported yet: {feature} is still to come \(docs/"):
        check_can_start(config)


def test_what_will_never_come_is_refused_with_what_to_use():
    with pytest.raises(ConfigError, match=r"rollout\.name=trtllm is refused: .*native, vllm"):
        check_can_start(load_config([f"{ROLLOUT}.name=trtllm", "actor_rollout_ref.model.path=/m"]))
    for key in ("engine_kwargs.trtllm.x=1", "moe_tensor_parallel_size=2"):
        with pytest.raises(ConfigError, match=r"is refused: .*TensorRT-LLM will not"):
            load_config([f"+{ROLLOUT}.{key}"])
    for name in ("vemlp_wandb", "rl_insight"):
        with pytest.raises(ConfigError, match=rf"logger={name} is refused: .*(WANDB_BASE_URL|prometheus_port)"):
            check_can_start(load_config([f"trainer.logger=[console,{name}]", "actor_rollout_ref.model.path=/m"]))
    with pytest.raises(ConfigError, match=r"is refused: .*CheckpointEngineRegistry"):
        load_config([f"+{ROLLOUT}.checkpoint_manager_class=mine.Manager"])


@pytest.mark.parametrize(
    ("flag", "micro"),
    [
        (f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
        (f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    ],
)
def test_a_run_needs_a_token_budget_or_a_micro_batch_size(flag, micro):
    config = load_config([f"{flag}=False", "actor_rollout_ref.model.path=/m"])
    with pytest.raises(ConfigError, match=f"{flag}=False needs {micro}; set it"):
        check_can_start(config)


def test_a_run_needs_a_model():
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.model\.path"):
        check_can_start(load_config())
    check_can_start(load_config(["actor_rollout_ref.model.path=/m"]))
    with pytest.raises(ConfigError, match=r"model\.path"):
        check_can_start(load_config(config_name="sft_trainer"))


def test_the_plain_defaults_pass_every_check_but_the_micro_batches():
    config = load_config()
    assert type(config) is RunConfig


def test_a_profiler_that_would_record_nothing_or_nonsense_is_refused():
    profiler = f"{ACTOR}.profiler"
    on = ["global_profiler.tool=torch", f"{profiler}.enable=True"]
    for words, said in (
        ([], r"profiles no rank; set .*\.all_ranks=True"),
        ([f"{profiler}.all_ranks=True", f"{profiler}.tool_config.torch.contents=[shape]"], "did you mean 'shapes'"),
        ([f"{profiler}.all_ranks=True", "global_profiler.finish_hook_cmd='a \"b'"], "is no command: No closing"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config([*on, *words])
    load_config([*on, f"{profiler}.ranks=[0]"])
    with pytest.raises(ConfigError, match=r"tool=precision_debugger is refused: msprobe .*verl certify"):
        check_can_start(load_config(["global_profiler.tool=precision_debugger", "actor_rollout_ref.model.path=/m"]))
