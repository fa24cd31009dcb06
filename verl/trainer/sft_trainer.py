"""`python3 -m verl.trainer.sft_trainer key=value …`: supervised fine-tuning on conversations."""

import os
import time
from collections.abc import Sequence
from functools import partial

from verl.checks.findings import Findings
from verl.checks.machine import early_findings
from verl.config import SFTConfig, load_config
from verl.trainer.run.header import say
from verl.trainer.run.interrupt import BeforeFirstStep
from verl.trainer.sft.run import run_sft
from verl.utils.command_line import run_command
from verl.utils.errors import Interrupted, VerlError
from verl.utils.process_end import end_process, say_error

FIRST_RANK_GRACE_S = 10.0  # by then rank 0 has printed the error, and torchrun ends all ranks

HELP = """Fine-tune a model on conversations.

usage: python3 -m verl.trainer.sft_trainer [--config-name NAME] [--config-dir DIR] key=value ...

  python3 -m verl.trainer.sft_trainer model.path=DIR data.train_files=rows.jsonl data.max_length=1024
  torchrun --standalone --nproc-per-node=8 -m verl.trainer.sft_trainer key=value ...   (the same with that many ranks)
  python3 -m verl.trainer.sft_trainer_ray key=value ...   (the same, as actors of Ray)

Keys follow the dotted paths of docs/reference/config.md; lists are [a,b], +key adds, ~key resets to the default.
  verl config explain sft KEY      what a key means and what it does here
  verl config print sft key=value  the whole resolved configuration, with the origin of each value
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run from command-line overrides. 0: done; 2: a mistake the message explains; 130, 143: interrupted."""
    return run_command(argv, HELP, partial(train, SFTConfig, "sft_trainer"))


def train(config_class: type[SFTConfig], preset: str, arguments: list[str]) -> None:
    """Train on the rows of a configuration of `config_class`; under torchrun as one of its ranks."""
    parent, rank = os.getppid(), int(os.environ.get("RANK", "0"))  # read before the slow imports: the parent may end
    with BeforeFirstStep():
        config = load_config(arguments, config_name=preset, root=config_class)
        found = Findings() if rank else early_findings(config)
        found.tell_refusals(say)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            run_sft(config, found=found)
            return
    from verl.runtime.launched_ranks import end_if_rank_lost
    from verl.runtime.rank import end_rank, end_with_parent

    end_with_parent(parent)
    try:
        with BeforeFirstStep():
            run_sft(config, found=found)
    except BaseException as error:
        end_if_rank_lost(error)
        if isinstance(error, Interrupted):
            say_error(f"error: {error}")
            end_rank(error.exit_code)
        elif isinstance(error, VerlError) and rank:
            time.sleep(FIRST_RANK_GRACE_S)  # the first one may find the same mistake, and is the one to print it
        raise
    end_rank()


if __name__ == "__main__":
    end_process(main)
