"""Scores of a reward model as rewards: tokens that it reads, passes, parts and weights, and what is refused."""

import asyncio
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from tests.engine_cases import save_tiny_model, tiny_qwen3
from tests.reward_models import save_reward_model
from verl.commands.quickstart.addition_task import CHARACTERS
from verl.commands.quickstart.small_model import make_model
from verl.config import load_config
from verl.rewards import call_retries
from verl.rewards.base import RewardInput
from verl.rewards.conversation_tokens import ConversationTokens, other_tokenizer
from verl.rewards.function_reward import CallRules
from verl.rewards.model_reward import ModelReward
from verl.rewards.model_setup import build_model_reward
from verl.rewards.reward_setup import build_reward
from verl.utils.errors import ConfigError, RewardError, WorkerError

KEY = "reward.reward_model"
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}!"


class Lengths:
    """A backend that scores a sequence by its length, and notes its passes."""

    def __init__(self, seconds: float = 0.0, scale: float = 1.0):
        self.seconds, self.scale, self.passes = seconds, scale, []

    def metrics(self):
        return {"reward_model/perf/x": 1.0}

    async def scores(self, sequences):
        self.passes.append([list(ids) for ids in sequences])
        await asyncio.sleep(self.seconds)
        return [self.scale * len(ids) for ids in sequences]


@pytest.fixture
def policy(tmp_path: Path):
    make_model(tmp_path / "policy", CHARACTERS, 0, hidden=16, layers=1)
    return AutoTokenizer.from_pretrained(tmp_path / "policy")


class Failing(Lengths):
    """Its first `times` passes fail by `error`."""

    def __init__(self, times: int, error: Exception):
        super().__init__()
        self.times, self.error = times, error

    async def scores(self, sequences):
        scores = await super().scores(sequences)
        if len(self.passes) <= self.times:
            raise self.error
        return scores


def reward_model(backend, policy=None, weight=1.0, **rules) -> ModelReward:
    reader = SimpleNamespace(read=lambda item: item.answer.tokens.tolist())
    reader = reader if policy is None else ConversationTokens(policy, None, None)
    model = ModelReward(reader, CallRules(weights={"rm": weight}, **rules), True)
    model.backend = backend
    return model


def sampled(ids, messages=()):
    """The fields of what an answer was sampled as."""
    return {"answer": SimpleNamespace(tokens=torch.tensor(ids)), "row": SimpleNamespace(messages=messages)}


def answer(*ids: int, text: str = "", **fields) -> RewardInput:
    return RewardInput("toy", text, None, {}, where="rows.jsonl line 1", **sampled(ids, **fields))


def scored(reward, *inputs: RewardInput):
    return asyncio.run(reward.score(inputs))


def run_config(folder: Path, *keys: str):
    return load_config([f"{KEY}.enable=True", f"{KEY}.model_path={folder}", *keys])


def test_all_that_waits_is_scored_in_one_pass_and_what_comes_meanwhile_in_the_next():
    model = reward_model(backend := Lengths(0.02))

    async def main():
        early = [asyncio.create_task(model.score([answer(1), answer(1, 2)])) for _ in range(5)]
        await asyncio.sleep(0.01)
        late = [asyncio.create_task(model.score([answer(1, 2, 3)])) for _ in range(3)]
        return await asyncio.gather(*early, *late)

    found = asyncio.run(main())
    assert [len(one) for one in backend.passes] == [10, 3]
    assert [[score.value for score in group] for group in found] == [[1.0, 2.0]] * 5 + [[3.0]] * 3
    metrics = model.metrics()
    assert (metrics["reward_model/sequences"], metrics["reward_model/tokens"]) == (13, 24)
    assert metrics["reward_model/passes"] == 2 and metrics["reward_model/tokens_per_s"] > 0
    assert metrics["reward_model/perf/x"] == 1.0 and model.metrics() == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_no_number_stops_the_run_or_is_counted(value):
    with pytest.raises(RewardError, match="it must be finite"):
        scored(reward_model(Lengths(scale=value)), answer(1))
    [score] = scored(reward_model(Lengths(scale=value), on_error="count"), answer(1))
    assert score.value is None and "must be finite" in score.error


def test_a_pass_that_fails_is_the_error_of_its_answers_and_not_of_later_ones():
    model = reward_model(Failing(1, RewardError("the server is gone")), on_error="count")

    async def main():
        return [await model.score([answer(1, 2)]) for _ in range(2)]

    [[lost], [found]] = asyncio.run(main())
    assert lost.value is None and "the server is gone" in lost.error and found.value == 2.0


FAILURES = [RewardError("away"), RuntimeError("away"), WorkerError(1, "forward", "away")]


