"""Overrides and presets become the typed values a user of Hydra expects, or one clear error."""

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import import_or_skip
from verl.config import ConfigError, ConfigWarning, RunConfig, SFTConfig, load_config, schema
from verl.config.check import check_batch_divides
from verl.config.load import pop_unread_keys
from verl.config.overrides import parse_override

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-1", -1),
        ("1e-6", 1e-6),
        ("1.5", 1.5),
        (".5", 0.5),
        ("inf", float("inf")),
        ("true", True),
        ("False", False),
        ("null", None),
        ("NULL", None),
        ("word", "word"),
        ("a b", "a b"),
        ("", ""),
        ("/p/q-1.x:8080", "/p/q-1.x:8080"),
        ("'1'", "1"),
        ('"a, b"', "a, b"),
        (r"'it\'s'", "it's"),
        ("[]", []),
        ("[1, 2,[a,'b,c']]", [1, 2, ["a", "b,c"]]),
        ("{a:1,b:{c:[x]}, 'd e':null}", {"a": 1, "b": {"c": ["x"]}, "d e": None}),
        ("${trainer.project_name}/x", "${trainer.project_name}/x"),
        ("[${a.b},2]", ["${a.b}", 2]),
        (r"a\,b", "a,b"),
        ("a=b", "a=b"),
    ],
)
def test_values_parse_as_in_hydra(text, value):
    parsed = parse_override("k=" + text).value
    assert parsed == value and type(parsed) is type(value)


def test_values_agree_with_hydra_s_own_parser():
    parser = import_or_skip("hydra.core.override_parser.overrides_parser").OverridesParser.create()
    texts = [
        "1",
        "1e-6",
        "true",
        "null",
        "a/b",
        "'x, y'",
        "[1,2,[a]]",
        "{a:1,b:{c:d}}",
        "-3.5e2",
        "a b",
        "1_000",
        "nan_x",
    ]
    for text in texts:
        assert parse_override("k=" + text).value == parser.parse_override("k=" + text).value(), text


@pytest.mark.parametrize("text", ["k", "=1", "k=[1", "k={a}", "k='x", "k=a,b", "k=[1] 2", "1k=2"])
def test_text_that_is_no_override_is_one_clear_error(text):
    with pytest.raises(ConfigError, match="override"):
        load_config([text])


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_prefixes_of_hydra_all_set(prefix):
    assert load_config([f"{prefix}data.train_batch_size=8"]).data.train_batch_size == 8


def test_later_overrides_win_and_a_tilde_takes_back():
    assert load_config(["data.seed=1", "data.seed=2"]).data.seed == 2
    assert load_config(["data.seed=1", "~data.seed"]).data.seed is None
    assert load_config(["critic.ppo_epochs=3", "~critic.ppo_epochs"]).critic.ppo_epochs == 1
    given = load_config([f"+{ROLLOUT}.engine_kwargs.vllm={{a:1,b:2}}", f"~{ROLLOUT}.engine_kwargs.vllm.a"])
    assert given.actor_rollout_ref.rollout.engine_kwargs.vllm == {"b": 2}
    assert load_config(["~data.val_files"]).data.val_files is None


