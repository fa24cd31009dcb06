"""The managers `remote` and `prime`: the function runs in processes of its own."""

import asyncio
import logging
import os
import queue
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from verl.config import ConfigError, load_config
from verl.rewards.base import RewardInput
from verl.rewards.reward_setup import build_reward
from verl.rewards.scoring_process import ProcessFunction, end_scoring_processes
from verl.utils.errors import RewardError

FUNCTION = """
import os, signal, sys, time

started = os.getpid()
count = 0

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):
    global count
    count += 1
    act, _, argument = solution_str.partition(" ")
    if act == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "once" and not os.path.exists(argument):
        open(argument, "w").close()
        os._exit(7)
    if act == "hang":
        time.sleep(1000)
    if act == "spin":  # holds the interpreter, where no thread of the trainer could stop it
        import re
        re.match(r"(a+)+$", "a" * 40 + "b")
    if act == "raise":
        raise ValueError("bad " + argument)
    if act == "change":
        os.chdir("/")
        sys.stdout = None
    if act == "object":
        return {"score": 1.0, "extra": object()}
    if act == "text":
        return "good"
    if act == "numpy":
        import numpy
        return {"score": numpy.float32(0.5), "acc": numpy.bool_(True), "parts": numpy.arange(3)}
    return {"score": bonus + float(argument or 0), "pid": os.getpid(), "count": count, "seen": repr(extra_info)}
"""


@pytest.fixture(autouse=True)
def no_processes_left():
    yield
    end_scoring_processes()


def made(tmp_path, *overrides, text=FUNCTION, name="remote", workers=1):
    (tmp_path / "mine.py").write_text(text)
    common = (f"reward.num_workers={workers}", f"reward.reward_manager.name={name}", "trainer.runtime=inline")
    path = f"reward.custom_reward_function.path={tmp_path / 'mine.py'}"
    return build_reward(load_config([path, *common, *overrides]), None)


def score(reward, *answers, **extra):
    inputs = [RewardInput("toy", text, "7", {"index": i, **extra}, where=f"row {i}") for i, text in enumerate(answers)]
    return asyncio.run(reward.score(inputs))


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_calls_run_elsewhere_and_change_nothing_here(tmp_path):
    reward = made(tmp_path, "+reward.custom_reward_function.reward_kwargs.bonus=10", workers=2)
    folder, stdout = os.getcwd(), sys.stdout
    scores = score(reward, *["add 1", "change", "add 2"] * 4, array=np.arange(2), pair=(1, 2))
    assert [one.value for one in scores] == [11.0, 10.0, 12.0] * 4
    pids = {one.extra["pid"] for one in scores}
    assert 1 <= len(pids) <= 2 and os.getpid() not in pids
    assert "'array': array([0, 1]), 'pair': (1, 2)" in scores[0].extra["seen"]
    assert (os.getcwd(), sys.stdout) == (folder, stdout)
    assert not any(getattr(m, "__file__", "") == str(tmp_path / "mine.py") for m in sys.modules.values())
    end_scoring_processes()
    assert not any(map(is_running, pids))


def test_a_process_that_dies_is_an_error_of_its_call_and_is_replaced(tmp_path, caplog):
    reward = made(tmp_path, "reward.on_error=count")
    with caplog.at_level(logging.ERROR):
        before, dead, after = score(reward, "add 1", "die", "add 2")
    assert (before.value, dead.value, after.value) == (1.0, None, 2.0)
    assert "ProcessLostError: it ended with signal SIGKILL during the call" in dead.error
    assert (before.processes_lost, dead.processes_lost, after.processes_lost) == (0, 1, 0)
    assert before.extra["pid"] != after.extra["pid"] and after.extra["count"] == 1
    with pytest.raises(RewardError, match=r"(?s)row 0.*it ended with signal SIGKILL"):
        score(made(tmp_path), "die")


def test_a_call_whose_process_died_is_made_again_in_another(tmp_path, monkeypatch):
    monkeypatch.setattr("verl.rewards.call_retries.FIRST_WAIT_S", 0.0)
    text = FUNCTION.replace("float(argument or 0)", "5")
    (found,) = score(made(tmp_path, "reward.retries=1", text=text), f"once {tmp_path}/flag")
    assert (found.value, found.retries, found.processes_lost) == (5.0, 1, 1)


@pytest.mark.parametrize("act", ["hang", "spin"])
def test_a_call_beyond_its_limit_is_killed(tmp_path, act):
    reward = made(tmp_path, "reward.timeout_s=0.5", "reward.on_error=count", name="prime")
    first, late, after = score(reward, "add 1", act, "add 2")
    assert (first.value, late.value, after.value) == (1.0, None, 2.0)
    assert "no result after reward.timeout_s=0.5" in late.error and late.processes_lost == 1
    assert not is_running(first.extra["pid"])


