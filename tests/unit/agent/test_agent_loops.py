"""Agent loops in the words of the core: coroutines that return trajectories, without a door."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.agent_cases import ScriptedEngine, make_agent_runner, run_conversations
from verl.agent.loop import AGENT_LOOPS, LoopSetting, LoopTimings, Transcript
from verl.agent.policy import Policy
from verl.data.prompts import PromptRow
from verl.data.trajectory import Trajectory
from verl.utils.errors import DataError
from verl.workers.rollout.base import Completion, SamplingParams


async def ask_twice(setting: LoopSetting, policy: Policy, row: PromptRow) -> list[Trajectory]:
    template, said = setting.incremental_template(), Transcript()
    said.prompt_ids = template.initial_tokens(row.messages)
    said.add_answer(await policy.generate(said.prompt_ids, policy.sampling))
    said.add_turns(template.appended_tokens([{"role": "user", "content": "Sure?"}], said.response_ids))
    said.add_answer(await policy.generate([*said.prompt_ids, *said.response_ids], policy.sampling))
    return [said.trajectory(policy, row.index, LoopTimings(tool_calls=1.5), num_turns=4, reward=2.0)]


def test_a_loop_returns_what_was_sampled_with_its_logprobs_and_versions(
    tokenizer: Any, tool_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(AGENT_LOOPS, "_items", {**AGENT_LOOPS._items, "ask_twice": ask_twice})
    turns = ["five<|im_end|>", "Yes, five.<|im_end|>"]
    found = run_conversations(
        make_agent_runner(tokenizer, tool_file), ScriptedEngine(tokenizer, turns), n=2, agent_name="ask_twice"
    )
    assert [(t.group_id, t.conversation, t.row, t.reward) for t in found] == [(7, 0, 4, 2.0), (7, 1, 4, 2.0)]
    first, second = (tokenizer(turn)["input_ids"] for turn in turns)
    for t in found:
        assert t.tokens[t.loss_mask].tolist() == first + second
        assert (t.rollout_logprobs[t.loss_mask] == -0.5).all() and (t.rollout_logprobs[~t.loss_mask] == 0).all()
        assert t.segments == ((0, len(first)), (1, len(second))) and t.policy_version == (0, 1)
        assert t.stop_reason == "stop" and t.loop_timings["tool_calls"] == 1.5
    text = tokenizer.decode(found[0].tokens)
    assert text.endswith("<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes, five.<|im_end|>")


def test_a_transcript_that_is_longer_than_the_model_takes_is_refused():
    policy = Policy(None, SamplingParams(), 5, 0, 0)  # type: ignore[arg-type]
    said = Transcript(prompt_ids=[1, 2])
    said.add_answer(Completion([3, 4, 5], [-1.0] * 3, "length", (0, 0)))
    assert said.trajectory(policy, 0, {}).stop_reason == "length"
    said.add_turns([6])
    with pytest.raises(DataError, match=r"have 2 \+ 4 tokens, more than the 5 of rollout.max_model_len"):
        said.trajectory(policy, 0, {})


NO_DOOR = """
import sys
import verl.agent.agent_runner, verl.commands.certify.plain_gradient, verl.trainer.ppo.run_setup
from verl.utils.errors import ConfigError
assert not [name for name in sys.modules if name.startswith("verl.doors")]
try:
    verl.agent.agent_runner.load_agent_loops("loops.yaml")
except ConfigError as error:
    assert "derives from verl.experimental.agent_loop.AgentLoopBase" in str(error)
    assert not [name for name in sys.modules if name.startswith("verl.doors")]
    print("refused")
"""


def test_the_core_loads_no_door_and_a_class_that_knows_none_is_no_loop(tmp_path: Path):
    (tmp_path / "stranger.py").write_text("class Stranger:\n    async def run(self, sampling_params, **row): ...\n")
    (tmp_path / "loops.yaml").write_text("- name: x\n  _target_: stranger.Stranger\n")
    done = subprocess.run([sys.executable, "-c", NO_DOOR], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "refused\n", done.stderr
