"""The driver's event loop: who runs it when, what a failure or an interrupt leaves behind, how it ends."""

import _thread
import asyncio
import threading
import time
import traceback
from contextvars import ContextVar

import pytest

from verl.runtime.driver_loop import DriverLoop

DRIVER = threading.main_thread()


@pytest.fixture
def loop():
    made = DriverLoop("test loop")
    yield made
    made.close()


async def where() -> threading.Thread:
    await asyncio.sleep(0)
    return threading.current_thread()


def test_the_caller_runs_what_it_waits_for_and_needs_no_thread(loop: DriverLoop):
    before = threading.active_count()
    assert [loop.run(where()) for _ in range(3)] == [DRIVER] * 3
    assert threading.active_count() == before


def test_a_started_coroutine_goes_on_while_the_caller_computes_and_while_it_waits(loop: DriverLoop):
    threads: list[threading.Thread] = []
    away, ended = threading.Event(), threading.Event()

    async def generate() -> int:
        while not ended.is_set():
            threads.append(threading.current_thread())
            if threads[-1] is not DRIVER:
                away.set()
            await asyncio.sleep(0)
        return len(threads)

    future = loop.start(generate())
    for _ in range(3):  # the loop changes hands
        away.clear()
        assert away.wait(30)  # it goes on while this thread does not run the loop
        threads.clear()
        assert loop.run(where()) is DRIVER
        assert DRIVER in threads  # and while this thread does
    ended.set()
    assert future.result(30) > 0


def test_no_two_threads_run_the_loop_at_once(loop: DriverLoop):
    inside, overlaps = 0, 0

    async def watch(turns: int) -> None:
        nonlocal inside, overlaps
        for _ in range(turns):
            inside += 1
            time.sleep(0.0002)  # lets another thread in, if one runs the loop
            overlaps += inside > 1
            inside -= 1
            await asyncio.sleep(0)

    future = loop.start(watch(300))
    while not future.done():
        loop.run(watch(3))
    assert overlaps == 0


def test_a_failure_keeps_its_traceback_and_what_was_started_waits_for_the_next_run(loop: DriverLoop):
    async def fails() -> None:
        raise ValueError("the reward failed")

    future = loop.start(asyncio.sleep(0.01, "done"))
    with pytest.raises(ValueError, match="the reward failed") as caught:
        loop.run(fails())
    assert "in fails" in "".join(traceback.format_exception(caught.value))
    assert loop.run(where()) is DRIVER
    assert future.result(30) == "done"


def test_an_interrupt_leaves_the_coroutine_and_close_ends_all_that_was_begun():
    loop, ends = DriverLoop("test loop"), []

    async def endless(name: str) -> None:
        try:
            while True:
                await asyncio.sleep(0.001)
        finally:
            await asyncio.sleep(0)  # ending needs the loop
            ends.append(name)

    future = loop.start(endless("started"))
    threading.Timer(0.2, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(endless("waited for"))
    loop.close()
    assert sorted(ends) == ["started", "waited for"] and future.cancelled()
    assert not [thread for thread in threading.enumerate() if thread.name == "test loop"]


def test_an_exit_in_the_thread_is_raised_at_the_next_run(loop: DriverLoop):
    left = threading.Event()

    async def leaves() -> None:
        left.set()
        raise SystemExit(3)

    loop.start(leaves())
    assert left.wait(30)  # in the thread: this one has not run the loop
    with pytest.raises(SystemExit):
        loop.run(where())


def test_a_context_variable_set_by_one_coroutine_is_seen_by_the_next(loop: DriverLoop):
    variable: ContextVar[int] = ContextVar("variable", default=0)

    async def add() -> int:
        variable.set(variable.get() + 1)
        return variable.get()

    assert [loop.run(add()) for _ in range(3)] == [1, 2, 3] and variable.get() == 0
