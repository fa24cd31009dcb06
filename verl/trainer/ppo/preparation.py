"""Everything of a run that can be read and checked before its ranks start."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.agent import single_turn
from verl.agent.agent_runner import AgentRunner
from verl.agent.tool_agent import TOOL_AGENT
from verl.checks.findings import Findings
from verl.checks.loaded import (
    TrainedModel,
    check_disk_room,
    check_engine_and_algorithm,
    find_device,
    find_tokenizer,
    warn_of_narrow_parameters,
)
from verl.checks.machine import (
    FUNCTION,
    MANAGER,
    MODEL_KEY,
    REWARD_MODEL,
    ROWS_CLASS,
    check_rollout_engine,
    data_files_by_key,
)
from verl.config import RunConfig
from verl.config.check import uses_critic
from verl.config.reward import reward_model_place, uses_built_in_scorers
from verl.data.prompts import PromptDataset, train_prompts, validation_prompts
from verl.models.load import load_tokenizer
from verl.observe.tracing.backends import check_trace_backend
from verl.placement.plan import Plan
from verl.placement.pools import plan_run, pools_of
from verl.plugin.platform import get_platform
from verl.rewards.base import NoScorerError, Reward
from verl.rewards.model_reward import ModelReward
from verl.rewards.model_setup import build_model_reward, judge_keywords, takes_turns
from verl.rewards.reward_setup import build_reward
from verl.rewards.scorer_lookup import find_scorer
from verl.runtime.pools import describe_pools
from verl.trainer.ppo.distillation_setup import assign_teachers, check_teachers
from verl.trainer.ppo.facts import RunFacts
from verl.trainer.ppo.parking_setup import NO, check_parking, parks
from verl.trainer.ppo.profiled_steps import check_profiling, idle_profilers
from verl.trainer.ppo.rollout_setup import check_rollout_engine_can_train
from verl.utils.errors import ConfigError, DataError
from verl.utils.external_code import import_external
from verl.utils.paths import make_writable_folder
from verl.workers.engine.rng import seed_generators
from verl.workers.rollout.engines import find_rollout_engine
from verl.workers.rollout.registry import Weights
from verl.workers.rollout.remote.http_server import free_port

LENGTH_KEYS = "data.max_prompt_length + data.max_response_length"


@dataclass(frozen=True)
class Preparation:
    """The driver's side of a run without its ranks: tokenizer, rows, reward. The rows are read once, here."""

    facts: RunFacts
    agent_runner: AgentRunner
    prompts: PromptDataset
    validation: PromptDataset | None
    reward: Reward
    model_reward: ModelReward | None = None  # the part of `reward` that a reward model gives, without its backend
    judge_port: int = 0  # of this machine, for the judge; 0: there is none
    judge_keywords: Mapping[str, Any] = field(default_factory=dict)  # with which the reward function is called then
    teacher_of_row: dict[int, str] | None = None  # names of teachers; None: no teacher, or one for all rows

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.agent_runner.tokenizer


def prepare_run(config: RunConfig, found: Findings) -> Preparation | None:
    """The preparation of a run; None where `found` holds a refusal. Each check runs whose needs are met.

    `found` comes from `early_findings`. It also seeds the driver's random generators.
    """
    arr, data = config.actor_rollout_ref, config.data
    plan = _check_machine(config, found)
    seed_generators(arr.actor.engine.seed)  # of the driver, where rewards and agents run
    if found.check("external_lib", lambda: import_external(arr.model.external_lib)):
        check_engine_and_algorithm(config, found)
    found.check("rollout", lambda: check_rollout_engine_can_train(arr), arr.rollout.name)
    if plan is not None and not found.errors:
        parked = "none" if parks(config) == NO else "kept"
        found.check("unfinished answers", lambda: check_parking(config), parked)
    longest = data.max_prompt_length + data.max_response_length
    tokenizer = find_tokenizer(MODEL_KEY, arr.model, longest, LENGTH_KEYS, found)
    files = {key for key in data_files_by_key(config) if not found.has_refused(key, ROWS_CLASS)}
    if tokenizer is None:
        return None
    model_reward, judge, reward = _find_reward(config, tokenizer, found)
    runner = found.run("agent loops", lambda: AgentRunner(config, tokenizer), lambda r: r.loop_name(None))
    if runner is None:
        return None
    prompts, validation = _read_rows(config, runner, files, found)
    teacher_of_row = None
    if config.distillation.enabled and not found.errors:
        check_teachers(config, tokenizer, found)
        if prompts is not None:
            teacher_of_row = found.run("rows of teachers", lambda: assign_teachers(config, prompts), _teachers_text)
    _check_trained_models(config, found)
    if found.errors or plan is None or reward is None or prompts is None:
        return None
    facts = RunFacts.of(config, plan)
    return Preparation(facts, runner, prompts, validation, reward, model_reward, *judge, teacher_of_row)


