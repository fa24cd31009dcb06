"""Every key of the reference is exactly one of read, alias, inert or refused, and no default differs unannounced."""

import fnmatch
from pathlib import Path

import pytest
import yaml

from verl.config import ConfigError, RunConfig, SFTConfig, foreign_keys, load_config, schema
from verl.config.explain import DIFFERENT_DEFAULTS

FOLDER = Path(__file__).parent / "config_keys"
ROOTS = {"ppo": RunConfig, "sft": SFTConfig}
CONFIG_NAMES = {"ppo": "ppo_trainer", "sft": "sft_trainer"}


def reference(name: str) -> dict[str, str]:
    """Key -> default of the reference as text: YAML, ${...} for the value of another key, '' where there is none."""
    lines = (FOLDER / f"{name}.tsv").read_text().splitlines()
    return dict(line.split("\t") for line in lines)


@pytest.mark.parametrize("name", ROOTS)
def test_no_key_of_the_reference_is_unclassified(name):
    keys = reference(name)
    assert len(keys) > 300
    assert [key for key in keys if foreign_keys.classify(key, ROOTS[name]).kind == "unknown"] == []


@pytest.mark.parametrize("name", ROOTS)
def test_no_key_is_classified_twice(name):
    root, twice = ROOTS[name], []
    for key in reference(name):
        if key.endswith("._target_"):  # named one by one, also inside sections that a pattern covers
            continue
        found = [schema.owning_key(key, root) is not None, key in foreign_keys.load_foreign_keys(root).exact]
        if sum(found) + len(foreign_keys.matching_patterns(key, root)) > 1:
            twice.append(key)
    assert twice == []


@pytest.mark.parametrize("root", ROOTS.values())
def test_every_foreign_key_is_outside_the_schema_and_every_alias_leads_to_a_known_key(root):
    table = foreign_keys.load_foreign_keys(root)
    assert [key for key in table.exact if schema.owning_key(key, root)] == []
    kinds = {
        k: foreign_keys.classify(rule.target, root).kind for k, rule in table.exact.items() if rule.kind == "alias"
    }
    assert set(kinds.values()) <= {"read", "refused"}


@pytest.mark.parametrize("root", ROOTS.values())
def test_values_still_to_come_belong_to_keys_of_the_schema(root):
    table = foreign_keys.load_foreign_keys(root)
    assert [key for key in (*table.planned, *table.values) if key not in schema.keys(root)] == []


@pytest.mark.parametrize("name", ROOTS)
def test_a_key_still_to_come_says_so(name):
    root, checked = ROOTS[name], 0
    for key in reference(name):
        rule = foreign_keys.classify(key, root)
        if rule.kind == "refused" and rule.planned:
            with pytest.raises(ConfigError, match=r"is not supported yet: .* is still to come \(docs/") as caught:
                load_config([f"{key}=7777"], CONFIG_NAMES[name])
            assert str(caught.value).startswith(f"{key}=7777 ")
            checked += 1
    assert checked > 150


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROOTS)
def test_asking_for_nothing_is_accepted_for_every_refused_switch(name):
    root = ROOTS[name]
    keys = reference(name)
    switches = [
        k for k, default in keys.items() if default == "false" and foreign_keys.classify(k, root).kind == "refused"
    ]
    assert len(switches) > 10
    load_config([f"{key}=False" for key in switches], CONFIG_NAMES[name])


@pytest.mark.parametrize("name", ROOTS)
def test_every_default_is_the_reference_s_or_stands_in_the_table_of_differences(name):
    root, wrong = ROOTS[name], []
    announced = [p.split(" ")[0] for key, *_ in DIFFERENT_DEFAULTS for p in key.split(", ")]
    for path, text in reference(name).items():
        key = schema.keys(root).get(path)
        if key is None or text[:1] in ("", "$") or any(fnmatch.fnmatch(path, pattern) for pattern in announced):
            continue
        ours = schema.keys(root)[key.follows].default if key.follows else key.default
        theirs = None if text == "null" else yaml.safe_load(text)
        if isinstance(ours, float) and theirs is not None:
            theirs = float(theirs)
        if ours != theirs:
            wrong.append((path, theirs, ours))
    assert wrong == []
