"""Presets and overrides as others write them: old, own and removed sections, and the base that a launcher gives."""

from pathlib import Path

import pytest

from tests.conftest import import_or_skip
from verl.config import ConfigError, ConfigWarning, load_config
from verl.config.load import pop_unread_keys
from verl.experimental.fully_async_policy import fully_async_main

pytestmark = pytest.mark.filterwarnings("ignore")

PLAIN, COMPOSED = "", "defaults: [ppo_trainer, _self_]\n"
OLD_SECTIONS = """
reward_model:
  reward_manager: dapo
  reward_kwargs: {max_resp_len: 8}
  overlong_buffer: {enable: true, len: 4}
custom_reward_function: {path: f.py, name: score}
critic:
  model:
    lora: {type: lora, rank: 0}
algorithm:
  rollout_correction: {rollout_is: null, rollout_is_threshold: null}
  filter_groups: null
"""
OWN_SECTIONS = """
vars: {lr: 1e-3, n: 3, unused: 1}
run_label: mine
data:
  my_filter: {shortest: 2, longest: 9}
actor_rollout_ref:
  actor: {optim: {lr: "${vars.lr}"}}
  rollout: {n: "${vars.n}"}
trainer:
  experiment_name: ${run_label}-1
"""


def preset(folder: Path, text: str, name: str = "mine") -> list[str]:
    if "defaults:" in text:
        import_or_skip("hydra")
    (folder / f"{name}.yaml").write_text(text)
    return [f"--config-dir={folder}", f"--config-name={name}"]


@pytest.mark.parametrize("head", [PLAIN, COMPOSED], ids=["plain", "defaults"])
def test_a_preset_may_hold_old_sections(head: str, tmp_path: Path):
    config = load_config(preset(tmp_path, head + OLD_SECTIONS))
    assert config.reward.reward_manager.name == "dapo"
    overlong = {"enable": True, "len": 4}
    assert config.reward.reward_kwargs == {"max_resp_len": 8, "overlong_buffer_cfg": overlong}
    assert (config.reward.custom_reward_function.path, config.reward.custom_reward_function.name) == ("f.py", "score")
    assert config.algorithm.rollout_correction.rollout_is_threshold is None
    with pytest.raises(ConfigError, match=r"MODEL|Megatron-LM engine is still to come"):
        load_config(preset(tmp_path, head + "critic: {model: {lora: {rank: 8}}}\n"))


@pytest.mark.parametrize("head", [PLAIN, COMPOSED], ids=["plain", "defaults"])
def test_a_preset_may_hold_sections_of_its_own_that_others_refer_to(head: str, tmp_path: Path):
    with pytest.warns(ConfigWarning, match=r"data\.my_filter is nothing of the library: .* data\.extra\.my_filter"):
        config = load_config(preset(tmp_path, head + OWN_SECTIONS))
    assert config.actor_rollout_ref.actor.optim.lr == 1e-3 and config.actor_rollout_ref.rollout.n == 3
    assert config.trainer.experiment_name == "mine-1"
    assert config.get("vars")["n"] == config.vars.n == 3
    assert config.data.get("my_filter").get("shortest") == 2
    unread = set(pop_unread_keys(config))
    assert {"extra.vars.unused", "data.extra.my_filter.longest"} <= unread
    assert not unread & {"extra.vars.lr", "extra.vars.n", "extra.run_label", "data.extra.my_filter.shortest"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("algoritm: {gamma: 1}", "'algorithm.gamma'"),
        ("data: {custom_clss: {path: x}}", "'data.custom_cls.path'"),
        ("data: {trian_batch_size: 4}", "'data.train_batch_size'"),
        ("data: {mine: 4}", "in a preset data.extra.mine"),
        ("lr: 1e-3", "'actor_rollout_ref.actor.optim.lr'"),
    ],
)
@pytest.mark.parametrize("head", [PLAIN, COMPOSED], ids=["plain", "defaults"])
def test_a_typing_mistake_in_a_preset_is_no_section_of_ones_own(head: str, text: str, words: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_config(preset(tmp_path, head + text + "\n"))
    assert words in str(caught.value)


@pytest.mark.parametrize("head", [PLAIN, COMPOSED], ids=["plain", "defaults"])
def test_a_removed_section_takes_back_what_the_preset_set_through_it(head: str, tmp_path: Path):
    words = preset(tmp_path, head + OLD_SECTIONS + "mine: {a: 1}\n")
    plain, changed = load_config(), load_config([*words, "~reward_model", "~custom_reward_function", "~mine"])
    assert changed.reward == plain.reward and "mine" not in changed
    kept = load_config([*words, "reward.num_workers=4", "~reward_model.overlong_buffer", "~critic.model.lora"])
    assert kept.reward.reward_manager.name == "dapo" and kept.reward.num_workers == 4
    assert kept.reward.reward_kwargs == {"max_resp_len": 8}


@pytest.mark.parametrize(
    ("one", "several"),
    [
        ("reward_model={num_workers: 2, strategy: fsdp}", "reward_model.num_workers=2 reward_model.strategy=fsdp"),
        ("custom_reward_function={path: f.py}", "custom_reward_function.path=f.py"),
        ("critic={model: {lora: {rank: 0}}, ppo_epochs: 2}", "critic.ppo_epochs=2"),
        ("algorithm.pf_ppo={weight_pow: 1}", "algorithm.pf_ppo.weight_pow=1"),
        ("algorithm.filter_groups=null", "~algorithm.filter_groups"),
        ("transfer_queue={enable: false}", "transfer_queue.enable=false"),
        ("+mine={a: {b: 1}, c: 2}", "+mine.a.b=1 +mine.c=2"),
        ("+data={x: 1}", "+data.x=1"),
    ],
)  # fmt: skip
def test_a_section_given_at_once_is_its_keys_one_by_one(one: str, several: str):
    both = ["actor_rollout_ref.rollout.n=2"]
    assert load_config([*both, one]) == load_config([*both, *several.split()])


def test_a_threshold_of_null_is_allowed_where_nothing_is_weighed():
    where = "algorithm.rollout_correction"
    load_config([f"{where}.rollout_is_threshold=null"])
    with pytest.raises(ConfigError, match="rollout_is=token needs rollout_is_threshold, which is null: leave it out"):
        load_config([f"{where}.rollout_is=token", f"{where}.rollout_is_threshold=null"])


@pytest.mark.parametrize("head", [PLAIN, COMPOSED], ids=["plain", "defaults"])
def test_a_preset_under_the_fully_asynchronous_program_is_fully_asynchronous(head: str, tmp_path: Path):
    words = preset(tmp_path, head + "async_training: {staleness_threshold: 0.5}\nrollout: {n_gpus_per_node: 1}\n")
    config = load_config([*fully_async_main.PRESET, *words, "data.train_batch_size=1024"])
    assert config.trainer.v1.trainer_mode == "separate_async" and not config.actor_rollout_ref.hybrid_engine
    assert config.async_training.staleness_threshold == 0.5 and config.async_training.trigger_parameter_sync_step == 4
    with pytest.raises(ConfigError, match=r"no effect with trainer\.v1\.trainer_mode=sync"):
        load_config(words)


@pytest.mark.parametrize("word", ["--data.seed=1", "--data.seed 1", "-data.seed=1"])
def test_a_setting_with_dashes_is_told_to_drop_them(word: str):
    with pytest.raises(ConfigError, match=r"without dashes; write data\.seed=1$"):
        load_config(word.split())
    with pytest.raises(ConfigError, match="unknown option '--config-nme'; did you mean '--config-name'"):
        load_config(["--config-nme=x"])
