"""`python3 -m verl.trainer.sft_trainer key=value …`: supervised fine-tuning on conversations."""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from verl.config import SFTConfig, load_config
from verl.trainer.interrupt import BeforeFirstStep
from verl.utils.command_line import run_command
from verl.utils.errors import Interrupted, VerlError
from verl.utils.folder_lock import one_run_in

FIRST_RANK_GRACE_S = 10.0  # by then rank 0 has printed the error, and torchrun ends all ranks

HELP = """Fine-tune a model on conversations.

usage: python3 -m verl.trainer.sft_trainer [--config-name NAME] [--config-dir DIR] key=value ...

  python3 -m verl.trainer.sft_trainer model.path=DIR data.train_files=rows.jsonl data.max_length=1024
  torchrun --standalone --nproc-per-node=8 -m verl.trainer.sft_trainer key=value ...   (the same with that many ranks)

Keys follow the dotted paths of docs/reference/config.md; lists are [a,b], +key adds, ~key resets to the default.
  verl config explain KEY      what a key means and what it does here
  verl config print key=value  the whole resolved configuration, with the origin of each value
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run from command-line overrides. 0: done; 2: a mistake the message explains; 130, 143: interrupted."""
    return run_command(argv, HELP, _run)


def _run(arguments: list[str]) -> int:
    parent = os.getppid()  # read before the slow imports, during which the parent may end
    with BeforeFirstStep():
        import verl.trainer.rank_launch  # noqa: F401  (torch: seconds)
    from verl.runtime.rank import RankInfo, end_rank, end_with_parent
    from verl.trainer.lost_ranks import end_after_loss
    from verl.trainer.rank_launch import start_ranks

    is_one_of_many = False
    try:
        with BeforeFirstStep():
            config = load_config(arguments, config_name="sft_trainer")
            if count := num_ranks(config):
                return start_ranks(count, arguments, Path(config.trainer.default_local_dir))
            if is_one_of_many := RankInfo.from_environment().world_size > 1:
                end_with_parent(parent)
            run_sft(config)
    except Interrupted as stop:
        if not is_one_of_many:
            raise
        if os.environ["RANK"] == "0":
            print(f"error: {stop}", file=sys.stderr)
        end_rank(stop.exit_code)
    except VerlError:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(FIRST_RANK_GRACE_S)  # all ranks find the same mistake; only rank 0 prints it
        raise
    except Exception as error:
        if is_one_of_many:
            end_after_loss(error, RankInfo.from_environment().rank, Path(config.trainer.default_local_dir))
        raise
    if is_one_of_many:
        end_rank()
    return 0


def num_ranks(config: SFTConfig) -> int:
    """How many ranks must be started, 0 for none; before they are, ConfigError with all that keeps them from work."""
    from verl.trainer.preflight import Findings
    from verl.trainer.rank_launch import num_ranks_to_start

    found = Findings()
    count = found.run("ranks", lambda: num_ranks_to_start(config))
    if count != 0:
        from verl.trainer.sft_preparation import check_sft

        check_sft(config, found)
        found.refuse(lambda line: None)  # the first rank says the doubts
    return count or 0


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
    with contextlib.ExitStack() as stack:
        if rank.rank == 0:
            stack.enter_context(one_run_in(config.trainer.default_local_dir, "trainer.default_local_dir"))
        trainer = build_sft(config, collectives=Collectives(rank.rank, rank.world_size))
        stack.enter_context(trainer.tracking)
        return trainer.fit()


if __name__ == "__main__":
    sys.exit(main())
