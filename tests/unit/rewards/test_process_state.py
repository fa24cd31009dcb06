"""A reward that changes the process is undone and named once; one that fails in odd ways still gives a sentence."""

import asyncio
import logging
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
from verl.rewards.process_state import is_reseeded, one_batch
from verl.rewards.reward_setup import custom_reward
from verl.utils.errors import ConfigError, RewardError


def item(**extra):
    return RewardInput("toy", "1", ["4", "5"], {"parts": {"a": 1}, **extra}, where="rows.jsonl line 1")


def score(reward, count=3):
    return [s.value for s in asyncio.run(reward.score([item() for _ in range(count)]))]


def visible_state():
    python, numpy = random.getstate(), np.random.get_state()
    return (
        os.getcwd(),
        torch.get_default_dtype(),
        torch.initial_seed(),
        torch.is_grad_enabled(),
        (python[1], numpy[1].tobytes()),
        (sys.stdout, sys.stderr, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)),
        (os.fstat(1).st_ino, os.fstat(2).st_ino, sys.stdout.closed),
    )


def close_fd_1():
    os.close(1)
    os.open(os.devnull, os.O_WRONLY)  # takes its number, as the next file of the run would


CHANGES = {
    "the working folder": lambda: os.chdir("/"),
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
    "torch's seed": lambda: torch.manual_seed(3),
    "the seed of `random`": lambda: random.seed(3),
    "the seed of `numpy.random`": lambda: np.random.seed(3),
    "torch.set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "sys.stdout": lambda: setattr(sys, "stdout", open(os.devnull, "w")),  # noqa: SIM115
    "stdout (closed it)": close_fd_1,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_process_is_undone_and_named_once(name, caplog):
    seen = []

    def change(**_):
        seen.append(torch.is_grad_enabled())
        CHANGES[name]()
        return 1

    before, reward = visible_state(), FunctionReward(change, "mine", rules=CallRules(num_threads=1))
    with caplog.at_level(logging.WARNING):
        assert score(reward) == score(reward) == [1.0] * 3
    assert visible_state() == before and all(seen)
    warnings = [r.getMessage() for r in caplog.records]
    assert len(warnings) == 1 and "reward function mine changed" in warnings[0] and name in warnings[0]


@pytest.mark.parametrize("name", ["the seed of `random`", "the seed of `numpy.random`"])
def test_the_calls_of_a_rollout_read_the_generators_once_and_are_undone_at_its_end(name, caplog, monkeypatch):
    reads, read = [], random.getstate
    monkeypatch.setattr(random, "getstate", lambda: reads.append(1) or read())

    def change(**_):
        CHANGES[name]()
        return 1

    async def rollout(reward):
        with one_batch():
            await asyncio.gather(*(reward.score([item()]) for _ in range(20)))
            for _ in range(20):
                await asyncio.create_task(reward.score([item()]))
            assert len(reads) == 1 and not caplog.records
        assert len(reads) == 2

    before, reward = visible_state(), FunctionReward(change, "mine")
    reads.clear()
    asyncio.run(rollout(reward))
    assert visible_state() == before
    assert [name in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("name", [n for n in CHANGES if "grad" not in n])
def test_async_functions_are_undone_too(name, caplog):
    async def change(**_):
        CHANGES[name]()
        return 1

    before = visible_state()
    assert score(FunctionReward(change, "mine")) == [1.0] * 3
    assert visible_state() == before and sum(name in r.getMessage() for r in caplog.records) == 1


def test_the_stream_that_a_reward_closes_is_open_again(capfd, caplog):
    with capfd.disabled():
        original = sys.stdout
        sys.stdout = open(os.dup(1), "w")  # noqa: SIM115

        def close(**_):
            sys.stdout.close()
            return 1

        try:
            score(FunctionReward(close, "mine"))
            print("", end="", flush=True)
            assert not sys.stdout.closed
        finally:
            sys.stdout = original
    assert "stdout (closed it)" in caplog.text


@pytest.mark.parametrize("draws", [1, 700, 5000])
def test_drawing_numbers_is_no_reseeding(draws, caplog):
    def draw(**_):
        np.random.rand(draws)
        return sum(random.random() for _ in range(draws)) * 0 + 1

    before = random.getstate()
    assert score(FunctionReward(draw, "mine")) == [1.0] * 3
    assert not caplog.records and random.getstate() != before


def test_other_words_than_drawing_gives_are_a_seed():
    generator = random.Random(1)
    words = generator.getstate()[1][:-1]
    assert not is_reseeded(words, words) and is_reseeded(words, random.Random(2).getstate()[1][:-1])


def test_the_row_stays_as_it_was_and_the_change_is_named_once(caplog):
    def change(ground_truth, extra_info, **_):
        assert ground_truth == ["4", "5"] and extra_info["parts"] == {"a": 1}
        ground_truth.append("6")
        extra_info["parts"]["a"], extra_info["mine"] = 2, 3
        return 1

    reward, row = FunctionReward(change, "mine"), item(handle=object())
    for _ in range(2):
        asyncio.run(reward.score([row, row]))
    assert row.ground_truth == ["4", "5"] and row.extra_info["parts"] == {"a": 1} and "mine" not in row.extra_info
    assert [r.getMessage() for r in caplog.records if "ground_truth (of rows.jsonl line 1) and extra_info" in r.message]
    assert len(caplog.records) == 1


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
    reward = FunctionReward(function, "mine", rules=CallRules(on_error=on_error))
    if on_error == "stop":
        with pytest.raises(RewardError, match=says):
            score(reward)
    else:
        assert all(s.value is None and s.error for s in asyncio.run(reward.score([item()])))


FUNCTION = "\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1\n"


def load(tmp_path, text):
    (tmp_path / "mine.py").write_text(text + FUNCTION)
    return custom_reward(RewardConfig(custom_reward_function=CustomRewardConfig(path=str(tmp_path / "mine.py"))))


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
        load(tmp_path, text)


def test_ctrl_c_during_the_import_is_ctrl_c(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        load(tmp_path, "import signal\nsignal.raise_signal(signal.SIGINT)")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)", "the handler of SIGINT"),
        ("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)", "the handler of SIGTERM"),
        ("import torch\ntorch.set_grad_enabled(False)", "torch.set_grad_enabled (to False)"),
        ("import os\nos.chdir('/')", "the working folder (to /)"),
        ("import numpy\nnumpy.random.seed(0)", "the seed of `numpy.random`"),
    ],
)
def test_an_import_leaves_the_process_as_it_was(tmp_path, text, name, caplog):
    before = visible_state()
    assert score(load(tmp_path, text)) == [1.0] * 3
    assert visible_state() == before and len(caplog.records) == 1 and name in caplog.text