def test_dictionaries_merge_and_nested_ones_reach_sections():
    config = load_config(
        [
            f"{ROLLOUT}={{n: 4, val_kwargs: {{n: 2}}}}",
            "data.apply_chat_template_kwargs.a=1",
            "+data.apply_chat_template_kwargs={b:{c:2}}",
            "data.apply_chat_template_kwargs.b.d=1e-3",
        ]
    )
    assert config.actor_rollout_ref.rollout.n == 4 and config.actor_rollout_ref.rollout.val_kwargs.n == 2
    assert config.data.apply_chat_template_kwargs == {"a": 1, "b": {"c": 2, "d": 1e-3}}
    merged = load_config(["data.apply_chat_template_kwargs={b:{c:2}}", "data.apply_chat_template_kwargs={b:{d:3}}"])
    assert merged.data.apply_chat_template_kwargs == {"b": {"c": 2, "d": 3}}


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        (f"{ACTOR}.optim.lr=1", f"{ACTOR}.optim.lr", 1.0),
        (f"{ACTOR}.optim.lr='1e-6'", f"{ACTOR}.optim.lr", 1e-6),
        ("data.train_batch_size=1e3", "data.train_batch_size", 1000),
        ("trainer.experiment_name=007", "trainer.experiment_name", "007"),
        ("trainer.logger=console", "trainer.logger", ["console"]),
        ("data.train_files=a.parquet", "data.train_files", "a.parquet"),
        ("data.train_files=[a,b]", "data.train_files", ["a", "b"]),
        (f"{ACTOR}.clip_ratio_low=null", f"{ACTOR}.clip_ratio_low", 0.2),
        (
            "algorithm.rollout_correction.rollout_is_threshold=3",
            "algorithm.rollout_correction.rollout_is_threshold",
            3.0,
        ),
    ],
)
def test_values_take_the_type_of_their_key(override, path, value):
    found = load_config([override])
    for name in path.split("."):
        found = found[name]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.train_batch_size=many", "must be int"),
        ("data.train_batch_size=1.5", "must be int"),
        ("data.shuffle=1", "must be bool"),
        ("data.train_batch_size=null", "null"),
        ("data.truncation=upward", "error, left, right, middle"),
        (f"{ACTOR}.ppo_epochs=0", "at least 1"),
        (f"{ACTOR}.optim.lr_warmup_steps_ratio=1.5", "at most 1"),
        ("data=3", "section"),
        (f"{ACTOR}.optim.betas=[0.9]", "two numbers"),
        (f"{ACTOR}.checkpoint.save_contents=[model,optimiser]", "optimiser"),
    ],
)
def test_a_wrong_value_is_one_error_with_the_key_and_what_is_allowed(override, words):
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert override.split("=")[0] in str(caught.value) and words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("data.trian_batch_size", "data.train_batch_size"),
        ("actor_rollout_ref.rolout.temperature", "actor_rollout_ref.rollout.temperature"),
        ("rolout.temperature", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout_ref.actor.learning.lr", "actor_rollout_ref.actor.optim.lr"),
    ],
)
def test_an_unknown_key_names_the_key_that_was_meant_in_full(path, meant):
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load_config([f"{path}=1"])
    assert repr(meant) in str(caught.value)
    assert str(caught.value).endswith(f"A key of your own is +{path}, in a preset {own_place(path)}")


def own_place(path):
    """Where a key of the user's own is kept: below the innermost section that the library has."""
    sections = schema.sections(RunConfig)
    home = max((head for head in sections if path.startswith(head + ".")), key=len, default="")
    return f"{home}.extra.{path[len(home) :].removeprefix('.')}".removeprefix(".")


def test_keys_follow_others_unless_they_are_set():
    config = load_config(["data.max_response_length=64", f"{ACTOR}.ppo_mini_batch_size=32", f"{ACTOR}.clip_ratio=0.3"])
    assert config.actor_rollout_ref.rollout.response_length == 64 and config.critic.ppo_mini_batch_size == 32
    assert config.actor_rollout_ref.actor.clip_ratio_high == 0.3
    assert load_config([f"{ACTOR}.ppo_epochs=2", "critic.ppo_epochs=1"]).critic.ppo_epochs == 1
    for spelling in ("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"):
        both = load_config([f"{ACTOR}.{spelling}=2"]).actor_rollout_ref
        assert both.ref.fsdp_config.ulysses_sequence_parallel_size == 2


@pytest.mark.parametrize(
    ("overrides", "dynamic"),
    [
        ([], True),
        (["critic.ppo_micro_batch_size_per_gpu=2"], False),
        (["critic.ppo_micro_batch_size_per_gpu=2", f"{ACTOR}.use_dynamic_bsz=True"], True),
        (["critic.use_dynamic_bsz=True", "critic.ppo_micro_batch_size_per_gpu=2"], True),
    ],
)
def test_micro_batches_follow_a_token_budget_where_no_size_is_set(overrides, dynamic):
    assert load_config(overrides).critic.use_dynamic_bsz is dynamic


def test_an_old_spelling_sets_the_new_key_and_says_so():
    with pytest.warns(ConfigWarning, match=r"reward\.custom_reward_function\.path=") as caught:
        config = load_config(["custom_reward_function.path=f.py", "reward_model.reward_manager=dapo"])
    assert config.reward.custom_reward_function.path == "f.py" and config.reward.reward_manager.name == "dapo"
    assert len(caught) == 2


def test_old_and_new_spelling_may_agree_but_not_differ():
    pair = ["custom_reward_function.path=a.py", "reward.custom_reward_function.path=a.py"]
    with pytest.warns(ConfigWarning):
        load_config(pair)
    with pytest.raises(ConfigError, match=r"a\.py.*b\.py|b\.py.*a\.py"):
        load_config([pair[0], "reward.custom_reward_function.path=b.py"])


