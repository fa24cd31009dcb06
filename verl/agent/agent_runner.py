"""Runs the agent loop of each data row and returns its trajectories."""

import asyncio
import copy
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.agent import single_turn
from verl.agent.interactions import load_interactions
from verl.agent.llm_server import LLMServerClient
from verl.agent.loop import (
    AGENT_LOOPS,
    AgentLoopBase,
    ConfigWrap,
    ToolListWrap,
    make_incremental_template,
)
from verl.agent.loop_limits import bounded_run, checked_outputs
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
        load_interactions(rollout.multi_turn.interaction_config_path)
        self.loop_factory(self.default_loop)  # an unknown default loop or format fails before the run
        TOOL_PARSERS.get(rollout.multi_turn.format)

    def loop_factory(self, name: str) -> Callable[..., AgentLoopBase] | None:
        """The constructor of the loop called `name`; None for the built-in single turn."""
        if name in self.configured_loops:
            return self.configured_loops[name]
        return None if name == single_turn.NAME and name not in AGENT_LOOPS else AGENT_LOOPS.get(name)

    def tool_prompt_tokens(self, agent_name: str | None) -> int:
        """Number of tokens that tool descriptions add to a row's prompt; ConfigError where its loop is unknown."""
        return 0 if self.loop_factory(self.loop_name(agent_name)) is None else self._tool_description_tokens

    @functools.cached_property
    def _tool_description_tokens(self) -> int:
        question = [{"role": "user", "content": "?"}]
        with_tools, without = (
            make_incremental_template(self.config, self.tokenizer, t) for t in (list(self.tools.values()), [])
        )
        return len(with_tools.initial_tokens(question)) - len(without.initial_tokens(question)) if self.tools else 0

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
        factory = self.loop_factory(self.loop_name(row.agent_name))
        if factory is None:
            trajectories = await single_turn.single_turn(row, request_id, sampling, engine)
            if traced is not None:
                traced.add_single_turns(single_turn.NAME, trajectories)
        else:
            one = partial(self._run_sample, factory, row, request_id, sampling, engine, traced)
            several = await asyncio.gather(*(one(number) for number in range(sampling.n)))
            trajectories = [t for of_sample in several for t in of_sample]
        if traced is not None:
            traced.answered()
        return trajectories

    async def _run_sample(
        self,
        factory: Callable[..., AgentLoopBase],
        row: PromptRow,
        request_id: int,
        sampling: SamplingParams,
        engine: RolloutEngine,
        traced: TracedPrompt | None,
        sample: int,
    ) -> list[Trajectory]:
        if traced is None:
            return await self._converse(factory, row, request_id, sampling, engine, sample)
        with traced.conversation(self.loop_name(row.agent_name), sample) as conversation:
            trajectories = await self._converse(factory, row, request_id, sampling, engine, sample)
            conversation.size = len(trajectories)
        return trajectories

    async def _converse(
        self,
        factory: Callable[..., AgentLoopBase],
        row: PromptRow,
        request_id: int,
        sampling: SamplingParams,
        engine: RolloutEngine,
        sample: int,
    ) -> list[Trajectory]:
        rollout = self.config.actor_rollout_ref.rollout
        max_sequence_length = rollout.max_model_len or rollout.prompt_length + rollout.response_length
        vocabulary_size = len(self.tokenizer)
        server = LLMServerClient(engine, sampling, max_sequence_length, request_id, sample, vocabulary_size)
        columns = {**row.columns, "raw_prompt": row.messages, "index": row.index, "extra_info": row.extra_info}
        columns["tools_kwargs"] = row.extra_info.get("tools_kwargs") or {}
        columns = copy.deepcopy(columns)  # a loop of others may change its row
        sampling_params = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}

        async def run() -> Any:
            return await self._make_loop(factory, server).run(sampling_params, **columns)

        what = f"agent loop {self.loop_name(row.agent_name)} on {row.location}"
        try:
            outputs = checked_outputs(await bounded_run(run(), server, rollout.agent.timeout_s, what), server)
            return [output.to_trajectory(request_id, row.index, server.answers, sample) for output in outputs]
        except DataError as error:
            raise DataError(f"{what}: {error}") from error

    def _make_loop(self, factory: Callable[..., AgentLoopBase], server: LLMServerClient) -> AgentLoopBase:
        return factory(
            trainer_config=ConfigWrap(self.config),
            server_manager=server,
            tokenizer=self.tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=ConfigWrap(self.config.data),
            hf_model_type=None,
            tools=ToolListWrap(list(self.tools.values())),
        )


def load_agent_loops(path: str | None) -> dict[str, Callable[..., AgentLoopBase]]:
    """Loop constructors by name, from a YAML list of `name`, `_target_: package.Class` and constructor arguments."""
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
    return {name: _loop_factory(entry, path) for name, entry in zip(names, entries, strict=True)}


def _loop_factory(entry: dict[str, Any], path: str) -> Callable[..., AgentLoopBase]:
    target = str(entry["_target_"])
    module, _, name = target.rpartition(".")
    factory = load_object(f"pkg://{module}", name, f"{path}: _target_") if module else None
    if factory is None or not callable(getattr(factory, "run", None)):
        raise ConfigError(
            f"{path}: _target_={target!r} must be the dotted path of an agent loop, my_package.loops.Mine"
        )
    extra = {k: v for k, v in entry.items() if k not in ("name", "_target_")}
    return lambda **arguments: factory(**arguments, **extra)
