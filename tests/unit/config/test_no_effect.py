"""A key that nothing reads yet is named when it is set, and `verl config explain` says so."""

import warnings

import pytest

from verl.config import ConfigWarning, RunConfig, SFTConfig, foreign_keys, load_config, schema
from verl.config.explain import describe

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("override", "feature", "preset"),
    [
        (f"{ROLLOUT}.custom={{a:1}}", "rollout engines that read it", "ppo_trainer"),
    ],
)
def test_a_key_that_waits_for_a_feature_says_so_at_load_and_in_explain(override, feature, preset):
    with pytest.warns(ConfigWarning, match=f"has no effect yet: it is for {feature}, still to come"):
        load_config([override], preset)
    key, root = override.lstrip("+").partition("=")[0], SFTConfig if preset == "sft_trainer" else RunConfig
    assert any(f"no effect yet: for {feature}, still to come" in line for line in describe(key, root))


@pytest.mark.parametrize("root", [RunConfig, SFTConfig])
def test_a_default_is_no_reason_to_warn(root):
    waiting = {p: key.default for p, key in schema.keys(root).items() if foreign_keys.waiting_for(p, root)}
    assert len(waiting) > (0 if root is RunConfig else -1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path, default in waiting.items():
            if isinstance(default, bool | int | float | str):
                load_config([f"{path}={default}"], "sft_trainer" if root is SFTConfig else "ppo_trainer")
        load_config(["ray_kwargs.ray_init.num_cpus=null", "ray_kwargs.ray_init.runtime_env.py_executable=null"])


def test_a_loss_or_an_engine_from_outside_may_read_what_ours_do_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_config([f"{ACTOR}.policy_loss.loss_mode=mine", f"{ACTOR}.tau_pos=2", f"{ACTOR}.policy_loss.dro_beta=1"])
        load_config([f"{ROLLOUT}.name=mine", f"{ROLLOUT}.custom={{a:1}}"])
