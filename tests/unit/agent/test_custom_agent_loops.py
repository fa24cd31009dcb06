"""Agent loops of one's own: what they may mark as sampled, what they may ask for, and what becomes of it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.agent_cases import ScriptedEngine, make_agent_runner, row, run_conversations, tool_call_text
from tests.rollout_adapters import letters_tokenizer
from verl.agent.agent_runner import AgentRunner
from verl.agent.policy import Policy
from verl.config import load_config
from verl.data.prompts import load_prompts
from verl.doors.agent_loop import ConfigWrap
from verl.doors.loop_outputs import read_outputs, sampled_transcript
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopOutput, LLMServerClient, TokenOutput, ToolListWrap
from verl.rewards.base import Score
from verl.trainer.ppo.sources.saved_groups import trajectories_as_json, trajectories_from_json
from verl.trainer.ppo.sources.trajectory_source import RolloutCollector
from verl.utils.errors import ConfigError, DataError
from verl.workers.rollout.base import Completion, SamplingParams


class Asking(AgentLoopBase):
    """The loop of the documentation: asks, doubts, asks again; `spoil` changes what it returns."""

    def __init__(self, *args: Any, spoil: str = "", **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.spoil = spoil

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        messages = list(row["raw_prompt"])
        ids = prompt = await self.ct_build_initial_tokens(messages)
        first = await self.server_manager.generate("x", prompt_ids=ids, sampling_params=sampling_params)
        merged, mask, _ = await self.ct_merge_assistant_token(ids, first.token_ids, [])
        doubt = [*messages, {"role": "user", "content": "Are you sure?"}]
        merged, mask, _ = await self.ct_merge_non_assistant_msg(messages, doubt, merged.token_ids, mask)
        ids = merged.token_ids
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
            reward_score=3.0 if self.spoil == "scores" else None,
            extra_fields={"doubts": 1},
        )


class Splitting(AgentLoopBase):
    """One conversation in two outputs: an answer, and a part in which nothing is sampled."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        prompt = await self.ct_build_initial_tokens(list(row["raw_prompt"]))
        answer = await self.server_manager.generate("x", prompt_ids=prompt, sampling_params=sampling_params)
        ids = list(answer.token_ids)
        return [AgentLoopOutput(prompt, ids, [1] * len(ids)), AgentLoopOutput(prompt, [7], [0])]


def ask(tokenizer: Any, tmp_path: Path, spoil: str = "", answer: str = "ab c<|im_end|>") -> Any:
    path = tmp_path / "loops.yaml"
    path.write_text(f"- name: single_turn_agent\n  _target_: {__name__}.Asking\n  spoil: {spoil!r}\n")
    file = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={path}"
    engine = ScriptedEngine(tokenizer, [answer] * 2)
    [t] = run_conversations(AgentRunner(load_config(["actor_rollout_ref.model.path=x", file]), tokenizer), engine)
    return t


def test_outputs_of_a_conversation_have_its_number_and_keep_it_in_a_checkpoint(tokenizer: Any, tmp_path: Path):
    path = tmp_path / "loops.yaml"
    path.write_text(f"- name: single_turn_agent\n  _target_: {__name__}.Splitting\n")
    file = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={path}"
    runner = AgentRunner(load_config(["actor_rollout_ref.model.path=x", file]), tokenizer)
    found = run_conversations(runner, ScriptedEngine(tokenizer, ["ab c<|im_end|>"]), n=2)
    read = trajectories_from_json(trajectories_as_json(found), 7, 4)
    assert [t.conversation for t in found] == [t.conversation for t in read] == [0, 0, 1, 1]


