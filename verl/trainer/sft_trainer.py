"""`python3 -m verl.trainer.sft_trainer key=value …`: supervised fine-tuning on conversations."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl import __version__
from verl.config import SFTConfig, load_config
from verl.config.run_name import with_trainer_values
from verl.observe.progress import Progress
from verl.trainer.early_checks import say_early_mistakes
from verl.trainer.run.folder import claimed_run, named_for_ranks
from verl.trainer.run.header import closing_lines, opening_lines, say
from verl.trainer.run.interrupt import BeforeFirstStep
from verl.utils.command_line import run_command
from verl.utils.errors import Interrupted, VerlError
from verl.utils.process_end import end_process, say_error

if TYPE_CHECKING:
    from verl.runtime.collectives import Collectives
    from verl.trainer.sft.trainer import SFTTrainer

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
        is_wrong = os.environ.get("RANK", "0") == "0" and say_early_mistakes(config, say)
        import verl.trainer.sft.rank_launch  # noqa: F401  (torch: seconds)
    from verl.placement.devices import chosen_runtime, report_local_head
    from verl.runtime.rank import RankInfo, end_rank, end_with_parent
    from verl.trainer.sft.lost_ranks import end_if_rank_lost
    from verl.trainer.sft.on_ray import run_on_ray
    from verl.trainer.sft.rank_launch import run_torchrun

    is_one_of_many = False
    try:
        with BeforeFirstStep():
            count = check_and_count_ranks(config, is_wrong)
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
            run_sft(config)
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


def check_and_count_ranks(config: SFTConfig, is_wrong: bool = False) -> int:
    """How many ranks must be started, 0 for none; before they are, ConfigError with all that keeps them from work.

    All that a rank would find is looked for if something `is_wrong` already.
    """
    from verl.trainer.preflight import Findings
    from verl.trainer.sft.rank_launch import num_ranks_to_start

    found = Findings()
    count = found.run("ranks", lambda: num_ranks_to_start(config))
    if count != 0 or is_wrong:
        from verl.trainer.sft.preparation import check_sft, prepare_sft

        (prepare_sft if is_wrong else check_sft)(config, found)
        found.refuse(lambda line: None)  # the first rank says the doubts
    return count or 0


def run_sft(
    config: SFTConfig,
    announce: Callable[[str], None] = say,
    before_steps: "Callable[[SFTTrainer], None]" = lambda trainer: None,
) -> dict[str, float]:
    """Train as configured; returns the metrics of the last step. `announce` gets the lines of header and summary."""
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
            trainer = build_sft(config, collectives=collectives, progress=progress)
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


if __name__ == "__main__":
    end_process(main)
