"""A fine-tuning run, from its configuration to its last step."""

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from verl.checks.findings import Findings
from verl.config import SFTConfig
from verl.observe.progress import Progress
from verl.trainer.run.folder import claimed_run
from verl.trainer.run.header import closing_lines, opening_lines, say

if TYPE_CHECKING:
    from verl.trainer.sft.trainer import SFTTrainer


def run_sft(
    config: SFTConfig,
    announce: Callable[[str], None] = say,
    before_steps: "Callable[[SFTTrainer], None]" = lambda trainer: None,
    found: Findings | None = None,
) -> dict[str, float]:
    """Train as configured; returns the metrics of the last step. `announce` gets the lines of header and summary.

    It starts the ranks that `trainer` asks for, one for each device where that says nothing;
    `trainer.runtime=inline` is this process alone. `found` holds the early findings, if somebody has looked. Under
    torchrun the first rank drives; on the others this returns nothing once the run is over.
    """
    if os.environ.get("RANK", "0") != "0" and os.environ.get("WORLD_SIZE", "1") != "1":
        _join_launched(config)
        from verl.runtime.launched_ranks import serve

        serve()
        return {}
    with contextlib.ExitStack() as stack:
        config, place = stack.enter_context(claimed_run(config))
        for line in opening_lines(config, place):
            announce(line)
        progress = stack.enter_context(Progress())
        progress.stage("loading libraries")
        from verl.trainer.sft.trainer import build_sft

        _join_launched(config)
        trainer = build_sft(config, progress=progress, found=found)
        stack.enter_context(trainer.tracking)  # which closes after the ranks, and so unwatched
        stack.enter_context(trainer.ranks)
        for line in trainer.header_lines():
            announce(line)
        before_steps(trainer)
        try:
            return trainer.fit()
        finally:
            progress.close()
            for line in closing_lines(trainer.config, trainer.summary.lines(trainer.complete), trainer.complete):
                announce(line)


def _join_launched(config: SFTConfig) -> None:
    """Join the other ranks, if a launcher has started some."""
    from verl.plugin.platform import choose_platform
    from verl.runtime.launched_ranks import group_of_calls
    from verl.runtime.rank import RankInfo

    choose_platform(config.trainer.device)
    if (rank := RankInfo.from_environment()).world_size > 1:
        rank.init_process_group()
        group_of_calls()
