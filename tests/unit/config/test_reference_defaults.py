"""Every key of the reference set to its own default loads, alone and all together; any other value of it does not."""

import os
import re

import pytest
import yaml

from tests.unit.config.test_foreign_keys import CONFIG_NAMES, ROOTS, reference
from verl.config import ConfigError, foreign_keys, load_config
from verl.config.overrides import parse_value

pytestmark = pytest.mark.filterwarnings("ignore::verl.config.ConfigWarning")
OTHER_ENGINES = ("megatron", "veomni", "torchtitan")


def defaults(name: str) -> dict[str, str]:
    """Key -> default as text, without keys that have none."""
    return {key: text for key, text in reference(name).items() if text not in ("", "(required)")}


def resolved(key: str, text: str, table: dict[str, str]) -> object:
    """The value of a default, followed through the keys that it refers to."""
    match = re.fullmatch(r"\$\{(?:oc\.select:)?([\w.]+)(?:,(.*))?\}", text)
    if match is None:
        return parse_value(text) if re.fullmatch(r"\d+e-\d+", text) else yaml.safe_load(text)
    target = key.rpartition(".")[0] + match[1] if match[1].startswith(".") else match[1]
    if target in table:
        return resolved(target, table[target], table)
    inside = [(k, v) for k, v in table.items() if k.startswith(target + ".")]
    below = {k.removeprefix(target + "."): resolved(k, v, table) for k, v in inside}
    return below or (resolved(key, match[2], table) if match[2] else None)


def as_text(value: object) -> str:
    """A value in the syntax of an override, its texts in quotes."""
    if isinstance(value, list):
        return "[" + ",".join(map(as_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{as_text(inner)}" for name, inner in value.items()) + "}"
    return "null" if value is None else repr(value)


def saved_file(values: dict[str, object], folder: object) -> str:
    """The folder of a preset `saved` with these values, nested as a saved configuration is."""
    tree: dict = {}
    for key, value in sorted(values.items()):  # a section before what is inside it
        *heads, leaf = key.split(".")
        inner = tree
        for head in heads:
            inner = inner.setdefault(head, {}) if isinstance(inner, dict) else {}  # a section that is a reference
        if isinstance(inner, dict):
            inner[leaf] = value
    (folder / "saved.yaml").write_text(yaml.safe_dump(tree))
    return str(folder)


@pytest.mark.parametrize("name", ROOTS)
def test_every_key_of_the_reference_loads_at_its_own_default(name):
    table, refused, count = defaults(name), [], 0
    for key, text in table.items():
        written = as_text(text) if "," in text and text[0] not in "[$" else text
        for value in {written, as_text(resolved(key, text, table))} if "$" in text else {written}:
            try:
                load_config([f"{key}={value}"], CONFIG_NAMES[name])
            except ConfigError as error:
                refused.append(f"{key}={value}: {error}")
            count += 1
    assert refused == []
    assert count > (1300 if name == "ppo" else 300)


@pytest.mark.parametrize("form", ["resolved", "with references", "overrides"])
@pytest.mark.parametrize("name", ROOTS)
def test_a_saved_full_configuration_of_the_reference_loads(name, form, tmp_path):
    table = {key: text for key, text in defaults(name).items() if not set(key.split(".")) & set(OTHER_ENGINES)}
    values = {
        key: text if form == "with references" and text.startswith("$") else resolved(key, text, table)
        for key, text in table.items()
    }
    assert len(values) > (900 if name == "ppo" else 300)
    if form == "overrides":
        config = load_config([f"{key}={as_text(value)}" for key, value in values.items()], CONFIG_NAMES[name])
    else:
        root = ROOTS[name]
        config = load_config(config_name="saved", config_dir=saved_file(values, tmp_path), root=root)
    model = config.actor_rollout_ref.model if name == "ppo" else config.model
    assert model.path == os.path.expanduser("~/models/deepseek-llm-7b-chat")
    assert config.trainer.logger == ["console", "wandb"]
    assert name == "sft" or config.actor_rollout_ref.ref.strategy == "fsdp"


def other_values(default: object) -> list[object]:
    """Values that are close to a default, but ask for something."""
    if isinstance(default, bool):
        return [not default, int(default)] if default else [True, 1]
    if isinstance(default, int | float):
        return [default + 1, *([True] if default == 1 else [])]
    if default is None or isinstance(default, list):
        return [7, True]
    return [f"{default}x", True]


@pytest.mark.parametrize("name", ROOTS)
def test_a_value_beside_the_default_of_a_refused_key_is_refused(name):
    table, accepted, count = defaults(name), [], 0
    for key, text in table.items():
        if foreign_keys.classify(key, ROOTS[name]).kind != "refused" or key.endswith(".return_multi_modal_inputs"):
            continue
        known = foreign_keys.load_foreign_keys(ROOTS[name]).defaults.get(key, [])
        for value in other_values(resolved(key, text, table)):
            if any(foreign_keys.same(value, one) for one in known):
                continue
            try:
                load_config([f"{key}={as_text(value)}"], CONFIG_NAMES[name])
                accepted.append(f"{key}={value}")
            except ConfigError:
                count += 1
    assert accepted == []
    assert count > (1000 if name == "ppo" else 200)


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.model.mtp.enable=True",
        "actor_rollout_ref.model.mtp.enable=1",
        "actor_rollout_ref.model.mtp.enable=${trainer.balance_batch}",
        "actor_rollout_ref.model.lora.rank=32",
        "critic.model.lora.type=dora",
        "reward.reward_model.rollout.mtp.enable=True",
        "data.image_patch_size=16",
        "reward.reward_model.rollout.expert_parallel_size=False0",
        "trainer.v1.separate_async.hybrid_rollout.enable_switch=True",
        "async_training.use_dynamic_resource_scheduling=True",
        "async_training.use_trainer_do_validate=True",
        "async_training.partial_rollout=False",
        "trainer.v1.sampler.custom_sampler.path=mine.py",
        "actor_rollout_ref.actor._target_=my.own.ActorConfig",
        "actor_rollout_ref.rollout.mode=sync",
    ],
)
def test_what_asks_for_something_is_refused_whatever_other_keys_default_to(override):
    with pytest.raises(ConfigError, match=r"is not supported yet|is refused"):
        load_config([override])


def test_the_last_value_of_a_refused_key_counts_and_a_tilde_takes_it_back():
    key = "actor_rollout_ref.model.mtp.enable"
    load_config([f"{key}=True", f"{key}=False"])
    load_config([f"{key}=True", f"~{key}"])
    with pytest.raises(ConfigError, match="multi-token prediction"):
        load_config([f"{key}=False", f"{key}=True"])


def test_a_refused_key_that_refers_to_another_asks_for_what_that_one_says():
    mtp = "actor_rollout_ref.rollout.mtp=${actor_rollout_ref.model.mtp}"
    load_config([mtp])
    with pytest.raises(ConfigError, match="multi-token"):
        load_config([mtp, "actor_rollout_ref.model.mtp.enable=True"])
