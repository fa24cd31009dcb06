"""One rank of a fine-tuning run, or the only one, from its configuration to its last step."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from verl.checks.findings import Findings
from verl.config import SFTConfig
from verl.config.run_name import with_trainer_values
from verl.observe.progress import Progress
from verl.trainer.run.folder import claimed_run
from verl.trainer.run.header import closing_lines, opening_lines, say

if TYPE_CHECKING:
    from verl.runtime.collectives import Collectives
    from verl.trainer.sft.trainer import SFTTrainer


def run_sft(
    config: SFTConfig,
    announce: Callable[[str], None] = say,
    before_steps: "Callable[[SFTTrainer], None]" = lambda trainer: None,
    found: Findings | None = None,
) -> dict[str, float]:
    """Train as configured; returns the metrics of the last step. `announce` gets the lines of header and summary.

    `found` holds the early findings, if somebody has looked.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    values: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if is_first:
            config, place = stack.enter_context(claimed_run(config))
            values = place.values
            for line in opening_lines(config, place):
                announce(line)
        progress = stack.enter_context(Progress() if is_first else Progress.silent())
        progress.stage("loading libraries")
        with _joined(config) as collectives:
            from verl.trainer.sft.trainer import build_sft

            config = with_trainer_values(config, collectives.all_gather(values)[0])
            trainer = build_sft(config, collectives=collectives, progress=progress, found=found)
            stack.enter_context(trainer.tracking)  # which closes unwatched
            if is_first:
                for line in trainer.header_lines():
                    announce(line)
            before_steps(trainer)
            try:
                return trainer.fit()
            finally:
                progress.close()
                if is_first:
                    complete = trainer.complete
                    for line in closing_lines(trainer.config, trainer.summary.lines(complete), complete):
                        announce(line)


@contextlib.contextmanager
def _joined(config: SFTConfig) -> Iterator["Collectives"]:
    """This rank among the others, which are joined here, and then watch each other, unless their driver has done so."""
    from verl.plugin.platform import choose_platform
    from verl.runtime.collectives import Collectives
    from verl.runtime.launched_ranks import watch_each_other
    from verl.runtime.rank import RankInfo
    from verl.trainer.sft.lost_ranks import stall_is_said

    choose_platform(config.trainer.device)
    rank = RankInfo.from_environment()
    collectives = Collectives(rank.rank, rank.world_size)
    has_joined = rank.world_size > 1 and rank.init_process_group()
    timeout_s = config.trainer.stall_timeout_s if has_joined else 0.0
    with watch_each_other(collectives, "fit", timeout_s, stall_is_said):
        yield collectives
