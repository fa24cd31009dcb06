"""Interactions as published ones are written: a user who replies until the answer is right."""

from pathlib import Path
from typing import Any

import pytest

from tests.agent_cases import ScriptedEngine, make_agent_runner, run_conversations, tool_call_text
from verl.utils.errors import ConfigError, DataError

TURNS = "actor_rollout_ref.rollout.multi_turn"
USER = """
from verl.interactions.base import BaseInteraction

ended, seen = [], []

class Teacher(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        self.instances = {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.instances[instance_id] = ground_truth
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        seen.append([message["role"] for message in messages])
        right = self.instances[instance_id] in messages[-1]["content"]
        return (right, "Right." if right else self.config["hint"], 1.0 if right else 0.25, {})

    async def finalize_interaction(self%s):
        ended.append(self.name)
"""
ENTRY = "- {name: teacher, class_name: MODULE.Teacher, config: {hint: Try again.}}"


def runner(tmp_path: Path, monkeypatch: Any, tokenizer: Any, tool_file: Path, *more: str, **text: str) -> Any:
    module = f"user_of_{tmp_path.name}".replace("-", "_").replace("[", "").replace("]", "")
    (tmp_path / f"{module}.py").write_text(USER % text.get("parameters", ", instance_id, **kwargs"))
    entry = text.get("entry", f"interaction:\n{ENTRY}").replace("MODULE", module)
    (tmp_path / "interactions.yaml").write_text(entry)
    monkeypatch.syspath_prepend(tmp_path)
    made = make_agent_runner(
        tokenizer, tool_file, f"{TURNS}.interaction_config_path={tmp_path / 'interactions.yaml'}", *more
    )
    return made, __import__(module)


def row(**kwargs: Any) -> dict[str, Any]:
    return {"extra_info": {"interaction_kwargs": {"ground_truth": "5", **kwargs}}}


@pytest.mark.parametrize("parameters", ["", ", instance_id, **kwargs"])
def test_a_user_replies_until_the_answer_is_right(tmp_path, monkeypatch, tokenizer, tool_file, parameters):
    made, user = runner(tmp_path, monkeypatch, tokenizer, tool_file, parameters=parameters)
    turns = ["It is 4.<|im_end|>", tool_call_text("add", a=2, b=3), "It is 5.<|im_end|>"]
    [t] = run_conversations(made, ScriptedEngine(tokenizer, turns), **row(name="teacher"))
    sampled = [token for turn in turns for token in tokenizer(turn)["input_ids"]]
    assert t.tokens[t.loss_mask].tolist() == sampled
    assert "<|im_start|>user\nTry again.<|im_end|>" in tokenizer.decode(t.tokens)
    assert t.loop_fields["turn_scores"] == [0.25, 1.0] and t.num_turns == 6 and t.stop_reason == "stop"
    assert user.seen[-1] == ["user", "assistant", "user", "assistant", "tool", "assistant"] and user.ended == [
        "teacher"
    ]


def test_a_row_without_interaction_kwargs_ends_with_its_first_answer(tmp_path, monkeypatch, tokenizer, tool_file):
    made, user = runner(tmp_path, monkeypatch, tokenizer, tool_file)
    [t] = run_conversations(made, ScriptedEngine(tokenizer, ["It is 4.<|im_end|>"]))
    assert t.num_turns == 2 and "turn_scores" not in t.loop_fields and not user.seen


def test_a_user_stops_at_the_limit_of_turns(tmp_path, monkeypatch, tokenizer, tool_file):
    made, user = runner(tmp_path, monkeypatch, tokenizer, tool_file, f"{TURNS}.max_user_turns=1")
    [t] = run_conversations(made, ScriptedEngine(tokenizer, ["It is 4.<|im_end|>"] * 2), **row())
    assert t.num_turns == 4 and len(user.seen) == 1 and user.ended == ["teacher"]


def test_mistakes_of_file_and_row_are_named(tmp_path, monkeypatch, tokenizer, tool_file):
    for entry, said in (
        ("tools: []", "expected a list under `interaction`"),
        (f"interaction:\n{ENTRY}\n{ENTRY}", "two interactions are called 'teacher'"),
        ("interaction: [{class_name: json.JSONDecoder}]", "is no verl.interactions.base.BaseInteraction"),
    ):
        (folder := tmp_path / said[:9].replace(" ", "")).mkdir()
        with pytest.raises(ConfigError, match=said):
            runner(folder, monkeypatch, tokenizer, tool_file, entry=entry)
    made, _ = runner(tmp_path, monkeypatch, tokenizer, tool_file)
    with pytest.raises(DataError, match=r"interaction_kwargs: the name 'teachr' is not .*did you mean 'teacher'"):
        run_conversations(made, ScriptedEngine(tokenizer, ["4<|im_end|>"]), **row(name="teachr"))
