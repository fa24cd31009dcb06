"""Values that no run can mean are refused at load, with the key and what is allowed."""

import sys
from pathlib import Path

import pytest

from verl.config import ConfigError, load_config
from verl.config.check import check_can_start
from verl.config.no_effect import value_at

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{ACTOR}.optim.lr=1e30", "at least 0 and at most 100"),
        (f"{ACTOR}.optim.lr=1" + "0" * 400, "optim.lr"),
        (f"{ACTOR}.clip_ratio=inf", "finite and at least 0"),
        (f"{ACTOR}.clip_ratio_high=inf", "at least 0"),
        (f"{ACTOR}.entropy_coeff=inf", "at most 1e+06"),
        (f"{ACTOR}.entropy_coeff=-inf", "at least -1e+06"),
        (f"{ACTOR}.kl_loss_coef=inf", "at most 1e+06"),
        ("algorithm.kl_ctrl.kl_coef=inf", "at most 1e+06"),
        (f"{ROLLOUT}.temperature=inf", "finite"),
        ("data.train_max_samples=-5", "-1 (all rows) or at least 1"),
        ("data.val_max_samples=0", "-1 (all rows) or at least 1"),
        ("data.seed=-1", "at least 0 and at most 4294967295"),
        ("data.seed=4294967296", "at most 4294967295"),
        (f"{ROLLOUT}.seed=1e30", "at most 4294967295"),
        (f"{ACTOR}.data_loader_seed=-1", "at least 0"),
        (f"{ACTOR}.fsdp_config.seed=99999999999", "at most 4294967295"),
        (f"{ROLLOUT}.n=100000000", "at most 65536"),
        (f"{ROLLOUT}.val_kwargs.n=100000000", "at most 65536"),
        ("trainer.total_training_steps=" + "9" * 30, "total_training_steps"),
        ("trainer.total_training_steps=" + "9" * 5000, "total_training_steps"),
        ("trainer.save_freq=" + "9" * 30, "usual size"),
        (f"{CORRECTION}.rollout_is_threshold=abc", "above 0, or lo_hi"),
        (f"{CORRECTION}.rollout_is_threshold=5_1", "above 0, or lo_hi"),
        (f"{CORRECTION}.rollout_is_threshold=-1", "above 0, or lo_hi"),
        (f"{CORRECTION}.rollout_rs_threshold='0.5_2,x'", "above 0, or lo_hi"),
        (f"{CORRECTION}.rollout_rs='token_k1,token_k9'", "'token_k9'"),
        ("data.train_batch_size=\uff11\uff12", "must be int"),
        ("data.train_batch_size=\u0661\u0662", "must be int"),
        (f"{ACTOR}.optim.lr='\u0661'", "must be float"),
        ("trainer.project_name=", "must name something"),
        ("trainer.default_local_dir=", "must name something"),
        ("trainer.logger=['']", "must name something"),
        ("data.prompt_key=''", "must name something"),
        ("data.tokenizer=", "must name something, or be null"),
        ("trainer.project_name=../../escape", "must stay inside its own"),
        ("trainer.experiment_name=/tmp/escape", "must stay inside its own"),
        ("trainer.experiment_name=a/../../b", "must stay inside its own"),
        (f"{MODEL}.target_modules=[q_proj]", "lora_rank above 0"),
        (f"{MODEL}.exclude_modules=head", "lora_rank above 0"),
        ("critic.model.target_modules=[q_proj]", "critic.model.lora_rank above 0"),
        (f"{MODEL}.path=~nouser-here/model", "there is no user 'nouser-here'"),
        ("data.train_files=[a,~nouser-here/b]", "there is no user 'nouser-here'"),
        ("trainer.default_local_dir=~nouser-here/c", "there is no user 'nouser-here'"),
        ("data.tokenizer=~nouser-here", "there is no user 'nouser-here'"),
    ],
    ids=lambda value: value[:60] if "=" in value else "",
)
def test_a_value_out_of_range_is_one_error_with_what_is_allowed(override, words):
    with pytest.raises(ConfigError) as caught:
        load_config([override])
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::verl.config.ConfigWarning")
@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ACTOR}.optim.clip_grad=inf"],
        [f"{ACTOR}.policy_loss.clip_cov_ub=inf"],
        ["data.seed=0"],
        ["data.seed=4294967295"],
        ["data.train_max_samples=-1", "data.val_max_samples=3"],
        ["trainer.project_name=team/verl", "trainer.experiment_name=run..2"],
        [f"{CORRECTION}.rollout_is_threshold='0.5_5.0'"],
        [f"{CORRECTION}.rollout_rs='token_k1, seq_max_k3'", f"{CORRECTION}.rollout_rs_threshold='0.5_2,0.1'"],
        [f"{MODEL}.target_modules=[q_proj]", f"{MODEL}.lora_rank=4"],
        [f"{MODEL}.exclude_modules=head", f"{MODEL}.lora_adapter_path=/a"],
        [f"{ROLLOUT}.stop=['\n', ' ']"],
        [f"{MODEL}.path=~/m"],
    ],
)
def test_unusual_values_that_mean_something_load(overrides):
    load_config(overrides)


