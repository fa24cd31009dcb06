"""Bad agent loops of others: each is refused with its name, the row and what is wrong, and none hangs the run."""

import asyncio
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.agent_cases import ScriptedEngine, run_conversations
from verl.agent.agent_runner import AgentRunner
from verl.agent.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse, call_tool
from verl.config import load_config
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.utils.errors import DataError, WorkerError

NAN, INF = float("nan"), float("inf")


class Bad(AgentLoopBase):
    """Asks once and returns what its case makes of the answer."""

    def __init__(self, *args: Any, case: str = "", **kwargs: Any):
        if case == "constructor":
            raise KeyError("no such index")
        super().__init__(*args, **kwargs)
        self.case = case

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Any:
        if self.case in ENDS:
            return await ENDS[self.case][0](self)
        row["extra_info"]["mine"] = True
        answer = await self.server_manager.generate("x", prompt_ids=[1, 2], sampling_params=sampling_params)
        good = AgentLoopOutput([1, 2], answer.token_ids, [1] * len(answer.token_ids), num_turns=2)
        return RETURNS[self.case][0](good)


def setting(**fields: Any) -> Any:
    """A case that sets fields of a good output; a function gets the field's value."""

    def change(output: AgentLoopOutput) -> AgentLoopOutput:
        for name, value in fields.items():
            setattr(output, name, value(getattr(output, name)) if callable(value) else value)
        return output

    return change


def logprobs(value: Any) -> Any:
    return lambda output: setting(response_logprobs=[value] * len(output.response_ids))(output)


RETURNS: dict[str, tuple[Any, str]] = {
    "nothing": (lambda good: None, "it returned None, not AgentLoopOutput"),
    "no outputs": (lambda good: [], r"it returned \[\], not AgentLoopOutput"),
    "a dict": (lambda good: {"response_ids": [1]}, "it returned .*not AgentLoopOutput"),
    "NaN log-probs": (logprobs(NAN), r"response_logprobs\[0\]=nan; a log-prob is a finite number of at most 0"),
    "infinite log-probs": (logprobs(-INF), r"response_logprobs\[0\]=-inf"),
    "probabilities": (logprobs(0.9), r"response_logprobs\[0\]=0.9"),
    "log-probs of text": (logprobs("x"), r"response_logprobs\[0\]='x'"),
    "log-probs of None": (logprobs(None), r"response_logprobs\[0\]=None"),
    "NaN tensor": (lambda g: setting(response_logprobs=torch.full((len(g.response_ids),), NAN))(g), "=nan; a log-prob"),
    "fractional mask": (setting(response_mask=lambda m: [0.5] * len(m)), r"response_mask\[0\]=0.5; allowed: 1 for"),
    "mask of two": (setting(response_mask=lambda m: [2] * len(m)), r"response_mask\[0\]=2"),
    "mask of None": (setting(response_mask=lambda m: [None] * len(m)), r"response_mask\[0\]=None"),
    "nested mask": (setting(response_mask=lambda m: [m] * len(m)), r"response_mask\[0\]=\[1, "),
    "no mask": (setting(response_mask=None), "response_mask is NoneType, not a list"),
    "short mask": (setting(response_mask=[1]), r"there are \d+ response_ids, but 1 values in response_mask"),
    "long log-probs": (setting(response_logprobs=[0.0] * 99), "but 99 values in response_logprobs; they must agree"),
    "more tokens": (setting(response_ids=lambda i: [*i, 5]), "they must agree"),
    "a token beyond": (setting(prompt_ids=[1, 10**7]), r"prompt_ids\[1\]=10000000 is outside the vocabulary; allowed"),
    "a negative token": (setting(prompt_ids=[-1]), r"prompt_ids\[0\]=-1 is outside the vocabulary"),
    "a response beyond": (
        setting(response_ids=lambda i: [10**7, *i[1:]], response_mask=lambda m: [0, *m[1:]]),
        r"response_ids\[0\]=10000000 is outside the vocabulary",
    ),
    "tokens of text": (setting(response_ids="text"), "response_ids='text' must be a list of token ids"),
    "fractional tokens": (setting(prompt_ids=[1.5]), r"prompt_ids=\[1.5\] must be a list of token ids"),
    "tokens of bools": (setting(prompt_ids=[True]), r"prompt_ids=\[True\] must be"),
    "nested tokens": (setting(prompt_ids=[[1, 2]]), r"prompt_ids=\[\[1, 2\]\] must be"),
    "two-dimensional": (setting(prompt_ids=torch.ones(1, 2, dtype=torch.long)), "prompt_ids=.* must be"),
    "no tokens": (setting(prompt_ids=None), "prompt_ids=None must be"),
    "no prompt": (setting(prompt_ids=[]), "prompt_ids is empty"),
    "too long": (
        lambda g: setting(response_ids=[*g.response_ids, *[5] * 2000], response_mask=[*g.response_mask, *[0] * 2000])(
            g
        ),
        r"have 2 \+ 20\d\d tokens, more than the 1024 of",
    ),
    "sampled by nobody": (setting(response_ids=lambda i: [7] * len(i)), "marks response tokens 0 to"),
    "NaN reward": (setting(reward_score=NAN), "reward_score=nan must be a finite number"),
    "a reward too large": (setting(reward_score=10**400), "reward_score=1000.* must be a finite number"),
    "reward of text": (setting(reward_score="good"), "reward_score='good' must be"),
    "no fields": (setting(extra_fields=None), "extra_fields=None must be a dictionary"),
    "numbered fields": (setting(extra_fields={1: 2}), "extra_fields={1: 2} must be a dictionary with names"),
    "listed fields": (setting(extra_fields={"reward_extra_info": [1]}), r"extra_fields\['reward_extra_info'\] must be"),
    "a number of tool rewards": (setting(extra_fields={"tool_rewards": 2}), r"\['tool_rewards'\]=2 must be a list"),
    "metrics of text": (setting(metrics="fast"), "metrics='fast' must be a dictionary"),
    "turns of text": (setting(num_turns="two"), "num_turns='two' must be a whole number"),
    "pictures": (setting(multi_modal_data={"images": [b"x"]}), "only text is supported so far"),
}


