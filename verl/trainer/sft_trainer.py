"""`python3 -m verl.trainer.sft_trainer key=value …`: supervised fine-tuning on conversations."""

import os
import sys
import time
from collections.abc import Sequence

from verl.config import SFTConfig, load_config
from verl.utils.command_line import run_command
from verl.utils.errors import VerlError

FIRST_RANK_GRACE_S = 10.0  # the first rank has spoken and ended by then, and with it the others

HELP = """Fine-tune a model on conversations.

usage: python3 -m verl.trainer.sft_trainer [--config-name NAME] [--config-dir DIR] key=value ...

  python3 -m verl.trainer.sft_trainer model.path=DIR data.train_files=rows.jsonl data.max_length=1024
  torchrun --standalone --nproc-per-node=8 -m verl.trainer.sft_trainer key=value ...   (the same with that many ranks)

Keys follow the dotted paths of docs/reference/config.md; lists are [a,b], +key adds, ~key resets to the default.
  verl config explain KEY      what a key means and what it does here
  verl config print key=value  the whole resolved configuration, with the origin of each value
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run from command-line overrides. 0: done; 2: a mistake the message explains."""
    return run_command(argv, HELP, _run)


def _run(arguments: list[str]) -> int:
    parent = os.getppid()  # before the imports: whoever ends while they take their seconds is not noticed after them
    from verl.runtime.rank import RankInfo, end_rank, end_with_parent
    from verl.trainer.rank_launch import num_ranks_to_start, start_ranks

    try:
        config = load_config(arguments, config_name="sft_trainer")
        if count := num_ranks_to_start(config):
            return start_ranks(count, arguments)
        if is_one_of_many := RankInfo.from_environment().world_size > 1:
            end_with_parent(parent)
        run_sft(config)
    except VerlError:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(FIRST_RANK_GRACE_S)  # what is wrong with a command is wrong on all ranks: the first says it
        raise
    if is_one_of_many:
        end_rank()
    return 0


def run_sft(config: SFTConfig) -> dict[str, float]:
    """Train as configured; returns the metrics of the last step."""
    from verl.plugin.platform import choose_platform
    from verl.runtime.collectives import Collectives
    from verl.runtime.rank import RankInfo
    from verl.trainer.sft import build_sft

    choose_platform(config.trainer.device)
    rank = RankInfo.from_environment()
    if rank.world_size > 1:
        rank.init_process_group()
    trainer = build_sft(config, collectives=Collectives(rank.rank, rank.world_size))
    with trainer.tracking:
        return trainer.fit()


if __name__ == "__main__":
    sys.exit(main())
