"""Agent loops by name, and the tokens of the conversation that one holds with the policy.

A loop is a coroutine: it gets what the loops of a run share, the policy and a row, and returns trajectories. Sampled
token ids, their log-probs and their versions are kept as the policy gave them.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl.agent.incremental_template import IncrementalTemplate
from verl.agent.policy import Policy
from verl.agent.tool_schemas import schema_dict
from verl.agent.tools import BaseTool
from verl.config.run_config import RunConfig
from verl.data.prompts import PromptRow
from verl.data.trajectory import Trajectory
from verl.utils.errors import DataError
from verl.utils.import_paths import names_from
from verl.utils.registry import Registry
from verl.workers.rollout.base import Completion

_EARLIER = ("AgentLoopBase", "AgentLoopOutput", "ConfigWrap", "ToolListWrap")  # which earlier loops import from here
__getattr__ = names_from(__name__, **dict.fromkeys(_EARLIER, "verl.doors.agent_loop"))


@dataclass(frozen=True)
class LoopSetting:
    """Configuration, tokenizer and tools of the agent loops of a run."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    tools: dict[str, BaseTool]  # by name

    def incremental_template(self) -> IncrementalTemplate:
        """The incremental template for the tools, with the variables of `data.apply_chat_template_kwargs`."""
        schemas = [schema_dict(tool.tool_schema) for tool in self.tools.values()]
        kwargs = self.config.data.apply_chat_template_kwargs
        return IncrementalTemplate(self.tokenizer, schemas, template_kwargs=kwargs)


AgentLoop = Callable[[LoopSetting, Policy, PromptRow], Awaitable[list[Trajectory]]]
AGENT_LOOPS: Registry[AgentLoop] = Registry("agent loop")
# Makes the loop of a class that a file of loops names, with its arguments; the door of such classes registers it.
CLASS = "class"
LOOPS_OF_CLASSES: Registry[Callable[[Any, dict[str, Any]], AgentLoop]] = Registry("form of an agent loop")


@dataclass
class LoopTimings:
    """Seconds that a conversation spent per activity."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1

    @contextmanager
    def timed(self, activity: str) -> Iterator[None]:
        """Add the seconds until the block ends to those of `activity`."""
        started = time.perf_counter()
        yield
        setattr(self, activity, getattr(self, activity) + time.perf_counter() - started)


@dataclass(kw_only=True)
class Transcript:
    """A conversation as tokens: the prompt, then answers and the turns of others. `response_mask`: 1 on answers."""

    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] = field(default_factory=list)  # nats; 0 on the turns of others
    token_versions: list[int] = field(default_factory=list)  # the version that sampled each token of the answers
    answer_versions: list[tuple[int, int]] = field(default_factory=list)  # oldest and newest of each answer
    stop_reason: str = "stop"  # of the last answer

    def add_answer(self, answer: Completion, start: int = 0, size: int | None = None) -> None:
        """Append `size` (all) tokens of an answer from `start` on."""
        part = slice(start, None if size is None else start + size)
        ids = answer.token_ids[part]
        self.response_ids += ids
        self.response_mask += [1] * len(ids)
        self.response_logprobs += answer.logprobs[part]
        self.token_versions += [version for version, count in answer.all_segments for _ in range(count)][part]
        self.answer_versions += [answer.policy_version] if ids else []
        self.stop_reason = answer.stop_reason

    def add_turns(self, ids: Sequence[int]) -> None:
        """Append turns of others."""
        self.response_ids += ids
        self.response_mask += [0] * len(ids)
        self.response_logprobs += [0.0] * len(ids)

    def trajectory(self, policy: Policy, row: int, timings: LoopTimings | dict[str, float], **facts: Any) -> Trajectory:
        """The trajectory of this conversation, with further fields of `Trajectory`; DataError where it is too long."""
        size, limit = len(self.response_ids), policy.max_sequence_length
        if len(self.prompt_ids) + size > limit:
            raise DataError(
                f"prompt_ids and response_ids have {len(self.prompt_ids)} + {size} tokens, more than the {limit} of "
                "rollout.max_model_len (or prompt_length + response_length); end the loop there, or raise the key"
            )
        mask = torch.tensor([0] * len(self.prompt_ids) + self.response_mask, dtype=torch.bool)
        logprobs = torch.tensor([0.0] * len(self.prompt_ids) + self.response_logprobs, dtype=torch.float32)
        by_version = [(version, len(list(same))) for version, same in groupby(self.token_versions)]
        return Trajectory(
            tokens=torch.tensor([*self.prompt_ids, *self.response_ids], dtype=torch.int64),
            loss_mask=mask,
            rollout_logprobs=logprobs * mask,
            group_id=policy.group_id,
            conversation=policy.sample,
            row=row,
            policy_version=(
                min((oldest for oldest, _ in self.answer_versions), default=0),
                max((newest for _, newest in self.answer_versions), default=0),
            ),
            segments=tuple(by_version) if len(by_version) > 1 else (),
            loop_timings=timings if isinstance(timings, dict) else asdict(timings),
            **{"stop_reason": self.stop_reason, **facts},
        )
