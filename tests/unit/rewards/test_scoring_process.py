"""The function runs in processes of its own: one for all calls, or with `remote` and `prime` one for each of them."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from verl.config import ConfigError, load_config
from verl.rewards.base import RewardInput
from verl.rewards.reward_setup import build_reward
from verl.rewards.scoring_pool import end_scoring_processes, scoring_processes
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
    if act == "wait":  # until somebody makes the file
        while not os.path.exists(argument):
            time.sleep(0.01)
        argument = 0
    if act == "sleep":
        time.sleep(float(argument))
    if act == "begin":
        open(argument, "w").close()
        time.sleep(0.5)
        argument = 0
    if act == "pid":
        open(argument, "a").write(f"{os.getpid()} ")
        argument = 0
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
    (found,) = score(reward, "object")
    assert found.value == 1.0 and found.extra["extra"].startswith("<object object at")
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
import asyncio, sys
from verl.rewards.calls import ScorerSource
from verl.rewards.scoring_pool import ScoringPool
from verl.rewards.scoring_process import LocalChild
pool = ScoringPool(ScorerSource(sys.argv[1], "compute_score", {}, tuple(sys.path)), LocalChild.start)
row = dict(data_source="toy", ground_truth="7", extra_info=None)
async def main():
    print((await pool.call([dict(solution_str="add 1", **row)]))[0].result["pid"], flush=True)
    await pool.call([dict(solution_str="hang", **row)])
asyncio.run(main())
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


def test_a_process_of_a_scorer_does_not_load_torch():
    code = "import sys, verl.rewards.scoring_child; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# one process for all calls


def shared(tmp_path, *overrides, **settings):
    return made(tmp_path, *overrides, name="naive", **{"workers": 4, **settings})


def test_all_calls_share_one_process_and_its_module_state(tmp_path):
    scores = score(shared(tmp_path), *["add 1"] * 40)
    assert len({one.extra["pid"] for one in scores}) == 1
    assert sorted(one.extra["count"] for one in scores) == list(range(1, 41))


def test_as_many_calls_run_at_once_as_there_are_workers_and_outcomes_come_one_by_one(tmp_path):
    reward, flag = shared(tmp_path, workers=3), tmp_path / "flag"

    async def both():
        waits = asyncio.create_task(reward.score(inputs(*[f"wait {flag}"] * 3)))
        waits_again = asyncio.create_task(reward.score(inputs("add 2")))
        done, _ = await asyncio.wait({waits, waits_again}, timeout=1.0)
        assert not done  # all three threads are taken
        flag.touch()
        return [one.value for one in (*await waits, *await waits_again)]

    assert asyncio.run(both()) == [0.0, 0.0, 0.0, 2.0]


def inputs(*answers):
    return [RewardInput("toy", text, "7", {"index": i}, where=f"row {i}") for i, text in enumerate(answers)]


@pytest.mark.parametrize("act", ["hang", "spin"])
def test_the_call_beyond_its_limit_is_the_error_and_those_that_ran_beside_it_are_asked_again(tmp_path, act):
    """One that holds the interpreter lets none of the others end: only asked alone do they show which one it is."""
    reward = shared(tmp_path, "reward.timeout_s=1", "reward.on_error=count")
    found = score(reward, "sleep 0.6", "sleep 0.6", act, "sleep 0.6", *["add 1"] * 4)
    assert [one.value for one in found] == [0.6, 0.6, None, 0.6, 1.0, 1.0, 1.0, 1.0]
    assert "no result after reward.timeout_s=1.0" in found[2].error and found[2].processes_lost == 1
    assert not any(one.error for one in (*found[:2], *found[3:]))
    assert score(reward, "add 3")[0].value == 3.0


def test_the_call_that_ends_the_process_is_the_error_whatever_ran_beside_it(tmp_path):
    reward = shared(tmp_path, "reward.on_error=count")
    found = score(reward, "sleep 0.3", "die", "sleep 0.3", "add 1", "die", "add 2")
    assert [one.value for one in found] == [0.3, None, 0.3, 1.0, None, 2.0]
    assert all("it ended with signal SIGKILL during the call" in found[i].error for i in (1, 4))
    with pytest.raises(RewardError, match=r"(?s)row 1 .*it ended with signal SIGKILL"):
        score(shared(tmp_path), "sleep 0.3", "die", "sleep 0.3")


def test_waiting_for_a_turn_is_not_running_time(tmp_path):
    reward = shared(tmp_path, "reward.timeout_s=0.8", workers=1)
    assert [one.value for one in score(reward, *["sleep 0.1"] * 15)] == [0.1] * 15


def test_answers_nobody_waits_for_any_more_are_not_scored(tmp_path):
    reward, seen, flag = shared(tmp_path, workers=1), tmp_path / "seen", tmp_path / "flag"

    async def cancel_early():
        task = asyncio.create_task(reward.score(inputs(f"begin {flag}", *[f"pid {seen}"] * 20)))
        while not flag.exists():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return await reward.score(inputs("add 1"))

    assert asyncio.run(cancel_early())[0].value == 1.0 and not seen.exists()


def test_a_process_ends_with_its_reward(tmp_path):
    reward = shared(tmp_path)
    pid = score(reward, "add 1")[0].extra["pid"]
    assert scoring_processes() == [pid]
    del reward
    for _ in range(200):
        if not is_running(pid):
            break
        time.sleep(0.05)
    assert not is_running(pid)


def test_a_process_that_was_stopped_makes_no_call_late(tmp_path):
    """As by Ctrl-Z: what neither gives a sign of life nor ends has not used its time."""
    reward, flag = shared(tmp_path, "reward.timeout_s=0.5"), tmp_path / "flag"

    async def held_up():
        task = asyncio.create_task(reward.score(inputs(f"wait {flag}")))
        await asyncio.sleep(0.2)
        (pid,) = scoring_processes()
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(0.8)
        flag.touch()
        os.kill(pid, signal.SIGCONT)
        return await task

    assert asyncio.run(held_up())[0].value == 0.0


ASYNC = """
import asyncio, os, time

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    act, _, argument = solution_str.partition(" ")
    if act == "hang":
        await asyncio.sleep(90)
    if act == "block":
        time.sleep(float(argument))
    if act == "stubborn":
        while True:
            try:
                await asyncio.sleep(90)
            except asyncio.CancelledError:
                pass
    await asyncio.sleep(0.1)
    return {"score": 1.0, "pid": os.getpid()}