@pytest.mark.parametrize("spoil", ["", "cut"])
def test_logprobs_and_versions_of_a_loop_that_gives_none_are_those_of_its_answers(
    tokenizer: Any, tmp_path: Path, spoil: str
):
    t = ask(tokenizer, tmp_path, spoil)
    assert (t.rollout_logprobs[t.loss_mask] == -0.5).all() and (t.rollout_logprobs[~t.loss_mask] == 0).all()
    assert t.policy_version == (0, 1) and t.stop_reason == "stop" and t.num_turns == 4 and t.loop_fields["doubts"] == 1
    assert t.num_sampled == (3 if spoil else 6)


@pytest.mark.parametrize("spoil", ["tokenised again", "marked"])
def test_what_the_policy_did_not_sample_cannot_be_marked_as_sampled(tokenizer: Any, tmp_path: Path, spoil: str):
    with pytest.raises(DataError, match=r"tokens \d+ to \d+ as sampled"):
        ask(tokenizer, tmp_path, spoil)


def test_a_loop_may_show_tools_of_its_own_but_no_pictures(tokenizer: Any, tool_file: Path):
    made = make_agent_runner(tokenizer, tool_file)
    client = LLMServerClient(Policy(ScriptedEngine(tokenizer, []), SamplingParams(), 99, 0, 0))
    loop = Asking(ConfigWrap(made.config), client, tokenizer, tools=ToolListWrap(list(made.tools.values())))
    messages = [{"role": "user", "content": "hi"}]
    assert '"name": "add"' in tokenizer.decode(asyncio.run(loop.ct_build_initial_tokens(messages)))
    other = {"type": "function", "function": {"name": "other", "parameters": {}}}
    shown = tokenizer.decode(asyncio.run(loop.ct_build_initial_tokens(messages, tools=[other])))
    assert '"name": "other"' in shown and '"name": "add"' not in shown
    for refused in (
        lambda: asyncio.run(loop.ct_build_initial_tokens(messages, images=[b"x"])),
        lambda: asyncio.run(loop.ct_merge_non_assistant_msg([], messages, [1], [], images=[b"x"])),
        lambda: asyncio.run(client.generate("x", prompt_ids=[1], image_data=[b"x"])),
    ):
        with pytest.raises(DataError, match="only text is supported so far"):
            refused()


def answered(token_ids: list[int], *segments: tuple[int, int], logprob: float = -1.0) -> Completion:
    versions = (segments[0][0], segments[-1][0])
    logprobs = [logprob] * len(token_ids)
    return Completion(token_ids, logprobs, "stop", versions, segments=segments if segments[1:] else ())


def test_equal_answers_keep_the_logprobs_of_their_turns():
    answers = [answered([5, 6], (3, 2), logprob=-1.0), answered([5, 6], (3, 2), logprob=-2.0)]
    found = sampled_transcript([1], [5, 6, 9, 5, 6], [1, 1, 0, 1, 1], answers)
    assert found.response_logprobs == [-1.0, -1.0, 0.0, -2.0, -2.0] and found.response_mask == [1, 1, 0, 1, 1]
    assert found.token_versions == [3] * 4 and len(found.answer_versions) == 2


def test_a_conversation_says_which_version_sampled_each_of_its_tokens():
    """The first answer spans versions 1 and 2 and is cut at both ends; the others are of version 2 and of version 4."""
    server = LLMServerClient(Policy(None, SamplingParams(), 99, 0, 0))
    server.answers = [answered([1, 2, 3, 4, 5], (1, 3), (2, 2)), answered([6, 7], (2, 2)), answered([8], (4, 1))]
    output = AgentLoopOutput([9], [2, 3, 4, 9, 6, 7, 9, 9, 8], [1, 1, 1, 0, 1, 1, 0, 0, 1])
    [trajectory] = read_outputs(output, server, 0)
    assert trajectory.segments == ((1, 2), (2, 3), (4, 1)) and trajectory.policy_version == (1, 4)
    server.answers = server.answers[1:]
    [same] = read_outputs(AgentLoopOutput([9], [6, 7], [1, 1]), server, 0)
    assert same.segments == ()


