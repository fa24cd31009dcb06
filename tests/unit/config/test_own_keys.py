"""Hyperparameters of the user's own estimators, losses and loops: any key, or those of a dataclass."""

import dataclasses
import json
import pickle
from dataclasses import dataclass

import pytest
import torch

from verl.algorithms.advantages import ADVANTAGES, check_advantage, compute_advantages
from verl.algorithms.losses import POLICY_LOSSES, get_policy_loss
from verl.config import ConfigError, ConfigWarning, load_config
from verl.config.load import pop_unread_keys
from verl.data.batch import Batch
from verl.doors import core_algos
from verl.runtime.wire import deserialize, serialize

LOSS, LOOP = "actor_rollout_ref.actor.policy_loss", "actor_rollout_ref.rollout.agent"


@pytest.fixture(autouse=True)
def nothing_stays_registered():
    """The tables as they were, after each test."""
    tables = (
        ADVANTAGES._items,
        POLICY_LOSSES._items,
        core_algos.ADV_ESTIMATOR_REGISTRY,
        core_algos.POLICY_LOSS_REGISTRY,
    )
    before = [dict(table) for table in tables]
    yield
    for table, items in zip(tables, before, strict=True):
        table.clear()
        table.update(items)


@dataclass
class BetaKeys:
    beta: float = 0.5
    window: int | None = None


def register_scaled(extra=None):
    seen = []

    @core_algos.register_adv_est("scaled", extra=extra)
    def scaled(token_level_rewards, response_mask, config, index=None):
        seen.append(config)
        return token_level_rewards * config.extra["beta"], token_level_rewards

    return seen


def batch_of_one() -> Batch:
    columns = {"loss_mask": torch.tensor([False, True]), "token_rewards": torch.tensor([0.0, 3.0])}
    return Batch(torch.tensor([0, 2]), columns, {})


@pytest.mark.parametrize("home", ["algorithm", LOSS, LOOP])
def test_any_key_is_kept_and_read_by_index_by_name_and_from_the_section_itself(home):
    config = load_config([f"{home}.extra.beta=0.25", f"{home}.extra.schedule.start=3"])
    section = config
    for name in home.split("."):
        section = getattr(section, name)
    assert section.extra["beta"] == section.extra.beta == section.extra.get("beta") == 0.25
    assert section.extra.schedule.start == 3
    assert section.beta == section.get("beta", 9) == section["beta"] == 0.25  # as published functions read their keys
    assert section.get("gone", 9) == section.extra.get("gone", 9) == 9
    with pytest.raises(AttributeError, match=rf"{home}\.extra\.bets is not set; did you mean 'beta'"):
        section.extra.bets  # noqa: B018
    with pytest.raises(AttributeError, match=rf"no key 'bets'; set {home}\.extra\.bets"):
        section.bets  # noqa: B018


@pytest.mark.parametrize("home", ["algorithm", LOSS, LOOP])
def test_a_key_added_in_hydras_syntax_lands_in_extra_and_says_so(home):
    with pytest.warns(ConfigWarning, match=rf"\+{home}\.beta is no key of the library: .* {home}\.extra\.beta"):
        config = load_config([f"+{home}.beta=0.25"])
    assert config._set == (f"{home}.extra",)
    with pytest.raises(ConfigError, match=rf"A key of your own is \+{home}\.beta, in a preset {home}\.extra\.beta"):
        load_config([f"{home}.beta=0.25"])


def test_an_added_key_that_looks_like_a_typing_mistake_names_the_key_that_may_be_meant():
    with pytest.warns(ConfigWarning, match=r"if you mean algorithm\.gamma, write that"):
        load_config(["+algorithm.gama=0.9"])


def test_added_keys_that_the_library_knows_or_refuses_are_no_keys_of_the_user():
    assert load_config(["+algorithm.gamma=0.9"]).algorithm.gamma == 0.9
    with pytest.raises(ConfigError, match=r"unknown key 'algorithm\.gamma\.mine'"):
        load_config(["+algorithm.gamma.mine=1"])


def test_keys_reach_the_estimator_and_the_record_of_the_run():
    register_scaled()
    config = load_config(["algorithm.extra.beta=2", "algorithm.adv_estimator=scaled"])
    assert compute_advantages(batch_of_one(), config.algorithm)["advantages"].tolist() == [0.0, 6.0]
    assert json.loads(json.dumps(dataclasses.asdict(config)))["algorithm"]["extra"] == {"beta": 2}


def test_keys_that_nothing_reads_are_named_one_by_one_also_after_a_copy_to_another_process():
    register_scaled()
    config = load_config(
        ["algorithm.extra={beta: 2, unused: 1}", "algorithm.adv_estimator=scaled", f"{LOSS}.extra.eta=1"]
    )
    dataclasses.asdict(config)  # as run.json is written: no key is read by that
    compute_advantages(batch_of_one(), pickle.loads(pickle.dumps(config)).algorithm)
    assert pop_unread_keys(config) == ["algorithm.extra.unused", f"{LOSS}.extra.eta"]


