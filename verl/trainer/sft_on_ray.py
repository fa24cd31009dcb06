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
from verl.trainer.interrupt import Interrupt
from verl.trainer.run_header import say
from verl.trainer.sft_trainer import run_sft
from verl.utils.errors import Interrupted, WorkerError

if TYPE_CHECKING:
    from verl.trainer.sft import SFTTrainer

POLL_S = 0.2  # how often the driver asks for what the first rank has printed

End = tuple[str, int] | None  # message and exit code of a run that a signal stopped


class _Printed(io.TextIOBase):
    """A stdout whose text waits for the driver."""

    def __init__(self) -> None:
        self.texts: SimpleQueue[str] = SimpleQueue()

    def write(self, text: str) -> int:
        self.texts.put(text)
        return len(text)


class SFTRank:
    """The worker of one rank."""

    def __init__(self, root: type[SFTConfig], preset: str, words: Sequence[str]):
        self.config = load_config(words, config_name=preset, root=root)
        self.printed = _Printed()
        self.trainer: SFTTrainer | None = None  # once everything is loaded
        self.may_step = threading.Event()

    async def run(self) -> End:
        """Train to the end, in a thread of its own."""
        return await asyncio.to_thread(self.train)

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
        """Until the driver asks for output with a `stop`: from then on signals wait for the end of a step."""
        self.trainer = trainer
        if trainer.collectives.is_rank_zero:
            self.may_step.wait()

    def output(self, stop: int | None) -> tuple[bool, str]:
        """Whether everything is loaded, and what was printed since the last time.

        `stop` is the signal to stop, or 0; None where a signal still ends the run at once.
        """
        if stop is not None and self.trainer is not None:
            self.trainer.stop_requested = stop
            self.may_step.set()
        texts = []
        with contextlib.suppress(Empty):
            while True:
                texts.append(self.printed.texts.get_nowait())
        return self.trainer is not None, "".join(texts)


class _Driver:
    """Follows the ranks of a group."""

    def __init__(self, group: WorkerGroup):
        self.group, self.stop_requested, self.handles_signals = group, 0, False
        self.note: Callable[[str], None] = say

    def follow(self, ends: Future[list[End]]) -> None:
        """Print and pass on signals until the ranks have ended; until everything is loaded, a signal ends the run."""
        with contextlib.ExitStack() as stack, contextlib.suppress(WorkerError):  # `ends` has the first error
            over = False
            while not over:
                over = ends.done()  # asked first: the last text is that of ranks that have ended
                stop = self.stop_requested if self.handles_signals else None
                is_loaded, text = self.group.post(0, "output", [(stop,)])[0].result()
                sys.stdout.write(text)
                sys.stdout.flush()
                if is_loaded and not self.handles_signals:
                    stack.enter_context(Interrupt(self))
                    self.handles_signals = True
                else:
                    wait([ends], POLL_S)


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
