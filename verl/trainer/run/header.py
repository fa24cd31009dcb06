"""The lines before a run's first step and after its last. Importing this loads no heavy library."""

import contextlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl import __version__
from verl.checks.config import unusual_value_lines
from verl.config import PreferenceConfig, RewardModelConfig, RunConfig, SFTConfig
from verl.config.reward import reward_model_place
from verl.config.run_name import same_command, values_given
from verl.models.parameter_counts import stored_parameters
from verl.trainer.run.files import LEDGER, complete_steps, step_folder
from verl.trainer.run.folder import AnyConfig, RunPlace, metrics_of
from verl.utils.cores import machine_lines

_ANSWER_KEYS = (  # those that a run and `verl generate` read alike, and on which answers depend
    *(
        f"actor_rollout_ref.rollout.{name}"
        for name in ("name", "dtype", "seed", "min_tokens", "stop", "stop_token_ids")
    ),
    *(f"actor_rollout_ref.rollout.{name}" for name in ("agent", "multi_turn", "server", "engine_kwargs", "custom")),
    *(f"actor_rollout_ref.model.{name}" for name in ("external_lib", "tokenizer_path", "custom_chat_template")),
    *(f"data.{name}" for name in ("prompt_key", "answer_key", "system_prompt", "data_source", "reward_fn_key")),
    *(f"data.{name}" for name in ("truncation", "filter_overlong_prompts", "custom_cls", "tokenizer")),
    *("data.apply_chat_template_kwargs", "trainer.device"),
)
_SCORING_KEYS = ("reward", "data.prompt_key", "data.answer_key", "data.data_source")  # likewise, `verl eval`


def say(line: str) -> None:
    """Print at once, also into a pipe."""
    print(line, flush=True)


def opening_lines(config: AnyConfig, place: RunPlace) -> list[str]:
    """Lines that are known before anything is loaded: the run and its name, its model, where things go."""
    settings = config.trainer
    unsaved = "" if will_save(config) else "; saves nothing (trainer.save_freq), the trained model is lost at the end"
    first = f"run {settings.project_name}/{settings.experiment_name}: {place.state}{unsaved}"
    metrics = metrics_of(config)
    others = [name for name in settings.logger if name != "file"]
    trackers = ", ".join([*([str(metrics)] if metrics else []), *others]) or "nowhere (trainer.logger)"
    return [
        first,
        *(f"  {line}" for line in place.lines),
        f"task         {task_name(config)}, verl {__version__}",
        f"model        {describe_model(model_path(config))}",
        *(f"teacher      {describe_model(path)}" for path in teacher_paths(config)),
        *reward_model_lines(config),
        f"metrics      {trackers}",
        f"checkpoints  {settings.default_local_dir}{when_saved(config)}",
        *(
            f"{name.split('_')[0]} answers  {folder}"
            for name in ("rollout_data_dir", "validation_data_dir")
            if (folder := settings.get(name))
        ),
        *unusual_value_lines(config),
        *machine_lines(),
    ]


def task_name(config: AnyConfig) -> str:
    """The task of the run, in the field's words."""
    if isinstance(config, SFTConfig):
        loss = f" ({config.loss.name})" if isinstance(config, PreferenceConfig) else ""
        return f"{config.task}{loss}"
    estimator, distillation = config.algorithm.adv_estimator, config.distillation
    name = "PPO (GAE)" if estimator == "gae" else estimator.upper()
    if not distillation.enabled:
        return name
    divergence = distillation.distillation_loss
    return f"{f'{name} with ' if divergence.use_task_rewards else ''}distillation ({divergence.loss_mode})"


def reward_model_lines(config: AnyConfig) -> list[str]:
    """The reward model or the judge, and where it computes."""
    if not isinstance(config, RunConfig) or (place := reward_model_place(config.reward)) is None:
        return []
    settings = config.reward.reward_model
    where = "devices of its own" if settings.enable_resource_pool else "the actor's devices"
    how = "in the trainer's ranks" if place == "ranks" else f"served by {settings.rollout.name or 'native'}"
    name = "judge        " if place == "judge" else "reward model "
    return [f"{name}{describe_model(str(settings.model_path))}, {how} on {where}"]


def teacher_paths(config: AnyConfig) -> list[str]:
    """The folders of the teachers, also where `config` cannot be used: its check says why."""
    if not isinstance(config, RunConfig) or not config.distillation.enabled:
        return []
    given = [teacher for _, teacher in sorted(config.distillation.teacher_models.items())]
    return [str(teacher["model_path"]) for teacher in given if isinstance(teacher, dict) and teacher.get("model_path")]


def model_path(config: AnyConfig) -> str:
    model = config.model if isinstance(config, SFTConfig) else config.actor_rollout_ref.model
    return str(model.path)