@pytest.mark.parametrize("error", FAILURES, ids=["server", "rank here", "other rank"])
def test_a_pass_that_fails_is_made_again_and_its_answers_count_the_attempts(error, monkeypatch):
    monkeypatch.setattr(call_retries, "FIRST_WAIT_S", 0.01)
    model = reward_model(backend := Failing(2, error), retries=2)
    start = time.perf_counter()
    assert [(s.value, s.retries) for s in scored(model, answer(1), answer(1, 2))] == [(1.0, 2), (2.0, 2)]
    assert time.perf_counter() - start >= (0.01 + 0.02) / 2
    assert backend.passes == [[[1], [1, 2]]] * 3 and model.metrics()["reward_model/passes"] == 1
    with pytest.raises(type(error), match="away"):
        scored(reward_model(Failing(3, error), retries=2), answer(1))
    [lost] = scored(reward_model(Failing(9, error), retries=1, on_error="count"), answer(1))
    assert (lost.value, lost.retries) == (None, 1) and "away" in lost.error


@pytest.mark.parametrize("how", ["is_death", "is_stall"])
def test_ranks_that_have_ended_are_not_asked_again_and_stop_the_run(how: str):
    backend = Failing(9, WorkerError(1, "forward", "it is gone", **{how: True}))
    with pytest.raises(WorkerError, match="it is gone"):
        scored(reward_model(backend, retries=3, on_error="count"), answer(1))
    assert len(backend.passes) == 1


def test_a_score_that_is_no_number_is_not_asked_for_again():
    [score] = scored(reward_model(backend := Lengths(scale=math.nan), retries=3, on_error="count"), answer(1))
    assert score.error and score.retries == 0 and len(backend.passes) == 1


def test_a_run_ends_after_more_answers_without_a_score_than_its_budget():
    model = reward_model(Failing(9, RewardError("away")), on_error="count", max_errors=3)
    assert all(score.error for score in scored(model, *[answer(1)] * 3))
    with pytest.raises(RewardError, match=r"(?s)reward\.max_errors allows.*rows\.jsonl line 1: away.*raise reward"):
        scored(model, answer(1))


