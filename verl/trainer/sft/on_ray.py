"""Fine-tuning whose ranks are Ray's actors: each runs the program that torchrun would start.

The driver prints what the first rank prints, and passes a Ctrl-C or SIGTERM on to it.
"""

import asyncio
import contextlib
import io
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from verl.config import SFTConfig, load_config
from verl.plugin.platform import get_platform
from verl.runtime.group import Layout, WorkerGroup
from verl.runtime.rank import RankInfo
from verl.runtime.ray_cluster import Devices, join_cluster
from verl.runtime.ray_group import RayGroup
from verl.trainer.run.header import say
from verl.trainer.run.interrupt import Interrupt
from verl.trainer.sft.run import run_sft
from verl.utils.errors import Interrupted, WorkerError

if TYPE_CHECKING:
    from verl.trainer.sft.trainer import SFTTrainer

POLL_S = 0.2  # how often the driver looks for a signal to pass on

End = tuple[str, int] | None  # message and exit code of a run that a signal stopped


class _Printed(io.TextIOBase):
    """A stdout whose text waits for the driver."""

    def __init__(self, on_text: Callable[[], None]) -> None:
        self.texts: SimpleQueue[str] = SimpleQueue()
        self.on_text = on_text

    def write(self, text: str) -> int:
        self.texts.put(text)
        self.on_text()
        return len(text)


class SFTRank:
    """The worker of one rank."""

    def __init__(self, root: type[SFTConfig], preset: str, words: Sequence[str]):
        self.config = load_config(words, config_name=preset, root=root)
        self.printed = _Printed(self.tell)
        self.trainer: SFTTrainer | None = None  # once everything is loaded
        self.may_step = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.news = asyncio.Event()  # text, everything is loaded, or the end
        self.has_ended = self.has_said_loaded = False

    def tell(self) -> None:
        """Wake `output`; any thread may."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.news.set)

    async def run(self) -> End:
        """Train to the end, in a thread of its own."""
        self.loop = asyncio.get_running_loop()
        try:
            return await asyncio.to_thread(self.train)
        finally:
            self.has_ended = True
            self.news.set()

    def train(self) -> End:
        """Train to the end."""
        RankInfo.from_environment().init_process_group()  # the device is that of a thread
        try:
            with contextlib.redirect_stdout(self.printed):
                run_sft(self.config, before_steps=self.await_driver)
        except Interrupted as stop:
            return str(stop), stop.exit_code
        return None

    def await_driver(self, trainer: "SFTTrainer") -> None:
        """Until the driver's first `pass_on`: from then on signals wait for the end of a step."""
        self.trainer = trainer
        self.tell()
        if trainer.collectives.is_rank_zero:
            self.may_step.wait()

    def pass_on(self, signal_number: int) -> None:
        """Let the run step; stop it after the step if a signal has arrived (0: none)."""
        assert self.trainer is not None, "the driver was told that everything is loaded"
        self.trainer.stop_requested = signal_number
        self.may_step.set()

    async def output(self) -> tuple[bool, str]:
        """Whether everything is loaded, and what was printed since the last time; waits until there is news.

        A rank that prints nothing is not called: calls would be moves of a rank that stands still.
        """
        self.news.clear()
        is_new = self.trainer is not None and not self.has_said_loaded
        if not (is_new or self.has_ended or self.printed.texts.qsize()):
            await self.news.wait()
        texts = []
        with contextlib.suppress(Empty):
            while True:
                texts.append(self.printed.texts.get_nowait())
        self.has_said_loaded = self.trainer is not None
        return self.has_said_loaded, "".join(texts)


class _Driver:
    """Follows the ranks of a group."""

    def __init__(self, group: WorkerGroup):
        self.group, self.stop_requested, self.handles_signals = group, 0, False
        self.passed_on: int | None = None
        self.note: Callable[[str], None] = say

    def follow(self, ends: Future[list[End]]) -> None:
        """Print and pass on signals until the ranks have ended; until everything is loaded, a signal ends the run."""
        with contextlib.ExitStack() as stack, contextlib.suppress(WorkerError):  # `ends` has the first error
            over = False
            while not over:
                over = ends.done()  # asked first: the last text is that of ranks that have ended
                is_loaded, text = self._await_output()
                sys.stdout.write(text)
                sys.stdout.flush()
                if is_loaded and not self.handles_signals:
                    stack.enter_context(Interrupt(self))
                    self.handles_signals = True
                elif not text:  # the first rank has ended
                    wait([ends], POLL_S)

    def _await_output(self) -> tuple[bool, str]:
        answer = self.group.post(0, "output", [()])[0]
        while True:
            if self.handles_signals and self.stop_requested != self.passed_on:
                self.passed_on = self.stop_requested
                self.group.post(0, "pass_on", [(self.passed_on,)])[0].result()
            if wait([answer], POLL_S).done:
                return answer.result()


def run_on_ray(config: SFTConfig, preset: str, words: Sequence[str], count: int) -> int:
    """Run `count` ranks of the configuration that `words` give over `preset`; 0, or Interrupted as the ranks say it."""
    cluster = join_cluster(config.ray_kwargs.ray_init, config.ray_kwargs.timeline_json_file)
    with contextlib.ExitStack() as stack:
        stack.callback(cluster.leave)
        say(cluster.describe(get_platform(), count))
        threads = stack.enter_context(ThreadPoolExecutor(1))
        settings = config.trainer
        share = config.ray_kwargs.devices_per_rank
        name = f"verl-{settings.experiment_name}-sft"
        devices = Devices(get_platform(), settings.nnodes, share, name, settings.node_wait_s)
        rank, layout = partial(SFTRank, type(config), preset, words), Layout.data_parallel(count)
        group = RayGroup(rank, layout, devices, stall_timeout_s=settings.stall_timeout_s)
        stack.callback(group.close)
        group.polls = frozenset({"output"})
        ends = threads.submit(group.broadcast, "run")
        _Driver(group).follow(ends)
        if stopped := ends.result()[0]:
            raise Interrupted(*stopped)
    return 0
