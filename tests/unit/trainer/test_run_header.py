"""The lines before a run's first step."""

import shlex
from pathlib import Path

import pytest

from verl.config import RunConfig, SFTConfig, load_config
from verl.trainer.ppo.rollout_setup import training_sampling, validation_sampling
from verl.trainer.run.folder import RunPlace
from verl.trainer.run.header import closing_lines, format_count, opening_lines, when_validated

MODEL = "actor_rollout_ref.model.path=nowhere"


@pytest.mark.parametrize(
    ("override", "first", "where"),
    [
        ("trainer.save_freq=null", "", "the last step"),
        ("trainer.save_freq=7", "", "every 7 steps and the last"),
        ("trainer.save_freq=-1", "saves nothing", "none (trainer.save_freq=-1"),
        ("trainer.save_freq=0", "saves nothing", "none (trainer.save_freq=0"),
    ],
)
def test_the_first_line_says_when_the_model_will_be_lost(override: str, first: str, where: str):
    lines = opening_lines(load_config([MODEL, override]), RunPlace("new"))
    assert ("saves nothing" in lines[0]) == bool(first) and lines[0].startswith("run verl_examples/ppo-")
    assert where in next(line for line in lines if line.startswith("checkpoints"))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.test_freq=5", ", validation every 5 and at the end"),
        ("trainer.test_freq=-1", ", no validation after the first (trainer.test_freq=N)"),
        ("trainer.test_freq=0", ", no validation after the first (trainer.test_freq=N)"),
        ("trainer.val_only=True", ""),
    ],
)
def test_a_run_says_that_its_trained_model_is_not_validated(override: str, said: str):
    assert when_validated(load_config([MODEL, "data.val_files=v", override])) == said


@pytest.mark.parametrize("preset", ["ppo_trainer", "sft_trainer"])
def test_the_header_says_that_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch, preset: str):
    key, root = ("model.path=nowhere", SFTConfig) if preset == "sft_trainer" else (MODEL, RunConfig)
    for load, is_busy in ((1e6, True), (0.0, False)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        lines = opening_lines(load_config([key], config_name=preset, root=root), RunPlace("new"))
        assert any(line.startswith("machine      busy: load 1000000.0 on") for line in lines) == is_busy


def test_the_runs_of_the_readme_validate_the_model_that_they_train():
    readme = Path(__file__).parents[3].joinpath("README.md").read_text()
    commands = [text.split("```")[0] for text in readme.split("python3 -m verl.trainer.main_ppo")[1:]]
    assert len(commands) == 2
    for command in commands:
        overrides = [word for word in command.split() if word != "\\"]
        config = load_config(overrides)
        assert "data.val_files" in command and config.trainer.test_freq > 0, command


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("distillation.enabled=True", "GRPO with distillation (k3),"),
        ("distillation.distillation_loss.use_task_rewards=False", "distillation (k3),"),
    ],
)
def test_the_header_names_the_distillation_and_its_teachers(override: str, said: str):
    teachers = [f"+distillation.teacher_models.{name}.model_path={name}s" for name in ("b", "a")]
    keys = [MODEL, "algorithm.adv_estimator=grpo", "distillation.enabled=True", override, *teachers]
    lines = opening_lines(load_config(keys), RunPlace("new"))
    assert next(line for line in lines if line.startswith("task")).split(maxsplit=1)[1].startswith(said)
    named = [line.split(maxsplit=1)[1] for line in lines if line.startswith("teacher")]
    assert named == ["from as", "from bs"]
    off = opening_lines(load_config([*keys, "distillation.enabled=False"]), RunPlace("new"))
    assert not any(line.startswith("teacher") or "distillation" in line for line in off)


def test_fine_tuning_always_saves_its_last_step():
    lines = opening_lines(load_config(["model.path=m"], config_name="sft_trainer"), RunPlace("new"))
    assert "saves nothing" not in lines[0]
    assert any(line.startswith("checkpoints") and "the last step" in line for line in lines)


@pytest.mark.parametrize(("complete", "more"), [(True, " and a larger trainer.total_training_steps"), (False, "")])
def test_only_a_complete_run_needs_more_steps_to_continue(tmp_path: Path, complete: bool, more: str):
    (tmp_path / "global_step_4").mkdir()
    (tmp_path / "global_step_4" / "trainer.json").write_text("{}")
    config = load_config([MODEL, f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=X"])
    lines = closing_lines(config, ["done"], complete)
    assert f"continue     the same command with trainer.experiment_name=X{more}" in lines


def test_the_folder_line_begins_with_the_path_alone_and_counts_what_it_does_not_name(tmp_path: Path):
    config = load_config([MODEL, f"trainer.default_local_dir={tmp_path}", "trainer.experiment_name=X"])
    said = []
    for step in (4, 5, 10):
        (tmp_path / f"global_step_{step}").mkdir()
        (tmp_path / f"global_step_{step}" / "trainer.json").write_text("{}")
        said += [line.split(maxsplit=2)[1:] for line in closing_lines(config, ["x"], True) if line.startswith("folder")]
    assert said == [
        [str(tmp_path), "(global_step_4)"],
        [str(tmp_path), "(global_step_4, global_step_5)"],
        [str(tmp_path), "(3 checkpoints: global_step_4 to global_step_10)"],
    ]


def test_counts_are_short():
    assert [format_count(n) for n in (12, 16_040, 596_049_920, 8_190_735_360)] == ["12", "16k", "596M", "8.19B"]


def test_the_commands_that_evaluate_sample_as_validation_does(tmp_path: Path):
    (tmp_path / "global_step_4").mkdir()
    (tmp_path / "global_step_4" / "trainer.json").write_text("{}")
    val = "actor_rollout_ref.rollout.val_kwargs"
    given = [f"{val}.do_sample=True", f"{val}.temperature=0.7", f"{val}.top_p=0.9", f"{val}.n=4"]
    given += ["actor_rollout_ref.rollout.stop=[a b, c]", 'data.apply_chat_template_kwargs={"enable_thinking": false}']
    given += ["actor_rollout_ref.rollout.n=16"]
    config = load_config([MODEL, f"trainer.default_local_dir={tmp_path}", "data.val_files=[v 1, w]", *given])
    lines = [line.split(maxsplit=1)[1] for line in closing_lines(config, ["done"], True) if line.startswith("evaluate")]
    printed = load_config(shlex.split(lines[0])[2:])
    training, held_out = training_sampling(printed.actor_rollout_ref.rollout), config.actor_rollout_ref.rollout
    assert training == validation_sampling(held_out) and training.n == 4 and training.stop == ("a b", "c")
    assert printed.data.train_files == config.data.val_files
    assert printed.data.apply_chat_template_kwargs == {"enable_thinking": False}