@pytest.mark.filterwarnings("ignore::verl.config.ConfigWarning")
def test_a_size_over_all_devices_is_shared_by_them():
    config = load_config([f"{ACTOR}.ppo_micro_batch_size=16", "trainer.n_gpus_per_node=4"])
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 4
    assert not config.actor_rollout_ref.actor.use_dynamic_bsz
    with pytest.raises(ConfigError, match=r"16 .*3"):
        load_config([f"{ACTOR}.ppo_micro_batch_size=16", "trainer.n_gpus_per_node=3", "data.train_batch_size=3"])
    for wrong in ("abc", "2.5", "0"):
        with pytest.raises(ConfigError, match=f"={wrong} must be a whole number of sequences, at least 1"):
            load_config([f"{ACTOR}.ppo_micro_batch_size={wrong}"])


@pytest.mark.filterwarnings("ignore::verl.config.ConfigWarning")
def test_a_size_over_all_devices_is_refused_once_more_are_found_than_it_was_shared_by():
    config = load_config([f"{ACTOR}.ppo_micro_batch_size=16"])
    check_batch_divides(config, 1)
    with pytest.raises(ConfigError, match=r"ppo_micro_batch_size is shared by .* 8 were found; .*n_gpus_per_node=8"):
        check_batch_divides(config, 8)
    check_batch_divides(load_config([f"{ACTOR}.ppo_micro_batch_size=16", "trainer.n_gpus_per_node=8"]), 8)


def test_a_key_without_effect_warns_and_leaves_all_else_alone():
    with pytest.warns(ConfigWarning, match="no effect"):
        assert load_config(["data.return_raw_input_ids=True"]) == load_config()


def test_shared_prompts_run_packed_and_say_so():
    packed = "actor_rollout_ref.model.use_remove_padding"
    with pytest.warns(ConfigWarning, match=f"{packed}=False has no effect: .*use_prefix_grouper=True") as caught:
        config = load_config([f"{ACTOR}.use_prefix_grouper=True", f"{packed}=False"])
    assert config.actor_rollout_ref.model.use_remove_padding is True and len(caught) == 1


def test_hf_is_another_name_of_the_native_engine():
    assert load_config([f"{ROLLOUT}.name=hf"]).actor_rollout_ref.rollout.name == "native"


def test_presets_are_found_read_and_overridden(tmp_path):
    (tmp_path / "mine.yaml").write_text("data:\n  train_batch_size: 8\n  seed: 3\ncritic: {optim: {lr: 1e-4}}\n")
    config = load_config(["data.seed=4", "--config-name=mine", "--config-dir", str(tmp_path)])
    assert (config.data.train_batch_size, config.data.seed, config.critic.optim.lr) == (8, 4, 1e-4)
    assert config._origins["data.train_batch_size"] == f"{tmp_path}/mine.yaml:2"
    assert "data.seed=4" in config._origins["data.seed"]
    assert config._origins["data.max_prompt_length"] == "default"


def test_mistakes_in_a_preset_name_the_line(tmp_path):
    (tmp_path / "twice.yaml").write_text("data:\n  seed: 1\n  seed: 2\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml:3.*data\.seed"):
        load_config(config_name="twice", config_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="sft_trainer"):
        load_config(config_name="sft_trainr")


def test_a_preset_with_defaults_is_composed_by_hydra(tmp_path):
    import_or_skip("hydra")
    (tmp_path / "base.yaml").write_text("trainer:\n  project_name: p\n")
    text = "defaults: [ppo_trainer, base, _self_]\ntrainer:\n  experiment_name: ${oc.env:VERL_TEST_NAME,e}-1\n"
    (tmp_path / "mine.yaml").write_text(text)
    trainer = load_config(config_name="mine", config_dir=str(tmp_path)).trainer
    assert (trainer.project_name, trainer.experiment_name) == ("p", "e-1")
    assert trainer.default_local_dir == "checkpoints/p/e-1"