def test_another_tokenizer_is_the_run_s_own_and_must_be_there(tmp_path):
    config = load_config([f"data.tokenizer={tmp_path}", f"{MODEL}.path=/m"])
    assert config.actor_rollout_ref.model.tokenizer_path == str(tmp_path)
    check_can_start(config)
    with pytest.raises(ConfigError, match=r"data\.tokenizer=/nowhere/at/all is not a folder"):
        check_can_start(load_config(["data.tokenizer=/nowhere/at/all", f"{MODEL}.path=/m"]))
    with pytest.raises(ConfigError, match="name two tokenizers"):
        load_config([f"data.tokenizer={tmp_path}", f"{MODEL}.tokenizer_path=/other"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe\x00binary\x80", "is not text"),
        (b"data: {seed: 1}\x00", "is not valid YAML"),
        (b"data: " + b"[" * 1000 + b"]" * 1000, "64 levels deep"),
        (b"data: " + b"{a: " * 1000 + b"1" + b"}" * 1000, "64 levels deep"),
        (b"data: &x\n  seed: *x\n", "a list or dictionary that holds it"),
        (b"data:\n  apply_chat_template_kwargs: {a: &x [*x]}\n", "a list or dictionary that holds it"),
        (b"data: {seed: 2026-99-99}", "holds a value that cannot be read"),
    ],
    ids=["binary", "null byte", "lists", "dictionaries", "alias of itself", "list of itself", "date"],
)
def test_a_preset_that_cannot_be_read_is_one_error_with_its_name(content, words, tmp_path: Path):
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(config_name="mine", config_dir=str(tmp_path))
    assert words in str(caught.value) and "mine.yaml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "data.apply_chat_template_kwargs.a=" + "[" * 5000 + "]" * 5000,
        "data.apply_chat_template_kwargs=" + "{a:" * 5000 + "1" + "}" * 5000,
        "data.apply_chat_template_kwargs" + ".a" * 5000 + "=1",
    ],
    ids=["lists", "dictionaries", "names"],
)
def test_an_override_nested_too_deep_is_one_short_error(override):
    assert sys.getrecursionlimit() < 5000
    with pytest.raises(ConfigError, match="64 levels deep") as caught:
        load_config([override])
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("key", ["trainer.default_local_dir", "data.train_files", "reward.custom_reward_function.path"])
def test_a_path_below_the_home_folder_is_expanded_as_a_shell_does(key, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ann")
    config = load_config([f"{key}=~/things"])
    assert value_at(config, key) in ("/home/ann/things", ["/home/ann/things"])


def test_a_preset_folder_of_an_unknown_user_is_one_error():
    with pytest.raises(ConfigError, match="there is no user 'nouser-here'"):
        load_config(["--config-dir=~nouser-here/presets", "--config-name=mine"])
