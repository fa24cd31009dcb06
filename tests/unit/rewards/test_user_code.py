"""What a reward function does to its process cannot reach the trainer; one that fails in odd ways gives a sentence."""

import asyncio
import os
import random
import signal
import sys

import numpy as np
import pytest
import torch

from verl.config import CustomRewardConfig, RewardConfig
from verl.rewards.base import RewardInput
from verl.rewards.function_reward import CallRules, FunctionReward
from verl.rewards.here import Here
from verl.rewards.reward_setup import function_reward
from verl.utils.errors import ConfigError, RewardError


def item(**extra):
    return RewardInput("toy", "1", ["4", "5"], {"parts": {"a": 1}, **extra}, where="rows.jsonl line 1")


def score(reward, count=3):
    return [s.value for s in asyncio.run(reward.score([item() for _ in range(count)]))]


def made(tmp_path, text, **settings):
    (tmp_path / "mine.py").write_text(text)
    custom = CustomRewardConfig(path=str(tmp_path / "mine.py"))
    return function_reward(RewardConfig(custom_reward_function=custom, **settings))


def visible_state():
    python, numpy = random.getstate(), np.random.get_state()
    return (
        os.getcwd(),
        torch.get_default_dtype(),
        torch.initial_seed(),
        torch.is_grad_enabled(),
        torch.nn.functional.linear,
        (python[1], numpy[1].tobytes()),
        (sys.stdout, sys.stderr, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)),
        (os.fstat(1).st_ino, os.fstat(2).st_ino, sys.stdout.closed, dict(os.environ)),
    )


CHANGES = """
    os.chdir("/")
    os.environ["HOME"] = "/"
    os.close(1)
    sys.stdout.close()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
    torch.set_default_dtype(torch.float64), torch.set_grad_enabled(False)
    torch.nn.functional.linear = None
"""
IMPORTS = "import os, random, re, signal, sys, numpy, torch\n"
FUNCTION = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"


@pytest.mark.parametrize("prefix", ["", "async "])
def test_nothing_that_an_import_or_a_call_changes_reaches_the_trainer(tmp_path, prefix: str):
    at_import = "if True:" + CHANGES.replace("    os.close(1)\n    sys.stdout.close()\n", "")
    at_import = at_import.replace("    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n", "")
    body = CHANGES.replace("    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n", "")
    before = visible_state()
    reward = made(tmp_path, f"{IMPORTS}{at_import}\n{prefix}{FUNCTION}{body}    return 1\n", num_workers=1)
    assert score(reward, 1) == [1.0]
    assert visible_state() == before


def test_an_expression_that_backtracks_leaves_turns_to_the_run(tmp_path):
    turns = 0
    reward = made(tmp_path, f"{IMPORTS}{FUNCTION}    re.match('(a+)+$', 'a' * 23 + 'b')\n    return 1.0\n")

    async def scored() -> None:
        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.01)
                turns += 1

        counting = asyncio.create_task(count())
        await reward.score([item()])
        counting.cancel()

    asyncio.run(scored())
    assert turns > 10


def test_the_row_stays_as_it_was(tmp_path):
    body = (
        "    assert ground_truth == ['4', '5'] and extra_info['parts'] == {'a': 1}\n"
        "    ground_truth.append('6')\n    extra_info['parts']['a'], extra_info['mine'] = 2, 3\n    return 1\n"
    )

    def change(ground_truth, extra_info, **_):
        assert ground_truth == ["4", "5"] and extra_info["parts"] == {"a": 1}
        ground_truth.append("6")
        extra_info["parts"]["a"], extra_info["mine"] = 2, 3
        return 1

    row = item()
    for reward in (FunctionReward(Here(change), "mine"), made(tmp_path, FUNCTION + body)):
        assert [one.value for one in asyncio.run(reward.score([row, row]))] == [1.0, 1.0]
    assert row.ground_truth == ["4", "5"] and row.extra_info == {"parts": {"a": 1}}


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


def raises(error):
    def function(**_):
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda **_: 10**400, r"the score is a number beyond 1.8e\+308; it must be finite"),
        (lambda **_: {"score": -(10**5000)}, "the score is a number beyond"),
        (raises(Unprintable()), "Unprintable"),
        (lambda **_: Unprintable(), r"got Unprintable: <Unprintable, whose repr\(\) raised RuntimeError>"),
        (raises(KeyboardInterrupt()), "KeyboardInterrupt"),
        (raises(SystemExit(0)), "SystemExit"),
        (raises(GeneratorExit()), "GeneratorExit"),
    ],
)
@pytest.mark.parametrize("on_error", ["stop", "count"])
def test_what_cannot_be_a_score_or_cannot_be_printed_is_a_sentence(function, says, on_error):
    reward = FunctionReward(Here(function), "mine", rules=CallRules(on_error=on_error))
    if on_error == "stop":
        with pytest.raises(RewardError, match=says):
            score(reward)
    else:
        assert all(s.value is None and s.error for s in asyncio.run(reward.score([item()])))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("class E(Exception):\n    __str__ = None\nraise E", "E: <exception str"),
    ],
)
def test_whatever_ends_the_import_is_a_sentence(tmp_path, text, says):
    with pytest.raises(ConfigError, match=rf"(?s)running .*mine.py failed:.*{says}"):
        made(tmp_path, f"{text}\n{FUNCTION}    return 1\n")