def _find_reward(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, found: Findings
) -> tuple[ModelReward | None, tuple[int, dict[str, Any]], Reward | None]:
    """The reward model, if there is one, the port of a judge and what its function is called with, and the whole
    reward, which on Ray is built anew when the judge's machine is known."""
    model, port, keywords, path = None, 0, dict[str, Any](), str(config.reward.reward_model.model_path)
    if (place := reward_model_place(config.reward)) == "judge":
        port = free_port()
        judge = found.run(REWARD_MODEL, lambda: judge_keywords(config.reward.reward_model, port), lambda _: path)
        keywords = judge or {}
    elif place is not None:
        shares = takes_turns(config.reward, get_platform().device_name != "cpu")
        model = found.run(REWARD_MODEL, lambda: build_model_reward(config, tokenizer, shares), lambda _: path)
        if model is None:
            return None, (0, {}), None
    if found.has_refused(FUNCTION, MANAGER):
        return model, (port, keywords), None
    name = config.reward.reward_manager.name
    reward = found.run("reward", lambda: build_reward(config, tokenizer, model, keywords), lambda _: name)
    return model, (port, keywords), reward


def _check_machine(config: RunConfig, found: Findings) -> Plan | None:
    """The plan of the devices, if there is one; trackers, and the folders of dumps, which are made."""
    settings, plan = config.trainer, None
    found.check("processes", _check_started_once, "one process, which starts its ranks")
    if find_device(settings.device, found) is not None and not found.has_refused("features"):
        plan = found.run("trainer.n_gpus_per_node", lambda: plan_run(config), lambda p: describe_pools(pools_of(p)))
    if plan is not None:
        for note in plan.notes:
            found.warn("placement", note)
        pools = pools_of(plan)
        if found.check("profiler", lambda: check_profiling(config, plan)):
            for warning in idle_profilers(config, pools):
                found.warn("profiler", warning)
    for name, folder in (("rollout", settings.rollout_data_dir), ("validation", settings.validation_data_dir)):
        if folder:
            key = f"trainer.{name}_data_dir"
            found.run(key, partial(make_writable_folder, folder, key))
    backend = config.actor_rollout_ref.rollout.trace.backend
    found.check("rollout.trace", lambda: check_trace_backend(backend), backend or "off")
    return plan


def _check_started_once() -> None:
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"torchrun started this program {os.environ['WORLD_SIZE']} times, and each would be a run of its own in "
            "the same folder: main_ppo starts its ranks itself; start it once, with trainer.n_gpus_per_node=N"
        )


def _read_rows(
    config: RunConfig, runner: AgentRunner, files: set[str], found: Findings
) -> tuple[PromptDataset | None, PromptDataset | None]:
    """The rows of training and of validation in `files`, whose scorers are looked up."""
    data, count = config.data, runner.tool_prompt_tokens
    prompts = validation = None
    if "data.train_files" in files:
        prompts = found.run("training rows", lambda: train_prompts(data, runner.tokenizer, count), _rows_text)
    is_said = found.has_refused("training rows") and data.val_files == data.train_files
    if "data.val_files" in files and not is_said:
        validation = found.run("validation rows", lambda: validation_prompts(data, runner.tokenizer, count), _rows_text)
    for rows in (prompts, validation):
        if rows is not None and uses_built_in_scorers(config.reward):
            _check_scorers(config, runner, rows, found)
    return prompts, validation


def _check_scorers(config: RunConfig, runner: AgentRunner, rows: PromptDataset, found: Findings) -> None:
    """A refusal for each `data_source` that has no scorer; a doubt where a loop or manager of the user may score."""
    reward = config.reward
    scores_here = runner.loop_name(None) in (single_turn.NAME, TOOL_AGENT) and not runner.configured_loops
    is_needed = scores_here and reward.reward_manager.name in ("naive", "gdpo", "dapo") and reward.on_error == "stop"
    for source, location in rows.data_sources.items():
        try:
            find_scorer(source, reward.scorer)
        except (NoScorerError, ConfigError) as error:
            text = f"{location}: {error}"
            if is_needed:
                found.refusal("scorers", DataError(text))
            else:
                found.warn("scorers", text)


def _teachers_text(teacher_of_row: dict[int, str] | None) -> str:
    if teacher_of_row is None:
        return "one teacher for all"
    names = list(teacher_of_row.values())
    return ", ".join(f"{name}: {names.count(name)}" for name in sorted(set(names)))


def _rows_text(rows: PromptDataset) -> str:
    return rows.summary.line()


def _check_trained_models(config: RunConfig, found: Findings) -> None:
    arr, settings = config.actor_rollout_ref, config.trainer
    trained = [TrainedModel(arr.model, arr.actor.engine, arr.actor.checkpoint)]
    if uses_critic(config):
        trained.append(TrainedModel(config.critic.model, config.critic.engine, config.critic.checkpoint))
    warn_of_narrow_parameters(trained, found)
    if settings.save_freq is None or settings.save_freq > 0:
        check_disk_room(settings.default_local_dir, trained, settings.max_actor_ckpt_to_keep, found)


def find_tokenizer_to_generate(config: RunConfig, found: Findings) -> Any:
    """The tokenizer of a command that samples without training; `found` says whether engine and model are there."""
    arr, data = config.actor_rollout_ref, config.data
    found.check("external_lib", lambda: import_external(arr.model.external_lib))
    if (
        check_rollout_engine(arr, found) and find_rollout_engine(arr.rollout.name).weights is Weights.REMOTE
    ):  # the tokenizer is here
        return found.run("tokenizer", lambda: load_tokenizer(arr.model), lambda t: f"{len(t)} tokens")
    longest = data.max_prompt_length + data.max_response_length
    return find_tokenizer(MODEL_KEY, arr.model, longest, LENGTH_KEYS, found)
