"""Conversations with a policy that answers with given texts."""

import asyncio
import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.agent.agent_runner import AgentRunner
from verl.config import load_config
from verl.data.prompts import PromptRow
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine, SamplingParams

TOOLS = '''
import time
from verl.tools.function_tool import function_tool

@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return str(a + b), 0.5, {"calls": 1}

@function_tool("slow", timeout=0.05)
def slow_one(x: int) -> str:
    """Wait.

    Args:
        x: ignored
    """
    time.sleep(300)
    return "done"

@function_tool
async def fail(x: int) -> str:
    """Fail.

    Args:
        x: ignored
    """
    raise ValueError("no such row")
'''


class ScriptedEngine(RolloutEngine):
    """Answers with given texts, turn by turn, once `min_concurrent` are asked for at once; remembers requests."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: list[str], min_concurrent: int = 1):
        self.tokenizer, self.turns, self.min_concurrent = tokenizer, turns, min_concurrent
        self.requests: list[GenerationRequest] = []
        self.running = self.max_running = 0

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        self.requests.append(request)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        async with asyncio.timeout(60):
            while self.max_running < self.min_concurrent:
                await asyncio.sleep(0.001)
        self.running -= 1
        turn = sum(r.conversation == request.conversation for r in self.requests) - 1
        ids = self.tokenizer(self.turns[turn], add_special_tokens=False)["input_ids"][: request.sampling.max_tokens]
        done = ids[-1] == self.tokenizer.eos_token_id
        return [Completion(ids, [-0.5] * len(ids), "stop" if done else "length", (turn, turn))]

    async def update_weights(self, weights: Any, version: int) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def abort(self, request_id: int | None = None) -> None: ...
    @property
    def version(self) -> int:
        return 0


def tool_call_text(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


def row(**fields: Any) -> PromptRow:
    messages = [{"role": "user", "content": "What is 2+3?"}]
    given = {"data_source": "x", "ground_truth": "5", **fields}
    return PromptRow(4, "file row 4", messages, "", [1], False, **given)


def make_agent_runner(tokenizer: PreTrainedTokenizerBase, tool_file: Path, *more: str) -> AgentRunner:
    turn = "actor_rollout_ref.rollout.multi_turn"
    given = [f"{turn}.enable=True", f"{turn}.function_tool_path={tool_file}", "data.max_response_length=300", *more]
    return AgentRunner(load_config(["actor_rollout_ref.model.path=x", *given]), tokenizer)


def run_conversations(runner: AgentRunner, engine: ScriptedEngine, n: int = 1, **fields: Any) -> Any:
    return asyncio.run(runner.answer(row(**fields), 7, SamplingParams(n=n, max_tokens=300), engine))