def test_errors_have_the_traceback_of_the_function_and_results_are_checked_as_ever(tmp_path):
    reward = made(tmp_path)
    with pytest.raises(RewardError, match=r'(?s)row 0.*mine\.py", line \d+, in compute_score.*ValueError: bad luck'):
        score(reward, "raise luck")
    with pytest.raises(RewardError, match="expected a number, a bool or a dict with 'score', got str"):
        score(reward, "text")
    with pytest.raises(RewardError, match="what it returned cannot leave its process: a object is no number"):
        score(reward, "object")
    (found,) = score(reward, "numpy")
    assert found.value == 0.5 and found.extra == {"acc": True, "parts": [0, 1, 2]}
    with pytest.raises(RewardError, match="the row cannot travel to another process"):
        score(reward, "add 1", handle=sys.stdout)
    assert score(reward, "add 3")[0].value == 3.0


def test_an_async_function_keeps_its_event_loop(tmp_path):
    text = """
import asyncio
loops = []
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    loops.append(asyncio.get_running_loop())
    await asyncio.sleep(0)
    return float(len(set(loops)))
"""
    assert [one.value for one in score(made(tmp_path, text=text), "a", "b")] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_like_it\n", "(?s)running .*mine.py failed.*No module named 'nothing_like_it'"),
        ("def compute_scor(): pass\n", "did you mean 'compute_scor'"),
        ("def compute_score(a, b): pass\n", "cannot be called with the keywords"),
        ("import os; os._exit(3)\n", r"mine\.py\): it ended with exit code 3"),
    ],
)
def test_what_is_wrong_with_the_file_is_said_before_the_run(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        made(tmp_path, text=text)


def test_built_in_scorers_run_there_too(tmp_path):
    overrides = ["reward.reward_manager.name=prime", "reward.num_workers=1", "reward.on_error=count"]
    reward = build_reward(load_config(overrides), None)
    rows = [RewardInput("openai/gsm8k", "#### 72", "72"), RewardInput("nobody/knows", "x", "72")]
    right, unknown = asyncio.run(reward.score(rows))
    assert right.value == 1.0 and "no reward is known for data_source 'nobody/knows'" in unknown.error


def test_prime_needs_a_limit():
    with pytest.raises(ConfigError, match="prime needs the limit of a call"):
        build_reward(load_config(["reward.reward_manager.name=prime", "reward.timeout_s=null"]), None)


DRIVER = """
import asyncio, sys, time
from verl.rewards.scoring_child import ScorerSource
from verl.rewards.scoring_process import LocalChild, ProcessFunction
source = ScorerSource(sys.argv[1], "compute_score", {}, tuple(sys.path))
function = ProcessFunction(lambda: LocalChild(source), 1, None)
row = dict(data_source="toy", ground_truth="7", extra_info=None)
print(function(solution_str="add 1", **row)["pid"], flush=True)
function(solution_str="hang", **row)
"""


def test_no_process_outlives_a_driver_that_was_killed(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTION)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path / "mine.py")], stdout=subprocess.PIPE)
    pid = int(driver.stdout.readline())
    assert is_running(pid)
    driver.kill()
    driver.wait()
    driver.stdout.close()
    for _ in range(200):
        if not is_running(pid):
            break
        time.sleep(0.05)
    assert not is_running(pid)


class Sleeper:
    """A child that answers when it is told to, and not any more once it was killed."""

    def __init__(self, answers):
        self.answers, self.called, self.is_dead = answers, threading.Event(), False

    def call(self, kwargs, limit_s):
        assert not self.is_dead
        self.called.set()
        assert self.answers.wait(10)
        return {"result": 1.0}

    def kill(self):
        self.is_dead = True


def test_closing_while_calls_run_loses_no_place_for_a_process():
    function = ProcessFunction(lambda: Sleeper(threading.Event()), 2, None)
    free = function._slots._free
    race = iter([free.get])  # another thread takes a place while those that are free are being listed

    def get_nowait():
        next(race, lambda: None)()
        return queue.LifoQueue.get_nowait(free)

    free.get_nowait = get_nowait
    function.close()
    free.put(None)  # its call is done
    assert free.qsize() == 2


def test_a_process_that_was_ended_at_the_end_of_its_call_is_not_called_again():
    answers, children = threading.Event(), []

    def start():
        children.append(Sleeper(answers))
        return children[-1]

    function = ProcessFunction(start, 1, None)
    caller = threading.Thread(target=function)
    caller.start()
    while not children:
        time.sleep(0.01)
    assert children[0].called.wait(10)
    function.close()
    answers.set()
    caller.join(10)
    assert children[0].is_dead and function() == 1.0 and len(children) == 2


def test_a_process_of_a_scorer_does_not_load_torch():
    code = "import sys, verl.rewards.scoring_child; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
