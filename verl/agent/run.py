"""Which loop answers a row, and many of them at once."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.agent import single_turn
from verl.agent.loop import (
    AGENT_LOOPS,
    AgentLoopBase,
    AgentLoopOutput,
    ConfigWrap,
    LLMServerClient,
    ToolListWrap,
    make_stitcher,
)
from verl.agent.parsers import TOOL_PARSERS
from verl.agent.tool_agent import TOOL_AGENT
from verl.agent.tools import load_tools, yaml_file
from verl.config.run import RunConfig
from verl.data.prompts import PromptRow
from verl.data.trajectory import Trajectory
from verl.utils.errors import ConfigError, DataError
from verl.utils.external_code import load_object
from verl.workers.rollout.base import RolloutEngine, SamplingParams


class Agents:
    """Answers rows by the loop their `agent_name` says, else `rollout.agent.default_agent_loop`."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase):
        self.config, self.tokenizer = config, tokenizer
        rollout = config.actor_rollout_ref.rollout
        self.default = rollout.agent.default_agent_loop
        self.loops = loops_of_file(rollout.agent.agent_loop_config_path)
        self.tools = load_tools(rollout.multi_turn.tool_config_path, rollout.multi_turn.function_tool_path)
        self.loop_class(self.default)  # a misspelt default or format is found before the run
        TOOL_PARSERS.get(rollout.multi_turn.format)

    def loop_class(self, name: str) -> Callable[..., AgentLoopBase] | None:
        """The loop called `name`; None for the single turn."""
        if name in self.loops:
            return self.loops[name]
        return None if name == single_turn.NAME and name not in AGENT_LOOPS else AGENT_LOOPS.get(name)

    def reserve(self, agent_name: str | None) -> int:
        """Tokens that descriptions of tools add to the prompt of a row; ConfigError where its loop is unknown."""
        return 0 if self.loop_class(self.name_for(agent_name)) is None else self._tool_tokens

    @functools.cached_property
    def _tool_tokens(self) -> int:
        question = [{"role": "user", "content": "?"}]
        with_tools, bare = (make_stitcher(self.config, self.tokenizer, t) for t in (list(self.tools.values()), []))
        return len(with_tools.opening(question)) - len(bare.opening(question)) if self.tools else 0

    def name_for(self, agent_name: str | None) -> str:
        """The loop of a row that says `agent_name`."""
        if agent_name:
            return agent_name
        if self.config.actor_rollout_ref.rollout.multi_turn.enable and self.default == single_turn.NAME:
            return TOOL_AGENT
        return self.default

    async def answer(
        self, row: PromptRow, request_id: int, sampling: SamplingParams, engine: RolloutEngine
    ) -> list[Trajectory]:
        """`sampling.n` conversations (a loop may return several sequences each, which then share its sample)."""
        kind = self.loop_class(self.name_for(row.agent_name))
        if kind is None:
            return await single_turn.single_turn(row, request_id, sampling, engine)
        samples = [self._one(kind, row, request_id, number, sampling, engine) for number in range(sampling.n)]
        return [t for trajectories in await asyncio.gather(*samples) for t in trajectories]

    async def _one(
        self,
        kind: Callable[..., AgentLoopBase],
        row: PromptRow,
        request_id: int,
        sample: int,
        sampling: SamplingParams,
        engine: RolloutEngine,
    ) -> list[Trajectory]:
        rollout = self.config.actor_rollout_ref.rollout
        longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
        server = LLMServerClient(engine, sampling, longest, request_id, sample)
        loop = kind(
            trainer_config=ConfigWrap(self.config),
            server_manager=server,
            tokenizer=self.tokenizer,
            processor=None,
            dataset_cls=None,
            data_config=ConfigWrap(self.config.data),
            hf_model_type=None,
            tools=ToolListWrap(list(self.tools.values())),
        )
        columns = {**row.columns, "raw_prompt": row.messages, "index": row.index, "extra_info": row.extra_info}
        columns["tools_kwargs"] = row.extra_info.get("tools_kwargs") or {}
        chosen = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        result = await loop.run(chosen, **columns)
        outputs = result if isinstance(result, list) else [result]
        if not outputs or not all(isinstance(output, AgentLoopOutput) for output in outputs):
            name = self.name_for(row.agent_name)
            raise DataError(f"{row.where}: agent loop {name} returned {result!r}, not AgentLoopOutput")
        return [output.trajectory(request_id, row.index, server.answers) for output in outputs]


def loops_of_file(path: str | None) -> dict[str, Callable[..., AgentLoopBase]]:
    """`- name: x`, `_target_: package.Class` and constructor arguments, from `agent.agent_loop_config_path`."""
    if path is None:
        return {}
    key = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    entries = yaml_file(path, key)
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) and {"name", "_target_"} <= e.keys() for e in entries
    ):
        raise ConfigError(f"{key}={path}: expected a list of entries with `name` and `_target_`")
    names = [str(entry["name"]) for entry in entries]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"{key}={path}: two loops are called {twice[0]!r}; give one another name")
    return {name: _configured(entry, path) for name, entry in zip(names, entries, strict=True)}


def _configured(entry: dict[str, Any], path: str) -> Callable[..., AgentLoopBase]:
    target = str(entry["_target_"])
    module, _, name = target.rpartition(".")
    kind = load_object(f"pkg://{module}", name, f"{path}: _target_") if module else None
    if kind is None or not callable(getattr(kind, "run", None)):
        raise ConfigError(
            f"{path}: _target_={target!r} must be the dotted path of an agent loop, my_package.loops.Mine"
        )
    extra = {k: v for k, v in entry.items() if k not in ("name", "_target_")}
    return lambda **given: kind(**given, **extra)