def test_a_loop_may_stop_at_texts_but_not_ask_for_what_engines_do_not_know(tokenizer: Any):
    engine = ScriptedEngine(tokenizer, ["a<|im_end|>"] * 4)
    client = LLMServerClient(Policy(engine, SamplingParams(max_tokens=50, stop=("x",)), 60, 0, 0))

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
    """Gives 1 to what it is asked to score and keeps the questions."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []

    async def score(self, inputs: Any) -> list[Score]:
        self.inputs += inputs
        return [Score(1.0) for _ in inputs]


def test_rewards_of_loops_stay_and_scorers_are_told_what_tools_gave(tokenizer: Any, tmp_path: Path, tool_file: Path):
    (tmp_path / "loops.yaml").write_text(f"- name: scoring\n  _target_: {__name__}.Asking\n  spoil: scores\n")
    file = f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path / 'loops.yaml'}"
    made, reward = make_agent_runner(tokenizer, tool_file, file), Counting()

    def collected(agent: str, *turns: str) -> Any:
        collector = RolloutCollector(ScriptedEngine(tokenizer, list(turns)), reward, tokenizer, made)
        return asyncio.run(collector.collect([row(agent_name=agent)], [0], SamplingParams(max_tokens=99))).trajectories[
            0
        ]

    assert collected("scoring", "a<|im_end|>", "b<|im_end|>").reward == 3.0 and not reward.inputs
    assert collected("tool_agent", tool_call_text("add", a=1, b=2), "3<|im_end|>").reward == 1.0
    assert reward.inputs[0].extra_info["num_turns"] == 4 and reward.inputs[0].extra_info["tool_rewards"] == [0.5]


def test_a_row_that_names_no_loop_is_found_before_the_run(tokenizer: Any, tool_file: Path, tmp_path: Path):
    line = {"prompt": "2+3=", "data_source": "x", "reward_model": {"ground_truth": "5"}}
    lines = [line, {**line, "agent_name": "tool_agent"}, {**line, "agent_name": "tool_agnt"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    made = make_agent_runner(tokenizer, tool_file)
    with pytest.raises(DataError, match=r"rows.jsonl line 3: column 'agent_name': unknown agent loop 'tool_agnt'"):
        load_prompts(
            str(tmp_path / "rows.jsonl"), made.config.data, tokenizer, extra_prompt_tokens=made.tool_prompt_tokens
        )


def test_a_misspelt_format_or_default_loop_is_found_before_the_run(tokenizer: Any, tool_file: Path):
    for key, kind in (("multi_turn.format", "tool parser"), ("agent.default_agent_loop", "agent loop")):
        with pytest.raises(ConfigError, match=f"unknown {kind} 'hermess'"):
            make_agent_runner(tokenizer, tool_file, f"actor_rollout_ref.rollout.{key}=hermess")


def test_tools_without_a_chat_template_are_refused_with_the_key(tool_file: Path):
    made = make_agent_runner(letters_tokenizer(), tool_file)
    with pytest.raises(ConfigError, match=r"has no chat template; set actor_rollout_ref.model.custom_chat_template"):
        made.tool_prompt_tokens("tool_agent")


def test_descriptions_of_tools_count_where_prompts_are_too_long(tokenizer: Any, tool_file: Path, tmp_path: Path):
    line = {"prompt": "2+3=", "data_source": "x", "reward_model": {"ground_truth": "5"}}
    lines = [{**line, "agent_name": "single_turn_agent"}, line]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    made = make_agent_runner(tokenizer, tool_file, "data.max_prompt_length=100")
    ids = made.setting.incremental_template().initial_tokens([{"role": "user", "content": "2+3="}])
    with pytest.raises(DataError, match=rf"1 of 2 prompts are longer .*line 2 with {len(ids)}, "):
        load_prompts(
            str(tmp_path / "rows.jsonl"), made.config.data, tokenizer, extra_prompt_tokens=made.tool_prompt_tokens
        )
