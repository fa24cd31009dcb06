"""`python3 -m verl.trainer.sft_trainer key=value …`: supervised fine-tuning on conversations."""

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from verl import __version__
from verl.checks.findings import Findings
from verl.checks.machine import early_findings
from verl.config import SFTConfig, load_config
from verl.trainer.run.folder import named_for_ranks
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


def train(config_class: type[SFTConfig], preset: str, arguments: list[str]) -> int:
    """Train on the rows of a configuration of `config_class`, as one rank or by starting several; the exit code."""
    parent = os.getppid()  # read before the slow imports, during which the parent may end
    with BeforeFirstStep():
        config = load_config(arguments, config_name=preset, root=config_class)
        if "WORLD_SIZE" not in os.environ:
            say(f"verl {__version__}: {config.task} of {config.model.path}")
        found = early_findings(config) if os.environ.get("RANK", "0") == "0" else Findings()
        found.tell_refusals(say)
        import verl.trainer.sft.rank_launch  # noqa: F401  (torch: seconds)
    from verl.placement.devices import chosen_runtime, report_local_head
    from verl.runtime.rank import RankInfo, end_rank, end_with_parent
    from verl.trainer.sft.lost_ranks import end_if_rank_lost
    from verl.trainer.sft.on_ray import run_on_ray
    from verl.trainer.sft.rank_launch import run_torchrun

    is_one_of_many = False
    try:
        with BeforeFirstStep():
            count = check_and_count_ranks(config, found)
            if "WORLD_SIZE" not in os.environ:
                report_local_head(config.trainer, say)
            if count:
                config, place = named_for_ranks(config)
                words = [*arguments, f"trainer.experiment_name={config.trainer.experiment_name}"]
                say(f"starting {count} rank{'s' * (count > 1)}; {place.state}")
                if chosen_runtime(config.trainer) == "ray":
                    return run_on_ray(config, preset, words, count)
                return run_torchrun(count, config.module, words, Path(config.trainer.default_local_dir))
            if is_one_of_many := RankInfo.from_environment().world_size > 1:
                end_with_parent(parent)
            run_sft(config, found=found if found.rows else None)
    except Interrupted as stop:
        if not is_one_of_many:
            raise
        end_if_rank_lost(stop, RankInfo.from_environment().rank, Path(config.trainer.default_local_dir))
        if os.environ["RANK"] == "0":
            say_error(f"error: {stop}")
        end_rank(stop.exit_code)
    except VerlError:
        if os.environ.get("RANK", "0") != "0":
            time.sleep(FIRST_RANK_GRACE_S)  # all ranks find the same mistake; only rank 0 prints it
        raise
    except Exception as error:
        if is_one_of_many:
            end_if_rank_lost(error, RankInfo.from_environment().rank, Path(config.trainer.default_local_dir))
        raise
    if is_one_of_many:
        end_rank()
    return 0


def check_and_count_ranks(config: SFTConfig, found: Findings) -> int:
    """How many ranks must be started, 0 for none; before they are, ConfigError with all that keeps them from work.

    All that a rank would find is looked for if something in `found` is wrong already.
    """
    from verl.checks.loaded import find_device
    from verl.trainer.sft.rank_launch import num_ranks_to_start

    is_wrong, count = bool(found.errors), None
    if find_device(config.trainer.device, found) is not None:
        count = found.run("ranks", lambda: num_ranks_to_start(config))
    if count != 0 or is_wrong:
        from verl.trainer.sft.preparation import check_sft, prepare_sft

        (prepare_sft if is_wrong else check_sft)(config, found)
        found.refuse(lambda line: None)  # the first rank says the doubts
    return count or 0


if __name__ == "__main__":
    end_process(main)
