"""Conversations with tools: ids kept verbatim, exact masks, limits, errors as replies."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl.agent.loop import (
    AGENT_LOOPS,
    AgentLoopBase,
    AgentLoopOutput,
    LLMServerClient,
    TokenOutput,
    register,
    sampled_logprobs,
)
from verl.agent.run import Agents
from verl.agent.stitch import Stitcher
from verl.agent.tools import call_tool, load_tools, truncated
from verl.config import load_config
from verl.data.prompts import PromptRow, load_prompts
from verl.rewards.base import Score
from verl.trainer.metrics import turn_metrics
from verl.trainer.ppo.sources import Sampler
from verl.utils.errors import ConfigError, DataError
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
    time.sleep(0.3)
    return "done"

@function_tool
async def fail(x: int) -> str:
    """Fail.

    Args:
        x: ignored
    """
    raise ValueError("no such row")
'''


@pytest.fixture(scope="module")
def tokenizer(test_data: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen3")


@pytest.fixture
def tool_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_tools.py"
    path.write_text(TOOLS)
    return path


class Scripted(RolloutEngine):
    """Answers with given texts, turn by turn, and remembers what it was asked."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: list[str], delay: float = 0.0):
        self.tokenizer, self.turns, self.delay = tokenizer, turns, delay
        self.requests: list[GenerationRequest] = []
        self.running = self.most = 0

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.delay)
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


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


def row(**fields: Any) -> PromptRow:
    messages = [{"role": "user", "content": "What is 2+3?"}]
    given = {"data_source": "x", "ground_truth": "5", **fields}
    return PromptRow(4, "file row 4", messages, "", [1], False, **given)


def agents(tokenizer: PreTrainedTokenizerBase, tool_file: Path, *more: str) -> Agents:
    turn = "actor_rollout_ref.rollout.multi_turn"
    given = [f"{turn}.enable=True", f"{turn}.function_tool_path={tool_file}", "data.max_response_length=300", *more]
    return Agents(load_config(["actor_rollout_ref.model.path=x", *given]), tokenizer)


def converse(agents: Agents, engine: Scripted, n: int = 1, **fields: Any) -> Any:
    return asyncio.run(agents.answer(row(**fields), 7, SamplingParams(n=n, max_tokens=300), engine))


