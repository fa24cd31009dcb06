"""Which keys of a resumed run differ from the saved ones, and which of them change its result."""

import pytest

from verl.config import load_config
from verl.observe.run_changes import as_saved, change_lines, find_changes, results_change

MODEL, TUNED = "actor_rollout_ref.model.path=m", "model.path=m"


@pytest.mark.parametrize(
    ("override", "matters"),
    [
        ("trainer.total_training_steps=9", False),
        ("trainer.logger=[console]", False),
        ("trainer.default_local_dir=elsewhere", False),
        ("trainer.n_gpus_per_node=2", False),
        ("critic.n_gpus_per_node=2", False),
        ("actor_rollout_ref.actor.optim.total_training_steps=9", False),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096", False),
        ("actor_rollout_ref.actor.checkpoint.async_save=True", False),
        ("trainer.critic_warmup=3", True),
        ("actor_rollout_ref.actor.optim.lr=0.5", True),
        ("actor_rollout_ref.rollout.n=3", True),
        ("actor_rollout_ref.rollout.val_kwargs.temperature=0.5", True),
        ("data.train_files=other.parquet", True),
    ],
)
def test_a_key_that_differs_is_named_with_whether_it_matters(override: str, matters: bool):
    saved = as_saved(load_config([MODEL]))
    changes = find_changes(saved, load_config([MODEL, override]))
    assert override.split("=")[0] in [change.key for change in changes]  # others may follow it
    assert bool(results_change(changes)) == matters
    assert change_lines(changes)[0].startswith("changes the result: " if matters else "may change: ")


def test_the_same_configuration_of_another_day_or_version_has_no_changes():
    saved = as_saved(load_config([MODEL]))
    del saved["data"]["train_batch_size"]  # a key that an earlier version did not have
    saved["data"]["gone"] = 1
    assert find_changes(saved, load_config([MODEL])) == []


def test_fine_tuning_in_the_folder_of_reinforcement_learning_is_another_configuration():
    saved = as_saved(load_config([MODEL]))
    changes = find_changes(saved, load_config([TUNED], config_name="sft_trainer"))
    assert [change.key for change in results_change(changes)] == ["command"]