"""


def test_an_async_call_that_hangs_is_cancelled_and_the_process_goes_on(tmp_path):
    reward = shared(tmp_path, "reward.timeout_s=0.6", "reward.on_error=count", text=ASYNC)
    a, late, b = score(reward, "a", "hang", "b")
    assert (a.value, late.value, b.value) == (1.0, None, 1.0) and "reward.timeout_s=0.6" in late.error
    assert late.processes_lost == 0 and score(reward, "a")[0].extra["pid"] == a.extra["pid"]


def test_an_async_call_that_does_not_end_when_it_is_cancelled_ends_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr("verl.rewards.scoring_pool.GRACE_S", 0.5)
    reward = shared(tmp_path, "reward.timeout_s=0.6", "reward.on_error=count", text=ASYNC)
    a, late = score(reward, "a", "stubborn")
    assert (a.value, late.value, late.processes_lost) == (1.0, None, 1)
    assert score(reward, "a")[0].extra["pid"] != a.extra["pid"]


def test_a_busy_event_loop_does_not_make_async_calls_late(tmp_path):
    reward = shared(tmp_path, "reward.timeout_s=0.6", text=ASYNC)
    assert [one.value for one in score(reward, "a", "block 1.2", "b")] == [1.0] * 3


def test_an_async_function_that_blocks_its_loop_for_good_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("verl.rewards.scoring_pool.GRACE_S", 0.2)
    reward = shared(tmp_path, "reward.timeout_s=0.4", "reward.on_error=count", text=ASYNC)
    with pytest.raises(RewardError, match=r"mine.py\): the async function has blocked its event loop for"):
        score(reward, "a", "block 90")