def test_a_conversation_keeps_sampled_ids_and_masks_only_them(tokenizer: Any, tool_file: Path):
    turns = ["<think>\nadd\n</think>\n\n" + call("add", a=2, b=3), "It is 5.<|im_end|>"]
    engine = Scripted(tokenizer, turns)
    [t] = converse(agents(tokenizer, tool_file), engine)
    prompt = tokenizer.decode(t.tokens[: t.prompt_length])
    assert prompt.endswith("<|im_start|>assistant\n") and '"name": "add"' in prompt and "What is 2+3?" in prompt
    sampled = tokenizer.decode(t.tokens[t.loss_mask])
    assert sampled == "".join(turns)
    between = tokenizer.decode(
        [i for i, m in zip(t.response_ids, t.loss_mask[t.prompt_length :], strict=True) if not m]
    )
    assert between == ("\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    assert (t.rollout_logprobs[t.loss_mask] == -0.5).all() and (t.rollout_logprobs[~t.loss_mask] == 0).all()
    assert t.extra["num_turns"] == 4 and t.policy_version == (0, 1)
    metrics = turn_metrics([t])
    assert metrics["tool_call_counts/mean"] == 1 and metrics["num_turns/max"] == 4
    assert 0 < metrics["timing_s/agent_loop/generate_sequences/max"] < 60
    first, second = engine.requests
    assert second.prompt_ids == t.tokens[: len(second.prompt_ids)].tolist()
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert first.request_id != second.request_id and first.conversation == second.conversation


def test_the_real_qwen3_template_drops_thinking_when_rendered_again_and_stitching_does_not(tokenizer: Any):
    messages = [{"role": "user", "content": "hi"}]
    stitcher = Stitcher(tokenizer)
    answer = "<think>\nsecret\n</think>\n\nhello<|im_end|>"
    ids = stitcher.opening(messages) + tokenizer(answer, add_special_tokens=False)["input_ids"]
    follow = {"role": "user", "content": "again"}
    text = tokenizer.decode(ids + stitcher.appended([follow], ids))
    again = tokenizer.apply_chat_template(
        [*messages, {"role": "assistant", "content": answer.removesuffix("<|im_end|>")}, follow],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    assert "secret" in text and "secret" not in again
    assert text.replace("<think>\nsecret\n</think>\n\n", "") == again


def test_an_answer_cut_before_its_end_mark_gets_one(tokenizer: Any):
    stitcher = Stitcher(tokenizer)
    text = tokenizer.decode(stitcher.appended([{"role": "user", "content": "go on"}], [1, 2, 3]))
    assert text == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("setting", "turns", "reason"),
    [
        ("max_assistant_turns=2", 2, "stop"),
        ("max_user_turns=1", 2, "stop"),
        ("max_assistant_turns=null", 5, "stop"),
    ],
)
def test_limits_end_a_conversation(tokenizer: Any, tool_file: Path, setting: str, turns: int, reason: str):
    engine = Scripted(tokenizer, [call("add", a=1, b=1)] * 4 + ["<|im_end|>"])
    loop = agents(tokenizer, tool_file, f"actor_rollout_ref.rollout.multi_turn.{setting}")
    [t] = converse(loop, engine)
    assert len(engine.requests) == turns and t.stop_reason == reason


def test_the_response_never_grows_beyond_its_length(tokenizer: Any, tool_file: Path):
    engine = Scripted(tokenizer, [call("add", a=1, b=1)] * 9)
    [t] = converse(agents(tokenizer, tool_file, "data.max_response_length=70"), engine)
    assert len(t.response_ids) <= 70 and t.stop_reason == "length" and bool(t.loss_mask[-1])


def test_failures_of_tools_are_replies(tokenizer: Any, tool_file: Path):
    tools = load_tools(None, str(tool_file))

    def says(name: str, arguments: str) -> str:
        return str(asyncio.run(call_tool(tools, name, arguments, {}))[0].text)

    assert says("add", '{"a": 1, "b": 2}') == "3"
    assert "there is no tool 'ad'; did you mean 'add'?" in says("ad", "{}")
    assert "not valid JSON" in says("add", "{a: 1}") and "expected an object" in says("add", "[1]")
    assert says("fail", '{"x": 1}') == "Error when executing fail: ValueError: no such row"
    assert "Error when executing add" in says("add", '{"c": 1}')
    assert says("slow", '{"x": 1}') == "Error: slow took longer than 0.05 seconds"


def test_half_a_surrogate_pair_in_a_tools_text_has_tokens(tokenizer: Any):
    ids = Stitcher(tokenizer).appended([{"role": "tool", "name": "add", "content": "a \ud800 b"}])
    assert "a ? b" in tokenizer.decode(ids)


def test_long_tool_texts_are_cut_where_the_setting_says():
    assert truncated("abcdef", 6, "left") == "abcdef"
    assert truncated("abcdefgh", 4, "left").endswith("efgh") and truncated("abcdefgh", 4, "right").startswith("abcd")
    middle = truncated("abcdefgh", 4, "middle")
    assert middle.startswith("ab...") and middle.endswith("...gh")
    assert {truncated("abc", 0, side) for side in ("left", "middle", "right")} == {"...(truncated)..."}


def test_tools_come_from_yaml_classes_with_create_kwargs(tmp_path: Path, monkeypatch: Any, tokenizer: Any):
    (tmp_path / "yaml_tools.py").write_text(
        "from verl.tools.base_tool import BaseTool\nfrom verl.tools.schemas import ToolResponse\n"
        "class Shop(BaseTool):\n"
        "    async def create(self, instance_id=None, **kw):\n"
        "        self.price = kw['create_kwargs']['price']; self.live = True; return 'i', ToolResponse()\n"
        "    async def execute(self, instance_id, parameters, **kw):\n"
        "        return ToolResponse(text=str(self.price * parameters['n'])), 1.0, {}\n"
        "    async def release(self, instance_id, **kw):\n        self.live = False\n"
    )
    (tmp_path / "tools.yaml").write_text(
        "tools:\n- class_name: yaml_tools.Shop\n  config: {type: native}\n  tool_schema:\n    type: function\n"
        "    function: {name: buy, description: d, parameters: {type: object, properties: {n: {type: integer}}}}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path / 'tools.yaml'}"
    turn = "actor_rollout_ref.rollout.multi_turn"
    made = Agents(load_config(["actor_rollout_ref.model.path=x", f"{turn}.enable=True", path]), tokenizer)
    engine = Scripted(tokenizer, [call("buy", n=3), "ok<|im_end|>"])
    [t] = converse(made, engine, extra_info={"tools_kwargs": {"buy": {"create_kwargs": {"price": 7}}}})
    assert "<tool_response>\n21\n</tool_response>" in tokenizer.decode(t.tokens)
    assert made.tools["buy"].live is False


def test_rows_choose_their_loop_and_loops_may_judge_themselves(tokenizer: Any, tool_file: Path):
    if "echo_agent" not in AGENT_LOOPS:

        @register("echo_agent")
        class Echo(AgentLoopBase):
            async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
                prompt = self.ct_build_initial_tokens(kwargs["raw_prompt"])
                out = await self.server_manager.generate("r", prompt_ids=prompt, sampling_params=sampling_params)
                mask = [1] * len(out.token_ids)
                return AgentLoopOutput(prompt, out.token_ids, mask, out.log_probs, reward_score=2.5, num_turns=2)

    engine = Scripted(tokenizer, ["hello<|im_end|>"])
    ts = converse(agents(tokenizer, tool_file), engine, n=3, agent_name="echo_agent")
    assert [t.reward for t in ts] == [2.5] * 3 and len({r.request_id for r in engine.requests}) == 3
    with pytest.raises(ConfigError, match=r"unknown agent loop 'tool_agnt'.*tool_agent"):
        converse(agents(tokenizer, tool_file), engine, agent_name="tool_agnt")


class Asking(AgentLoopBase):
    """The loop of the documentation: asks, doubts, asks again; `spoil` changes what it returns."""

    def __init__(self, *args: Any, spoil: str = "", **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.spoil = spoil

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        ids = prompt = self.ct_build_initial_tokens(row["raw_prompt"])
        first = await self.server_manager.generate("x", prompt_ids=ids, sampling_params=sampling_params)
        ids = self.ct_merge_assistant_token(ids, first.token_ids)
        ids = self.ct_merge_non_assistant_msg(ids, [{"role": "user", "content": "Are you sure?"}])
        second = await self.server_manager.generate("x", prompt_ids=ids, sampling_params=sampling_params)
        asked = ids[len(prompt) + len(first.token_ids) :]
        answers = [first.token_ids, second.token_ids]
        if self.spoil == "tokenised again":
            texts = [self.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
            answers = [self.tokenizer(" " + text)["input_ids"] for text in texts]
        if self.spoil == "cut":
            answers = [answers[0][2:], answers[1][:-1]]
        return AgentLoopOutput(
            prompt,
            answers[0] + asked + answers[1],
            [1] * len(answers[0]) + [self.spoil == "marked"] * len(asked) + [1] * len(answers[1]),
            num_turns=4,
            reward_score=3.0 if self.spoil == "judges" else None,
            extra_fields={"doubts": 1},
        )


def ask(tokenizer: Any, tmp_path: Path, spoil: str = "", answer: str = "ab c<|im_end|>") -> Any:
    path = tmp_path / "loops.yaml"
    path.write_text(f"- name: single_turn_agent\n  _target_: {__name__}.Asking\n  spoil: {spoil!r}\n")
    file = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={path}"
    engine = Scripted(tokenizer, [answer] * 2)
    [t] = converse(Agents(load_config(["actor_rollout_ref.model.path=x", file]), tokenizer), engine)
    return t


@pytest.mark.parametrize("spoil", ["", "cut"])
def test_logprobs_and_versions_of_a_loop_that_gives_none_are_those_of_its_answers(
    tokenizer: Any, tmp_path: Path, spoil: str
):
    t = ask(tokenizer, tmp_path, spoil)
    assert (t.rollout_logprobs[t.loss_mask] == -0.5).all() and (t.rollout_logprobs[~t.loss_mask] == 0).all()
    assert (
        t.policy_version == (0, 1) and t.stop_reason == "stop" and t.extra["num_turns"] == 4 and t.extra["doubts"] == 1
    )
    assert t.num_sampled == (3 if spoil else 6)


@pytest.mark.parametrize("spoil", ["tokenised again", "marked"])
def test_what_the_policy_did_not_sample_cannot_be_marked_as_sampled(tokenizer: Any, tmp_path: Path, spoil: str):
    with pytest.raises(DataError, match=r"marks response tokens \d+ to \d+ as sampled, but the policy did not sample"):
        ask(tokenizer, tmp_path, spoil)


def test_equal_answers_keep_the_logprobs_of_their_turns():
    def answered(logprob: float) -> TokenOutput:
        return TokenOutput([5, 6], [logprob] * 2)

    values, used = sampled_logprobs([5, 6, 9, 5, 6], [1, 1, 0, 1, 1], [answered(-1.0), answered(-2.0)])
    assert values == [-1.0, -1.0, 0.0, -2.0, -2.0] and len(used) == 2


def test_a_loop_may_stop_at_texts_but_not_ask_for_what_engines_do_not_know(tokenizer: Any):
    engine = Scripted(tokenizer, ["a<|im_end|>"] * 4)
    client = LLMServerClient(engine, SamplingParams(max_tokens=50, stop=("x",)), 60, 0, 0)

    def asked(prompt: int, **params: Any) -> TokenOutput:
        return asyncio.run(client.generate("r", prompt_ids=[1] * prompt, sampling_params=params))

    asked(5, stop="</search>", temperature=0.5, repetition_penalty=1.0, logprobs=True)
    sampling = engine.requests[-1].sampling
    assert sampling.stop == ("x", "</search>") and sampling.temperature == 0.5 and sampling.max_tokens == 50
    asked(40, stop=["a", "b"])
    assert engine.requests[-1].sampling.stop == ("x", "a", "b") and engine.requests[-1].sampling.max_tokens == 20
    assert asked(60).stop_reason == "length" and len(engine.requests) == 2
    with pytest.raises(DataError, match=r"'repetition_penalty'\]=1.2 .* known: ignore_eos, max_tokens"):
        asked(5, repetition_penalty=1.2)


class Counting:
    """Gives 1 to what it is asked to judge and keeps the questions."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []

    async def score(self, inputs: Any) -> list[Score]:
        self.inputs += inputs
        return [Score(1.0) for _ in inputs]


def test_rewards_of_loops_stay_and_scorers_are_told_what_tools_gave(tokenizer: Any, tmp_path: Path, tool_file: Path):
    (tmp_path / "loops.yaml").write_text(f"- name: judging\n  _target_: {__name__}.Asking\n  spoil: judges\n")
    file = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}"
    made, reward = agents(tokenizer, tool_file, file), Counting()

    def collected(agent: str, *turns: str) -> Any:
        sampler = Sampler(Scripted(tokenizer, list(turns)), reward, tokenizer, made)
        return asyncio.run(sampler.collect([row(agent_name=agent)], [0], SamplingParams(max_tokens=99))).trajectories[0]

    assert collected("judging", "a<|im_end|>", "b<|im_end|>").reward == 3.0 and not reward.inputs
    assert collected("tool_agent", call("add", a=1, b=2), "3<|im_end|>").reward == 1.0
    assert reward.inputs[0].extra_info["num_turns"] == 4 and reward.inputs[0].extra_info["tool_rewards"] == [0.5]


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(DataError, match="2 response tokens, 1 mask values"):
        AgentLoopOutput([1], [2, 3], [1]).trajectory(0, 0, [])


def test_sixty_four_conversations_run_at_once(tokenizer: Any, tool_file: Path):
    engine = Scripted(tokenizer, [call("add", a=2, b=3), "5<|im_end|>"], delay=0.02)
    begin = time.perf_counter()
    ts = converse(agents(tokenizer, tool_file), engine, n=64)
    assert len(ts) == 64 and engine.most == 64
    assert time.perf_counter() - begin < 30  # a stall, not a speed


def test_misspelt_files_and_doubled_names_are_refused(tmp_path: Path, tool_file: Path):
    with pytest.raises(ConfigError, match="No such file"):
        load_tools(str(tmp_path / "x.yaml"), None)
    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match="no function there is marked @function_tool"):
        load_tools(None, str(tmp_path / "none.py"))
    (tmp_path / "twice.py").write_text(TOOLS + TOOLS.split("@function_tool(")[0].replace("two numbers", "again"))
    with pytest.raises(ConfigError, match="two function tools are called 'add'"):
        load_tools(None, str(tmp_path / "twice.py"))


def test_a_row_that_names_no_loop_is_found_before_the_run(tokenizer: Any, tool_file: Path, tmp_path: Path):
    line = {"prompt": "2+3=", "data_source": "x", "reward_model": {"ground_truth": "5"}}
    lines = [line, {**line, "agent_name": "tool_agent"}, {**line, "agent_name": "tool_agnt"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    made = agents(tokenizer, tool_file)
    prompts = load_prompts(str(tmp_path / "rows.jsonl"), made.config.data, tokenizer)
    with pytest.raises(DataError, match=r"rows.jsonl line 3: column 'agent_name': unknown agent loop 'tool_agnt'"):
        made.check_rows(prompts)
