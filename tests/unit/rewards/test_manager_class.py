"""Reward managers of a user's own, written the way published ones are."""

import asyncio

import numpy as np
import pytest
import torch

from verl.config import ConfigError, load_config
from verl.data.prompts import PromptRow
from verl.data.trajectory import Trajectory
from verl.rewards.base import RewardInput
from verl.rewards.managers import check_reward_manager
from verl.rewards.reward_setup import build_reward
from verl.rewards.single_sequence_batch import NotInAnswerError, OneAnswer
from verl.utils.errors import RewardError
from verl.utils.external_code import load_module

PUBLISHED = """
import inspect
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

@register("published_manager")
class Published(RewardManagerBase):
    made = []

    @classmethod
    def init_class(cls, config, tokenizer):
        cls.made.append(config.data.max_response_length)

    def __init__(self, config, tokenizer, compute_score):
        super().__init__(config, tokenizer, compute_score)
        self.is_async = inspect.iscoroutinefunction(compute_score)

    async def run_single(self, data: DataProto) -> dict:
        assert isinstance(data, DataProto) and len(data) == 1 and not data.meta_info
        item = data[0]
        response_ids = item.batch["responses"]
        length = response_ids.shape[-1]
        valid = response_ids[: item.batch["attention_mask"][-length:].sum()]
        text = self.tokenizer.decode(valid, skip_special_tokens=True)
        row = dict(
            data_source=item.non_tensor_batch["data_source"],
            solution_str=text,
            ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
            extra_info=item.non_tensor_batch.get("extra_info", {}),
        )
        if self.is_async:
            result = await self.compute_score(**row)
        else:
            result = await self.loop.run_in_executor(None, lambda: self.compute_score(**row))
        return {"reward_score": result, "reward_extra_info": {"acc": result > 1, "text": text, "made": self.made}}
"""
FUNCTION = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1):\n"
FUNCTION += "    return scale * (len(solution_str) + float(ground_truth) + extra_info['index'])\n"


class Tokenizer:
    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(int(i)) for i in ids)


def answer(text="ab", number=0):
    trajectory = Trajectory.from_completion([65, 66, 67], [ord(c) for c in text], [-0.5] * len(text), group_id=0)
    row = PromptRow(
        index=number, location=f"row {number}", messages=[], text="ABC", prompt_ids=[65, 66, 67], truncated=False,
        data_source="toy", ground_truth="7", extra_info={"index": number}, columns={"ability": "sums"},
    )  # fmt: skip
    return RewardInput.from_row(row, text, trajectory)


def made(tmp_path, *overrides, manager=PUBLISHED, function=FUNCTION, name="Published"):
    (tmp_path / "manager.py").write_text(manager)
    (tmp_path / "mine.py").write_text(function)
    source = [
        f"reward.reward_manager.module.path={tmp_path / 'manager.py'}",
        "reward.reward_manager.source=importlib",
        f"reward.reward_manager.name={name}",
        f"reward.custom_reward_function.path={tmp_path / 'mine.py'}",
    ]
    return build_reward(load_config([*source, *overrides]), Tokenizer())


@pytest.fixture(autouse=True)
def forget_names(monkeypatch):
    monkeypatch.setattr("verl.rewards.managers.REWARD_MANAGERS._items", {**registry()})


def registry():
    from verl.rewards.managers import REWARD_MANAGERS

    return REWARD_MANAGERS._items


def score(reward, *inputs):
    return asyncio.run(reward.score(inputs))


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_manager_as_published_ones_are_scores_every_answer(tmp_path, prefix):
    scale = "+reward.custom_reward_function.reward_kwargs.scale=2"
    reward = made(tmp_path, scale, "data.max_response_length=9", function=prefix + FUNCTION)
    found = score(reward, answer("ab"), answer("abcd", 3))
    assert [one.value for one in found] == [18.0, 28.0]
    assert found[1].extra == {"acc": True, "text": "abcd", "made": [9]}


def test_a_registered_manager_is_found_by_its_name(tmp_path):
    (tmp_path / "manager.py").write_text(PUBLISHED)
    (tmp_path / "mine.py").write_text(FUNCTION)
    load_module(str(tmp_path / "manager.py"), "model.external_lib")
    overrides = [f"reward.custom_reward_function.path={tmp_path / 'mine.py'}"]
    reward = build_reward(load_config([*overrides, "reward.reward_manager.name=published_manager"]), Tokenizer())
    assert score(reward, answer("ab"))[0].value == 9.0


def test_built_in_scorers_are_its_compute_score_without_a_function_of_its_own(tmp_path):
    (tmp_path / "manager.py").write_text(PUBLISHED)
    overrides = [f"reward.reward_manager.module.path={tmp_path / 'manager.py'}", "reward.reward_manager.name=Published"]
    reward = build_reward(load_config([*overrides, "reward.reward_manager.source=importlib"]), Tokenizer())
    with pytest.raises(RewardError, match="no reward is known for data_source 'toy'"):
        score(reward, answer())