async def raising(error: BaseException) -> None:
    raise error


async def asking_on(loop: Any) -> None:
    while True:
        await loop.server_manager.generate("x", prompt_ids=[1] * 5000)


async def in_a_task(loop: Any) -> None:
    await asyncio.gather(raising(ValueError("in a task")))


async def asking(loop: Any, *ids: Any) -> None:
    await loop.server_manager.generate("x", prompt_ids=list(ids))


ENDS: dict[str, tuple[Any, str]] = {
    "constructor": (None, "it failed:.*KeyError: 'no such index'"),
    "error": (lambda loop: raising(ValueError("mine")), "it failed:.*ValueError: mine"),
    "exit": (lambda loop: raising(SystemExit(0)), "it failed:.*SystemExit: 0"),
    "cancelled": (lambda loop: raising(asyncio.CancelledError()), "it raised CancelledError, though nobody"),
    "timeout": (lambda loop: raising(TimeoutError()), "it failed:.*TimeoutError"),
    "recursion": (lambda loop: raising(RecursionError("deep")), "it failed:.*RecursionError: deep"),
    "in a task": (in_a_task, "it failed:.*ValueError: in a task"),
    "no coroutine": (lambda loop: asyncio.sleep(0), "it returned None, not AgentLoopOutput"),
    "waits for ever": (lambda loop: asyncio.Event().wait(), r"it has taken .* seconds besides generate\(\)"),
    "sleeps": (lambda loop: asyncio.sleep(1e6), r"agent.timeout_s=0.2; raise the key"),
    "asks on": (asking_on, "it asked for an answer 1024 times, more often than tokens fit"),
    "asks nothing": (asking, r"prompt_ids of generate\(\) is empty"),
    "asks with text": (lambda loop: asking(loop, "hello"), r"prompt_ids of generate\(\)=\['hello'\] must be"),
    "asks beyond": (lambda loop: asking(loop, 10**7), r"prompt_ids of generate\(\)\[0\]=10000000 is outside the voc"),
}