def test_references_to_our_own_keys_need_no_omegaconf():
    code = (
        "import sys; from verl.config import load_config;"
        "c = load_config(['data.val_files=${data.train_files}', 'data.train_files=[a]',"
        " 'data.val_max_samples=${data.seed}', 'data.seed=7']);"
        "assert c.data.val_files == ['a'] and c.data.val_max_samples == 7;"
        "assert not {'omegaconf', 'hydra'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(ConfigError, match="itself"):
        load_config(["data.tokenizer=${data.tokenizer}x"])


def test_importing_and_loading_leaves_heavy_libraries_out():
    heavy = "{'torch', 'ray', 'transformers', 'vllm', 'numpy', 'hydra', 'omegaconf'}"
    code = f"import sys, verl.cli, verl.config as c; c.load_config(); assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_megatron_preset_is_recognised():
    config = load_config(config_name="ppo_megatron_trainer")
    assert config.model_engine == "megatron" and config.critic.strategy == "megatron"


def test_one_line_says_that_fsdp_is_an_alias():
    keys = ["actor_rollout_ref.actor.strategy", "critic.strategy"]
    with pytest.warns(ConfigWarning) as said:
        load_config([f"{key}=fsdp" for key in keys])
    assert [str(w.message) for w in said] == [
        f"{', '.join(keys)}: fsdp is an alias of fsdp2, whose checkpoints are the same"
    ]


def test_sft_has_its_own_root_and_engine_groups():
    config = load_config(["engine=fsdp", "optim.lr=1e-4"], "sft_trainer_engine")
    assert isinstance(config, SFTConfig) and config.optim.lr == 1e-4
    with pytest.raises(ConfigError, match="Megatron-LM engine is still to come"):
        load_config(["engine=megatron", "optim=megatron"], "sft_trainer")


def test_sections_are_frozen_and_survive_copying():
    config = load_config(["data.seed=5"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.data.seed = 6
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config.data, seed=6).seed == 6
    assert RunConfig().data.get("seed") is None and "seed" in config.data and config.data["seed"] == 5


def test_two_configurations_share_no_list():
    first, second = load_config(), load_config()
    first.trainer.logger.append("x")
    assert second.trainer.logger == load_config().trainer.logger != first.trainer.logger


def test_keys_that_nothing_read_are_reported():
    config = load_config(["data.seed=1", "data.train_batch_size=8", f"{ACTOR}.ulysses_sequence_parallel_size=1"])
    assert config.data.seed == 1 and config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size == 1
    repr(config), dataclasses.asdict(config), dataclasses.replace(config.data)
    assert pop_unread_keys(config) == ["data.train_batch_size"]


def test_reading_a_replaced_section_counts_as_reading():
    config = load_config(["data.seed=1"])
    changed = dataclasses.replace(config.data, shuffle=False)
    assert changed.seed == 1 and pop_unread_keys(config) == []


@pytest.mark.parametrize(
    "path", [p for p in Path(__file__).parents[3].glob("verl/trainer/config/*.yaml")], ids=lambda p: p.stem
)
def test_every_shipped_preset_loads(path):
    load_config(config_name=path.stem)


def test_configuration_classes_take_the_keywords_of_published_code():
    from verl.workers.config import ActorConfig, CriticConfig, FSDPOptimizerConfig

    assert ActorConfig(strategy="fsdp", rollout_n=4).rollout_n == 4 and CriticConfig(rollout_n=2).rollout_n == 2
    assert load_config([f"{ROLLOUT}.n=5"]).actor_rollout_ref.actor.rollout_n == 5
    assert FSDPOptimizerConfig(warmup_style="cosine", grad_clip=2.0).lr_scheduler_type == "cosine"
    with pytest.raises(ConfigError, match="give only lr_scheduler_type"):
        FSDPOptimizerConfig(warmup_style="cosine", lr_scheduler_type="constant")
    with pytest.raises(TypeError, match="warmup"):
        FSDPOptimizerConfig(warmup="cosine")


def test_omegaconf_makes_structured_configs_of_every_section():
    omegaconf = pytest.importorskip("omegaconf")
    import verl.config

    for name in verl.config.__all__:
        cls = getattr(verl.config, name)
        if isinstance(cls, type) and issubclass(cls, verl.config.Section) and cls is not verl.config.Section:
            omegaconf.OmegaConf.structured(cls)
            omegaconf.OmegaConf.structured(cls())
    model = omegaconf.OmegaConf.structured(verl.config.HFModelConfig)
    model = omegaconf.OmegaConf.merge(model, {"path": "m", "target_modules": ["a"]})
    assert omegaconf.OmegaConf.to_object(model) == verl.config.HFModelConfig(path="m", target_modules=["a"])


def test_every_mistake_is_said_at_once():
    with pytest.raises(ConfigError) as raised:
        load_config(
            ["data.train_batch_sise=4", "data.seed=many", "actor_rollout_ref.actor.optim.lr=1e30", "trainer.nnodes=0"]
        )
    message = str(raised.value)
    assert message.startswith("4 mistakes in the configuration:\n  1. ") and message.count("\n") == 4
    for part in ("train_batch_sise", "data.seed must be int", "optim.lr=1e+30", "trainer.nnodes=0"):
        assert part in message