def test_one_answer_has_the_columns_of_a_batch_of_one():
    data = OneAnswer(answer("ab"))
    assert len(data) == 1 and data[0] is data[-1]
    shapes = {name: tuple(value.shape) for name, value in data.batch.items()}
    assert shapes == {
        "prompts": (1, 3), "responses": (1, 2), "input_ids": (1, 5), "attention_mask": (1, 5),
        "response_mask": (1, 2), "rollout_log_probs": (1, 2),
    }  # fmt: skip
    assert all(torch.equal(data[0].batch[name], value[0]) for name, value in data.batch.items())
    assert data.batch["responses"].tolist() == [[97, 98]] and data.batch["rollout_log_probs"].tolist() == [[-0.5, -0.5]]
    assert data[0].non_tensor_batch["ability"] == "sums" and isinstance(data.non_tensor_batch["extra_info"], np.ndarray)
    assert data.non_tensor_batch["reward_model"][0] == {"ground_truth": "7"}
    assert data[0].non_tensor_batch["__num_turns__"] == 2 and data.meta_info.get("validate", False) is False


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda data: data.batch["values"], "no 'values' in data.batch.*prompts"),
        (lambda data: data[0].non_tensor_batch["abilty"], "no 'abilty' in data.non_tensor_batch.*'ability'"),
        (lambda data: data.meta_info["global_steps"], "no 'global_steps' in data.meta_info"),
        (lambda data: data.union, "no 'union': it is one answer"),
        (lambda data: data[0].select(), "no 'select': it is one answer"),
    ],
)
def test_anything_else_raises_with_its_name_and_what_there_is(use, message):
    with pytest.raises(NotInAnswerError, match=message):
        use(OneAnswer(answer()))


def test_one_answer_can_only_be_read():
    data, item = OneAnswer(answer()), answer()
    with pytest.raises(TypeError):
        data.batch["responses"] = torch.zeros(1)
    with pytest.raises(IndexError, match="one answer"):
        data[1]
    OneAnswer(item).batch["responses"].zero_()
    assert item.answer.tokens.tolist()[-2:] == [97, 98]
    with pytest.raises(NotInAnswerError, match="known as text only"):
        OneAnswer(RewardInput("toy", "x", "7"))


BASE = "from verl.experimental.reward_loop.reward_manager import RewardManagerBase\n"
BASE += "class Published(RewardManagerBase):\n    async def run_single(self, data):\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("        return 1.0\n", "run_single returned float"),
        ("        return {'score': 1.0}\n", r"run_single returned \['score'\]"),
        ("        return {'reward_score': None}\n", "the dict's 'score' must be a number, not NoneType"),
        ("        return {'reward_score': data.batch['values']}\n", "in run_single.*no 'values' in data.batch"),
    ],
)
def test_what_it_returns_wrongly_is_an_error_that_names_the_row(tmp_path, body, message):
    with pytest.raises(RewardError, match=f"(?s)Published of .*row 0.*{message}"):
        score(made(tmp_path, manager=BASE + body), answer())
    (tmp_path / "count").mkdir()
    (found,) = score(made(tmp_path / "count", "reward.on_error=count", manager=BASE + body), answer())
    assert found.value is None and found.error


ASSEMBLES = (
    BASE + "        return {'reward_score': 3.0}\n    @classmethod\n    def assemble_rm_scores(cls, data, scores):\n"
)
ASSEMBLES += "        import torch\n        out = torch.zeros_like(data.batch['responses'], dtype=torch.float)\n"


def test_rewards_that_it_assembles_itself_must_be_at_the_last_token(tmp_path):
    last = ASSEMBLES + "        out[0, -1] = scores[0] / 2\n        return out\n"
    assert score(made(tmp_path, manager=last), answer())[0].value == 1.5
    (tmp_path / "all").mkdir()
    everywhere = ASSEMBLES + "        return out + scores[0]\n"
    with pytest.raises(RewardError, match="rewards of 2 of 2 tokens; here an answer has one reward"):
        score(made(tmp_path / "all", manager=everywhere), answer())


def manager_config(tmp_path, name, *more):
    path = f"reward.reward_manager.module.path={tmp_path / 'manager.py'}"
    source = "reward.reward_manager.source=importlib"
    return load_config([path, source, f"reward.reward_manager.name={name}", *more]).reward.reward_manager


def test_what_is_wrong_with_its_file_is_said_early(tmp_path):
    (tmp_path / "manager.py").write_text(PUBLISHED)
    check_reward_manager(manager_config(tmp_path, "Published"))
    with pytest.raises(ConfigError, match=r"reward_manager\.name='Publishd' is not defined .*'Published'"):
        check_reward_manager(manager_config(tmp_path, "Publishd"))
    with pytest.raises(ConfigError, match=r"reward_manager\.module\.path=.*there is no file"):
        check_reward_manager(manager_config(tmp_path, "x", "reward.reward_manager.module.path=/nowhere.py"))
    with pytest.raises(ConfigError, match=r"needs the class's file, reward\.reward_manager\.module\.path"):
        check_reward_manager(manager_config(tmp_path, "x", "reward.reward_manager.module.path=null"))
    with pytest.raises(ConfigError, match="not a class that derives from"):
        made(tmp_path, manager="class Published: pass\n")


def test_a_legacy_run_names_its_manager_by_the_old_keys(tmp_path, recwarn):
    old = ["reward_model.reward_loop_source=importlib", "reward_model.reward_loop_class_name=Published"]
    config = load_config([*old, f"reward_model.reward_loop_module_path={tmp_path / 'manager.py'}"])
    found = config.reward.reward_manager
    assert (found.source, found.name, found.module.path) == ("importlib", "Published", str(tmp_path / "manager.py"))


def test_what_a_data_proto_has_more_than_an_answer_names_the_replacement():
    from verl import DataProto

    assert not hasattr(DataProto, "from_single_dict")
    for name in ("from_dict", "concat", "load_from_disk"):
        with pytest.raises(NotInAnswerError, match=rf"DataProto\.{name} is not provided: .*verl\.data\.batch\.Batch"):
            getattr(DataProto, name)
    with pytest.raises(NotInAnswerError, match=r"no DataProto can be made: .*own_reward_manager\.md"):
        DataProto(batch={}, non_tensor_batch={}, meta_info={})
