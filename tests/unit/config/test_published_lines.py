"""Lines of scripts written for the reference that ask for nothing, for what happens anyway, or for what cannot be."""

import pytest

from verl.config import ConfigWarning, load_config
from verl.utils.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"


def test_scripts_that_trust_code_of_a_model_folder_load_with_one_line_that_it_is_never_run():
    for key, name in (("actor_rollout_ref.model", "ppo_trainer"), ("data", "ppo_trainer"), ("model", "sft_trainer")):
        with pytest.warns(
            ConfigWarning, match="trust_remote_code has no effect: code from a .* is never run"
        ) as caught:
            load_config([f"{key}.trust_remote_code=True"], name)
        assert len(caught) == 1


@pytest.mark.parametrize(
    ("accepted", "refused", "instead"),
    [
        ("actor_rollout_ref.rollout.mode=async", "actor_rollout_ref.rollout.mode=sync", "drop the key"),
        ("data.chat_template_func=null", "data.chat_template_func=mine.py:f", r"model\.custom_chat_template"),
    ],
)
def test_a_script_may_ask_for_what_happens_anyway_and_else_reads_what_to_type_instead(accepted, refused, instead):
    assert load_config([accepted]) == load_config()
    with pytest.raises(ConfigError, match=f"is refused: .*{instead}"):
        load_config([refused])


@pytest.mark.filterwarnings("ignore")
def test_lines_of_published_scripts_load():
    fine_tuning = load_config(
        ["model=hf_model", "engine=fsdp", "optim=fsdp", "optim.lr_warmup_steps=null"], "sft_trainer"
    )
    assert fine_tuning == load_config([], "sft_trainer")
    warmup = [f"{ACTOR}.optim.lr_warmup_steps=null", "critic.optim.lr_warmup_steps=null"]
    config = load_config([*warmup, "trainer.use_legacy_worker_impl=disable"])
    assert config == load_config() and config.actor_rollout_ref.actor.optim.lr_warmup_steps == -1
    batches = ["forward_max_token_len_per_gpu=9", "micro_batch_size_per_gpu=8", "use_dynamic_bsz=True"]
    batches += ["ulysses_sequence_parallel_size=2", "model.fsdp_config.param_offload=True", "rollout.name=vllm"]
    reward = load_config([f"reward_model.{key}" for key in batches]).reward.reward_model
    assert (reward.forward_max_token_len_per_gpu, reward.forward_micro_batch_size_per_gpu) == (9, 8)
    assert reward.use_dynamic_bsz and reward.engine.ranks_per_sequence == 2
    assert reward.fsdp_config.param_offload and reward.rollout.name == "vllm"
    with pytest.raises(ConfigError, match="model=llama is not one of hf_model"):
        load_config(["model=llama"], "sft_trainer")