def run_case(tokenizer: Any, tmp_path: Path, case: str, engine: Any = None) -> Any:
    path = tmp_path / "loops.yaml"
    path.write_text(f"- name: bad\n  _target_: {__name__}.Bad\n  case: {case!r}\n")
    agent = "actor_rollout_ref.rollout.agent"
    limit = 0.2 if case in ("waits for ever", "sleeps", "blocks") else 60
    given = ["actor_rollout_ref.model.path=x", f"{agent}.agent_loop_config_path={path}", f"{agent}.timeout_s={limit}"]
    runner = AgentRunner(load_config(given), tokenizer)
    return run_conversations(runner, engine or ScriptedEngine(tokenizer, ["ab c<|im_end|>"]), agent_name="bad")


@pytest.mark.parametrize("case", [*RETURNS, *ENDS])
def test_a_bad_loop_is_refused_with_its_name_the_row_and_what_is_wrong(tokenizer: Any, tmp_path: Path, case: str):
    says = (RETURNS | ENDS)[case][1]
    with pytest.raises(DataError, match=re.compile(f"^agent loop bad on file row 4: .*{says}", re.DOTALL)):
        run_case(tokenizer, tmp_path, case)


async def blocking(loop: Any) -> None:
    time.sleep(1000)


def test_a_loop_that_blocks_the_event_loop_is_named_and_ctrl_c_ends_it(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(ENDS, "blocks", (blocking, ""))

    def press() -> None:
        while "has blocked" not in caplog.text and time.perf_counter() < deadline:
            time.sleep(0.05)
        for _ in range(2):  # the first asks for an orderly end, which a blocked loop cannot give
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.3)

    deadline = time.perf_counter() + 20
    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_case(tokenizer, tmp_path, "blocks")
    assert re.search(
        r"agent loop bad on file row 4 has blocked the event loop for .* seconds, at .*test_bad_agent_loops.py:\d+ in "
        r"blocking: all other conversations wait for it",
        caplog.text,
    )
    assert caplog.text.count("has blocked") == 1


def test_arrays_and_tensors_are_lists_too(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    arrays = setting(prompt_ids=np.array([1, 2]), response_ids=torch.tensor, response_mask=np.array)
    monkeypatch.setitem(RETURNS, "arrays", (arrays, ""))
    [trajectory] = run_case(tokenizer, tmp_path, "arrays")
    assert trajectory.num_sampled == len(trajectory.tokens) - 2 and trajectory.rollout_logprobs[-1] == -0.5


def test_a_failing_engine_is_not_the_loops_failure(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Failing(ScriptedEngine):
        async def generate(self, request: Any) -> Any:
            raise WorkerError(1, "generate", "it died")

    monkeypatch.setitem(RETURNS, "good", (lambda good: good, ""))
    with pytest.raises(WorkerError, match="it died"):
        run_case(tokenizer, tmp_path, "good", Failing(tokenizer, []))


class Odd(BaseTool):
    """Does what its configuration says."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate({"function": {"name": "odd"}})

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        match self.config["does"]:
            case "cancel":
                raise asyncio.CancelledError
            case "wait":
                await asyncio.Event().wait()
        return ToolResponse("done"), {"nan": NAN, "text": "good"}.get(self.config["does"], 0.5), {}


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("cancel", "Error when executing odd: .*CancelledError"),
        ("nan", "Error when executing odd: ValueError: its reward is nan; it must be finite"),
        ("text", "Error when executing odd: ValueError: could not convert"),
        ("wait", "Error: odd took longer than 0.1 seconds"),
    ],
)
def test_an_odd_tool_is_a_reply_the_policy_reads(does: str, says: str):
    response, reward, _ = asyncio.run(call_tool({"odd": Odd({"does": does, "timeout": 0.1})}, "odd", "{}", {}))
    assert re.match(says, str(response.text)) and reward == 0.0


def test_a_process_that_was_stopped_makes_no_tool_late():
    async def held_up() -> str:
        resumed = asyncio.Event()

        class Waiting(Odd):
            async def execute(self, *_: Any, **__: Any) -> Any:
                await resumed.wait()
                return ToolResponse("done"), 0.0, {}

        task = asyncio.create_task(call_tool({"odd": Waiting({"timeout": 0.4})}, "odd", "{}", {}))
        await asyncio.sleep(0.05)
        time.sleep(0.6)  # like Ctrl-Z: the wall's clock runs on, and no limit is looked at
        resumed.set()
        return str((await task)[0].text)

    assert asyncio.run(held_up()) == "done"