def test_beside_a_function_one_budget_counts_each_answer_once(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(call_retries, "FIRST_WAIT_S", 0.0)
    (tmp_path / "none.py").write_text("def compute_score(*, solution_str, **more):\n    return 1 / len(solution_str)\n")
    keys = ["reward.weights.rm=1.0", "reward.on_error=count", "reward.max_errors=3", "reward.retries=1"]
    config = run_config(tmp_path, *keys, f"reward.custom_reward_function.path={tmp_path / 'none.py'}")
    model = reward_model(Failing(4, RewardError("away")), on_error="count", max_errors=3, retries=1)
    reward = build_reward(config, None, model)
    assert [s.error is None for s in scored(reward, answer(1), answer(1, text="a"))] == [False, False]  # both, and one
    [score] = scored(reward, answer(1))
    assert score.retries == 2 and score.error  # one of each
    with pytest.raises(RewardError, match=r"(?s)reward\.max_errors allows.*division by zero"):
        scored(reward, answer(1))


def test_with_the_policys_tokenizer_the_sampled_tokens_are_scored(policy):
    ids = [*policy.encode("1+1=2"), policy.eos_token_id]
    model = reward_model(backend := Lengths(), policy)
    scored(model, answer(*ids), answer(*ids[:-1]))
    assert backend.passes == [[ids, ids[:-1]]]


def test_what_the_template_writes_after_the_end_mark_is_scored_too(policy):
    end = policy.eos_token
    policy.chat_template = "{% for m in messages %}{{ m['content'] }}" + end + "=1{% endfor %}"
    reader, ids = ConversationTokens(policy, None, None), policy.encode("1+1=2")
    assert reader.read(answer(*ids, policy.eos_token_id)) == policy.encode(f"1+1=2{end}=1")
    assert reader.read(answer(*ids)) == ids  # cut off: it has no end


def test_trailing_padding_is_passed_over_as_in_training(policy):
    reader = ConversationTokens(policy, None, policy.eos_token_id)
    ids = policy.encode("1+1=2")
    assert list(reader.read(answer(*ids, policy.eos_token_id, policy.eos_token_id))) == ids


def test_another_tokenizer_gets_the_conversation_in_its_own_template(policy, tmp_path: Path):
    make_model(tmp_path / "other", CHARACTERS[::-1] + "<>usraitn!", 0, hidden=16, layers=1)
    own = AutoTokenizer.from_pretrained(tmp_path / "other")
    own.chat_template = TEMPLATE
    found = other_tokenizer(policy, own, False, "model_path=x")
    item = answer(1, 2, text="2", messages=[{"role": "user", "content": "1+1="}])
    ids = ConversationTokens(policy, found, None).read(item)
    assert list(ids) == own.encode("<user>1+1=<assistant>2!", add_special_tokens=False)
    own.chat_template = None
    with pytest.raises(ConfigError, match="model_path=x: its tokenizer has no chat template"):
        other_tokenizer(policy, own, False, "model_path=x")


def test_the_same_tokenizer_is_rendered_anew_only_where_input_tokenizer_asks(policy):
    same = AutoTokenizer.from_pretrained(policy.name_or_path)
    assert other_tokenizer(policy, same, False, "x") is None
    assert other_tokenizer(policy, same, True, "x") is same
    same.chat_template = TEMPLATE
    assert other_tokenizer(policy, same, False, "x") is same


def test_weights_mix_the_reward_model_with_the_parts_of_a_function(tmp_path: Path):
    (tmp_path / "parts.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'length': float(len(solution_str)), 'acc': 1.0}\n"
    )
    weights = ["reward.weights.rm=2.0", "reward.weights.length=-0.1"]
    config = run_config(tmp_path, *weights, f"reward.custom_reward_function.path={tmp_path / 'parts.py'}")
    [score] = scored(build_reward(config, None, reward_model(Lengths(), weight=2.0)), answer(1, 2, 3, text="hello"))
    assert score.value == pytest.approx(2 * 3 - 0.1 * 5)
    assert score.extra == {"length": 5.0, "acc": 1.0, "rm": 3.0}


def test_a_function_without_weights_of_its_own_only_adds_what_is_logged(tmp_path: Path):
    (tmp_path / "one.py").write_text("def compute_score(*, solution_str, **more):\n    return {'score': 9, 'b': 7}\n")
    config = run_config(tmp_path, "reward.weights.rm=0.5", f"reward.custom_reward_function.path={tmp_path / 'one.py'}")
    [score] = scored(build_reward(config, None, reward_model(Lengths(), weight=0.5)), answer(1, 2))
    assert score.value == 1.0 and score.extra == {"b": 7, "rm": 2.0}


def test_an_answer_without_one_of_its_parts_has_no_reward(tmp_path: Path):
    (tmp_path / "none.py").write_text("def compute_score(*, solution_str, **more):\n    return {'abstain': True}\n")
    keys = ["reward.weights.rm=1.0", "reward.weights.acc=1.0"]
    config = run_config(tmp_path, *keys, f"reward.custom_reward_function.path={tmp_path / 'none.py'}")
    [score] = scored(build_reward(config, None, reward_model(Lengths())), answer(1, 2))
    assert score.abstained


def test_beside_built_in_scorers_both_parts_are_weighed(tmp_path: Path):
    config = run_config(tmp_path, "reward.weights.rm=1.0", "reward.weights.acc=10.0")
    item = RewardInput("openai/gsm8k", "#### 72", "72", **sampled([1, 2]))
    [score] = scored(build_reward(config, None, reward_model(Lengths())), item)
    assert score.value == 12.0 and score.extra["rm"] == 2.0


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["reward.weights.acc=1.0"], "reward.weights.* has no weight of the reward model"),
        ([f"{KEY}.rollout.name=native"], "native serves a judge"),
        (["reward.canary_size=4"], "keeps answers as texts"),
        ([f"{KEY}.enable=False", "reward.weights.rm=1.0"], "weighs a reward model"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(keys, said, tmp_path: Path):
    with pytest.raises(ConfigError, match=said):
        run_config(tmp_path, *keys)


def test_what_is_no_reward_model_is_refused_before_anything_starts(policy, tmp_path: Path):
    here = Path(policy.name_or_path)
    several = save_reward_model(tmp_path / "several", tiny_qwen3(), here, labels=3)
    headless = save_reward_model(tmp_path / "headless", tiny_qwen3(), here)
    save_tiny_model(tmp_path / "plain")
    (tmp_path / "plain" / "model.safetensors").rename(headless / "model.safetensors")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match=f"{KEY}.enable=True needs {KEY}.model_path=DIR"):
        build_model_reward(load_config([f"{KEY}.enable=True"]), policy, True)
    for folder, said in (
        (tmp_path / "missing", "neither a folder nor in the local"),
        (empty, "has no config.json"),
        (here, "is no reward model: its config.json says Qwen3ForCausalLM"),
        (several, "has 3 labels, and a reward model has one"),
        (headless, "a reward model has a head score.weight"),
    ):
        with pytest.raises(ConfigError, match=f"{KEY}.model_path=.*{said}"):
            build_model_reward(run_config(folder), policy, True)


def test_a_folder_of_one_label_is_a_reward_model_by_the_rules_of_the_run(policy, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(call_retries, "FIRST_WAIT_S", 0.0)
    folder = save_reward_model(tmp_path / "rm", tiny_qwen3(), Path(policy.name_or_path))
    keys = ["reward.weights.rm=3.0", "reward.on_error=count", "reward.max_errors=1", "reward.retries=1"]
    made = build_model_reward(run_config(folder, *keys), policy, True)
    assert made.weight == 3.0 and made.reader.own is None
    assert made.reader.pad == json.loads((folder / "config.json").read_text())["pad_token_id"]
    made.backend = Failing(3, RewardError("away"))
    [lost] = scored(made, answer(*policy.encode("1+1=2")))
    assert lost.error and lost.retries == 1
    [found] = scored(made, answer(*policy.encode("1+1=2")))
    assert found.value == 15.0 and found.retries == 1
    made.backend = Failing(9, RewardError("away"))
    with pytest.raises(RewardError, match=r"reward\.max_errors allows"):
        scored(made, answer(*policy.encode("1+1=2")))
