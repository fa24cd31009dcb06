"""Runs the agent loop of each data row and returns its trajectories."""

import asyncio
import functools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.agent import single_turn
from verl.agent.interactions import load_interactions
from verl.agent.loop import AGENT_LOOPS, CLASS, LOOPS_OF_CLASSES, AgentLoop, LoopSetting
from verl.agent.loop_limits import bounded_run
from verl.agent.policy import Policy
from verl.agent.tool_agent import TOOL_AGENT
from verl.agent.tool_parsers import TOOL_PARSERS
from verl.agent.tools import load_tools, read_yaml
from verl.config.run_config import RunConfig
from verl.data.prompts import PromptRow
from verl.data.trajectory import Trajectory
from verl.observe.tracing.recorder import TracedPrompt, TraceRecorder
from verl.utils.errors import ConfigError, DataError
from verl.utils.external_code import load_object
from verl.workers.rollout.base import RolloutEngine, SamplingParams


class AgentRunner:
    """Runs the loop that a row's `agent_name` selects, else `rollout.agent.default_agent_loop`."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase):
        self.config, self.tokenizer = config, tokenizer
        rollout = config.actor_rollout_ref.rollout
        self.default_loop = rollout.agent.default_agent_loop
        self.configured_loops = load_agent_loops(rollout.agent.agent_loop_config_path)
        self.tools = load_tools(rollout.multi_turn.tool_config_path, rollout.multi_turn.function_tool_path)
        self.setting = LoopSetting(config, tokenizer, self.tools)
        load_interactions(rollout.multi_turn.interaction_config_path)
        self.loop(self.default_loop)  # an unknown default loop or format fails before the run
        TOOL_PARSERS.get(rollout.multi_turn.format)

    def loop(self, name: str) -> AgentLoop | None:
        """The loop called `name`; None for the built-in single turn."""
        if name in self.configured_loops:
            return self.configured_loops[name]
        return None if name == single_turn.NAME and name not in AGENT_LOOPS else AGENT_LOOPS.get(name)

    def tool_prompt_tokens(self, agent_name: str | None) -> int:
        """Number of tokens that tool descriptions add to a row's prompt; ConfigError where its loop is unknown."""
        return 0 if self.loop(self.loop_name(agent_name)) is None else self._tool_description_tokens

    @functools.cached_property
    def _tool_description_tokens(self) -> int:
        if not self.tools:
            return 0
        templates = (replace(self.setting, tools=tools).incremental_template() for tools in (self.tools, {}))
        with_tools, without = (len(t.initial_tokens([{"role": "user", "content": "?"}])) for t in templates)
        return with_tools - without

    def loop_name(self, agent_name: str | None) -> str:
        """Name of the loop for a row with this `agent_name`."""
        if agent_name:
            return agent_name
        turns = self.config.actor_rollout_ref.rollout.multi_turn
        if (turns.enable or turns.interaction_config_path) and self.default_loop == single_turn.NAME:
            return TOOL_AGENT
        return self.default_loop

    async def answer(
        self,
        row: PromptRow,
        request_id: int,
        sampling: SamplingParams,
        engine: RolloutEngine,
        traces: TraceRecorder | None = None,
    ) -> list[Trajectory]:
        """Trajectories of `sampling.n` conversations; a loop may return several trajectories per conversation."""
        traced = None
        if traces is not None:
            attributes = {"row": row.index, "data_source": row.data_source}
            traced = traces.prompt(request_id, engine.version, {"prompt": row.messages}, attributes)
        loop = self.loop(self.loop_name(row.agent_name))
        if loop is None:
            trajectories = await single_turn.single_turn(row, request_id, sampling, engine)
            if traced is not None:
                traced.add_single_turns(single_turn.NAME, trajectories)
        else:
            rollout = self.config.actor_rollout_ref.rollout
            most = rollout.max_model_len or rollout.prompt_length + rollout.response_length
            policies = [Policy(engine, sampling, most, request_id, sample) for sample in range(sampling.n)]
            several = await asyncio.gather(*(self._converse(loop, row, policy, traced) for policy in policies))
            trajectories = [t for of_sample in several for t in of_sample]
        if traced is not None:
            traced.answered()
        return trajectories

    async def _converse(
        self, loop: AgentLoop, row: PromptRow, policy: Policy, traced: TracedPrompt | None
    ) -> list[Trajectory]:
        name, timeout_s = self.loop_name(row.agent_name), self.config.actor_rollout_ref.rollout.agent.timeout_s
        what = f"agent loop {name} on {row.location}"
        with nullcontext() if traced is None else traced.conversation(name, policy.sample) as conversation:
            try:
                trajectories = await bounded_run(loop(self.setting, policy, row), policy, timeout_s, what)
            except DataError as error:
                raise DataError(f"{what}: {error}") from error
            if conversation is not None:
                conversation.size = len(trajectories)
        return trajectories


def load_agent_loops(path: str | None) -> dict[str, AgentLoop]:
    """Loops by name, from a YAML list of `name`, `_target_: package.Class` and constructor arguments."""
    if path is None:
        return {}
    key = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    entries = read_yaml(path, key)
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) and {"name", "_target_"} <= e.keys() for e in entries
    ):
        raise ConfigError(f"{key}={path}: expected a list of entries with `name` and `_target_`")
    names = [str(entry["name"]) for entry in entries]
    duplicates = [name for name in names if names.count(name) > 1]
    if duplicates:
        raise ConfigError(f"{key}={path}: two loops are called {duplicates[0]!r}; give one another name")
    return {name: _loop_of_entry(entry, path) for name, entry in zip(names, entries, strict=True)}


def _loop_of_entry(entry: dict[str, Any], path: str) -> AgentLoop:
    target = str(entry["_target_"])
    module, _, name = target.rpartition(".")
    found = load_object(f"pkg://{module}", name, f"{path}: _target_") if module else None
    if not callable(getattr(found, "run", None)) or CLASS not in LOOPS_OF_CLASSES:
        raise ConfigError(
            f"{path}: _target_={target!r} must be the dotted path of an agent loop, my_package.loops.Mine, which "
            "derives from verl.experimental.agent_loop.AgentLoopBase"
        )
    extra = {k: v for k, v in entry.items() if k not in ("name", "_target_")}
    return LOOPS_OF_CLASSES.get(CLASS)(found, extra)
