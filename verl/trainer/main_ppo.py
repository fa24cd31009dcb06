"""`python3 -m verl.trainer.main_ppo key=value …`: train a policy with PPO, GRPO and their relatives."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.checks.findings import Findings
from verl.checks.machine import early_findings
from verl.config import RunConfig, load_config
from verl.config.run_name import same_command
from verl.observe.progress import Progress
from verl.trainer.run.files import step_folder
from verl.trainer.run.folder import claimed_run
from verl.trainer.run.header import closing_lines, opening_lines, say
from verl.trainer.run.interrupt import BeforeFirstStep, interrupted_by_loss
from verl.trainer.run.restarts import Restarts, is_lost
from verl.utils.command_line import run_command
from verl.utils.errors import ConfigError
from verl.utils.import_paths import refuse_missing_names, replacement
from verl.utils.process_end import end_process

if TYPE_CHECKING:
    from verl.trainer.ppo.training_run import TrainingRun

__getattr__ = refuse_missing_names(__name__)
HELP = """Train a policy with PPO, GRPO and their relatives.

usage: python3 -m verl.trainer.main_ppo [--config-name NAME] [--config-dir DIR] key=value ...
       verl train, with the same words, is the same command

  python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=DIR algorithm.adv_estimator=grpo \\
      data.train_files=train.parquet data.val_files=test.parquet actor_rollout_ref.rollout.n=8

Keys follow the dotted paths of docs/reference/config.md; lists are [a,b], +key adds, ~key resets to the default.
  verl config explain KEY      what a key means and what it does here
  verl config print key=value  the whole resolved configuration, with the origin of each value
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run from command-line overrides. 0: done; 2: a mistake the message explains; 130, 143: interrupted."""
    return run_command(argv, HELP, _run)


def _run(words: list[str]) -> None:
    with BeforeFirstStep():
        config = load_config(words)
        if config.global_profiler.tool == "nsys":
            from verl.trainer.ppo.profiled_steps import start_under_nsys

            start_under_nsys(config)
        run_ppo(config)


def run_ppo(
    config: RunConfig,
    announce: Callable[[str], None] = say,
    before_steps: "Callable[[TrainingRun], object]" = lambda run: None,
    **foreign: Any,
) -> dict[str, float]:
    """Train as configured; returns the last validation's metrics. `announce` gets the lines of header and summary.

    ConfigError for `foreign` arguments, such as a task_runner_class, and for another kind of configuration.
    """
    if foreign or not isinstance(config, RunConfig):
        given = ", ".join([f"a {type(config).__name__}", *foreign])
        raise ConfigError(f"run_ppo got {given}: {replacement('verl.trainer.main_ppo.TaskRunner')}")
    with claimed_run(config) as (config, place):
        for line in opening_lines(config, place):
            announce(line)
        found = early_findings(config)
        found.tell_refusals(announce)  # the preparation says all, but loads libraries for seconds
        restarts = Restarts(config, announce)
        return restarts.run(
            lambda config: _train(config, announce, restarts, before_steps, None if restarts.count else found)
        )


def _train(
    config: RunConfig,
    announce: Callable[[str], None],
    restarts: Restarts,
    before_steps: "Callable[[TrainingRun], object]",
    found: Findings | None,
) -> dict[str, float]:
    """Train to the last step, or until a rank is lost."""
    ended_by: BaseException | None = None  # an error while the run closes does not take its place
    try:
        with ExitStack() as stack:
            progress = stack.enter_context(Progress())
            progress.stage("loading libraries")
            from verl.trainer.ppo.run_setup import build_run  # after the first lines: it takes seconds

            run = build_run(config, progress, found)
            if restarts.count:
                run.tracking.gauge("verl_restarts_total", restarts.count)
            for line in run.header_lines():
                announce(line)
            before_steps(run)
            stack.enter_context(run.tracking)

            def say_end() -> None:
                if restarts.follows(ended_by):
                    run.checkpoints.wait_for_copies()  # two runs would copy, and delete, the same folders
                    return
                for line in closing_lines(config, run.summary.lines(run.complete), run.complete):
                    announce(line)

            stack.callback(say_end)  # the last of these
            stack.callback(progress.close)
            stack.callback(run.observers.close_traces)
            stack.callback(run.trainer.close)
            try:
                return run.fit(restarts.began)
            except BaseException as error:
                ended_by = error
                if run.stop_requested and is_lost(error):
                    step, root = restarts.newest_step(), Path(config.trainer.default_local_dir)
                    folder = None if step is None else step_folder(root, step)
                    ended_by = interrupted_by_loss(run.stop_requested, error, folder, same_command(config))
                    raise ended_by from error
                raise
    except Exception as error:
        if ended_by is None or error is ended_by:
            raise
        announce(f"warning: {error}")
    raise ended_by


if __name__ == "__main__":
    end_process(main)