def test_a_dataclass_gives_types_and_defaults_and_refuses_the_rest():
    seen = register_scaled(extra=BetaKeys)
    config = load_config(["algorithm.adv_estimator=scaled", "algorithm.extra.window=7"]).algorithm
    check_advantage(config)
    assert compute_advantages(batch_of_one(), config)["advantages"].tolist() == [0.0, 1.5]
    assert (seen[0].extra.beta, seen[0].extra["window"], seen[0].gamma) == (0.5, 7, 1.0)
    for override, message in (
        ("bet=1", r"algorithm\.extra\.bet is no key of advantage estimator 'scaled' \(BetaKeys\); did you mean 'beta'"),
        ("beta=high", r"algorithm\.extra\.beta must be float, but it is 'high'"),
        ("window=1.5", r"algorithm\.extra\.window must be int or null, but it is 1\.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_advantage(load_config(["algorithm.adv_estimator=scaled", f"algorithm.extra.{override}"]).algorithm)


def test_a_key_without_default_must_be_set_and_the_types_must_be_a_dataclass():
    @dataclass
    class Needed:
        beta: float

    register_scaled(extra=Needed)
    with pytest.raises(ConfigError, match=r"advantage estimator 'scaled' needs algorithm\.extra\.beta"):
        check_advantage(load_config(["algorithm.adv_estimator=scaled"]).algorithm)
    with pytest.raises(ConfigError, match="extra=<class 'dict'> is not a dataclass"):
        core_algos.register_policy_loss("any", extra=dict)(lambda: None)


def test_a_loss_reads_its_keys_from_the_config_that_it_gets_and_is_checked_before_the_run():
    seen = []

    @core_algos.register_policy_loss("weighted", extra=BetaKeys)
    def weighted(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        seen.append(
            (config.extra["beta"], config.policy_loss.extra.beta, config.policy_loss.get("beta"), config.rollout_n)
        )
        return core_algos.agg_loss(-log_prob * config.extra.beta, response_mask, loss_agg_mode), {}

    actor = load_config([f"{LOSS}.loss_mode=weighted", f"{LOSS}.extra.beta=2"]).actor_rollout_ref.actor
    get_policy_loss("weighted").check(actor)
    assert set(seen) == {(2.0, 2.0, 2.0, 1)}
    wrong = load_config([f"{LOSS}.loss_mode=weighted", f"{LOSS}.extra.betta=2"]).actor_rollout_ref.actor
    with pytest.raises(ConfigError, match=r"policy_loss\.extra\.betta is no key of policy loss 'weighted'"):
        get_policy_loss("weighted").check(wrong)


PLACES = [
    "",
    "data",
    "trainer",
    "critic.optim",
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout.multi_turn",
    "reward",
]


@pytest.mark.parametrize("prefix", ["+", "++"])
@pytest.mark.parametrize("place", PLACES)
def test_a_key_of_ones_own_reaches_get_in_every_section(place, prefix):
    path = f"{place}.mine".removeprefix(".")
    with pytest.warns(ConfigWarning, match=rf"\+{path} is no key of the library: it is kept as "):
        config = load_config([f"{prefix}{path}=0.25", f"{prefix}{path}_too.deep=[1]", f"{path}_too.deep=[2]"])
    for section in (config, pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        for name in filter(None, place.split(".")):
            section = section[name]
        assert section.get("mine") == section["mine"] == section.mine == 0.25 and "mine" in section
        assert section.get("mine_too").get("deep") == [2] and section.get("gone", 7) == 7
        assert not hasattr(section, "gone")


def test_keys_of_ones_own_reach_the_ranks():
    config = load_config(["+actor_rollout_ref.actor.mine=3", "+data.filter.shortest=2"])
    arrived = deserialize(serialize(config))
    assert arrived.actor_rollout_ref.actor.get("mine") == 3 and arrived.data.filter.shortest == 2
    assert arrived == config


def test_arguments_of_a_rollout_engine_of_ones_own_need_no_plus():
    kwargs = "actor_rollout_ref.rollout.engine_kwargs"
    config = load_config([f"{kwargs}.mine.cache=2", f"{kwargs}.mine.paths=[a]", f"{kwargs}.vllm.x=1"])
    found = config.actor_rollout_ref.rollout.engine_kwargs
    assert found.get("mine") == {"cache": 2, "paths": ["a"]} and found.vllm == {"x": 1}
    with pytest.raises(ConfigError, match=rf"unknown key '{kwargs}\.vlm\.x'; did you mean '{kwargs}\.vllm'"):
        load_config([f"{kwargs}.vlm.x=1"])


def test_a_section_of_ones_own_is_read_key_by_key_or_whole():
    words = ["+mine.a=1", "+mine.b.c=2", "+whole.a=1", "+never.a=1", "data.train_batch_size=8"]
    config = load_config(words)
    assert config.mine.get("a") == 1 and dict(config.get("whole")) and config.data.train_batch_size
    assert pop_unread_keys(config) == ["extra.mine.b", "extra.never"]


def test_a_policy_loss_reads_keys_of_the_actor_and_of_its_own_section():
    seen = []

    @core_algos.register_policy_loss("both")
    def both(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None):
        seen.append((config.get("eta"), config.eta, config.extra["beta"], config.get("none", 5), "eta" in config))
        return core_algos.agg_loss(-log_prob, response_mask, loss_agg_mode), {}

    actor = load_config([f"{LOSS}.loss_mode=both", f"+{LOSS}.beta=2", "+actor_rollout_ref.actor.eta=3"])
    get_policy_loss("both").check(actor.actor_rollout_ref.actor)
    assert set(seen) == {(3, 3, 2, 5, True)}