def will_save(config: AnyConfig) -> bool:
    """Whether the run leaves a checkpoint of its last step."""
    frequency = config.trainer.save_freq
    if isinstance(config, RunConfig) and config.trainer.val_only:
        return True  # nothing is trained
    return isinstance(config, SFTConfig) or frequency is None or int(frequency) > 0


def when_saved(config: AnyConfig) -> str:
    """When checkpoints are saved, to follow their folder."""
    frequency = config.trainer.save_freq
    if isinstance(config, RunConfig) and config.trainer.val_only:
        return ", none is saved"
    if not will_save(config):
        return f": none (trainer.save_freq={frequency}; drop it to keep the last step)"
    if frequency == "after_each_epoch":
        return ", after each epoch"
    if frequency is None or int(frequency) <= 0:
        return ", the last step (trainer.save_freq=N for every N)"
    return f", every {frequency} steps and the last"


def when_validated(config: RunConfig) -> str:
    """When the rows held out are answered, to follow the number of steps."""
    settings = config.trainer
    if settings.test_freq > 0:
        return f", validation every {settings.test_freq} and at the end"
    return "" if settings.val_only else ", no validation after the first (trainer.test_freq=N)"


def describe_model(path: str) -> str:
    """Architecture and number of parameters of a model folder, as far as its files say."""
    folder, parts = Path(path).expanduser(), []
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # loading the model says what is wrong
        parts.append(str(json.loads((folder / "config.json").read_text())["architectures"][0]))
    if count := stored_parameters(folder).all:
        parts.append(f"{format_count(count)} parameters")
    return ", ".join([*parts, f"from {path}"])


def format_count(count: int) -> str:
    """596049920 -> '596M'."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def closing_lines(config: AnyConfig, summary: Sequence[str], complete: bool) -> list[str]:
    """Lines about what was reached, where everything lies, and the commands that use it."""
    if not summary:
        return []
    root = Path(config.trainer.default_local_dir)
    steps = complete_steps(root)
    lines = ["", *summary, f"folder       {root} ({_contents(root)})"]
    lines += [f"metrics      {metrics_of(config)}"] if metrics_of(config) else []
    if steps:
        actor = () if isinstance(config, SFTConfig) else ("actor",)
        model = step_folder(root, steps[-1]).joinpath(*actor, "huggingface")
        lines.append(f"model        {model}")
        more = " and a larger trainer.total_training_steps" if complete else ""
        lines.append(f"continue     {same_command(config)}{more}")
        if not isinstance(config, RewardModelConfig):
            lines.append(f"serve        verl serve model={model}")
        lines += [f"evaluate     {line}" for line in _evaluate_commands(config, model)]
    else:
        reason = "the run ended before its first checkpoint" if will_save(config) else "trainer.save_freq says so"
        lines.append(f"model        not saved: {reason}")
    return [*lines, f"report       verl report {root}"]


def _contents(root: Path) -> str:
    steps = [f"global_step_{step}" for step in complete_steps(root)]
    saved = [f"{len(steps)} checkpoints: {steps[0]} to {steps[-1]}"] if len(steps) > 2 else steps
    return ", ".join([*saved, *(name for name in (LEDGER, "validation_samples", "run.json") if (root / name).exists())])


def _evaluate_commands(config: AnyConfig, model: Path) -> list[str]:
    """Answers of the saved model to the held-out prompts, sampled as validation does, then their scores."""
    if isinstance(config, SFTConfig) or not config.data.val_files:
        return []
    data, validation = config.data, config.actor_rollout_ref.rollout.val_kwargs
    values = {
        "actor_rollout_ref.model.path": str(model),
        "data.train_files": data.val_files,
        "data.max_prompt_length": data.max_prompt_length,
        "data.max_response_length": data.max_response_length,
        "actor_rollout_ref.rollout.do_sample": validation.do_sample,
    }
    if data.val_max_samples != -1:
        values["data.train_max_samples"] = data.val_max_samples
    if validation.do_sample:
        names = ("temperature", "top_p", "top_k", "n")
        values.update({f"actor_rollout_ref.rollout.{name}": getattr(validation, name) for name in names})
    values.update(values_given(config, _ANSWER_KEYS))
    answers = "answers.jsonl"  # which holds whatever a row holds; parquet has no empty objects and no mixed types
    scoring = {"data.path": answers, **values_given(config, _SCORING_KEYS)}
    if data.reward_fn_key != "data_source":
        scoring["data.data_source_key"] = data.reward_fn_key
    generate = f"verl generate {_words(values)} data.output_path={answers}"
    return [generate] if config.reward.reward_model.enable else [generate, f"verl eval {_words(scoring)}"]


def _words(values: dict[str, Any]) -> str:
    """Overrides to paste into a shell."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return " ".join(shlex.quote(f"{key}={text}") for key, text in texts.items())
