"""`verl quickstart`: make a model and a task, warm up, train by GRPO, and compare answers before and after."""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from verl.commands.quickstart import stages
from verl.config import load_config
from verl.observe.run_changes import find_changes, results_change
from verl.observe.run_record import read_record
from verl.trainer.run.files import complete_steps
from verl.utils.cores import machine_lines
from verl.utils.errors import DataError, Interrupted, VerlError
from verl.utils.paths import expand_home
from verl.utils.process_end import end_process, say_error


def main(argv: Sequence[str] | None = None) -> int:
    """Train and report. 0: the reward rose; 1: it did not; 2: a mistake the message explains."""
    options = parse(argv)
    try:
        out = expand_home(options.out, "--out")
        return quickstart(out, options.seed, options.steps, options.overrides)
    except Interrupted as stop:
        goes_on = resumable_step(out, options.seed, options.steps, options.overrides)
        then = "the same command goes on from there" if goes_on else "the same command begins anew"
        say_error(f"error: {str(stop).partition(';')[0]}; {then}")
        return stop.exit_code
    except VerlError as error:
        say_error(f"error: {error}")
        return error.exit_code


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="verl quickstart", description=__doc__)
    parser.add_argument("--out", default="quickstart_out", help="folder for everything written (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="seed of model, task and sampling (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=None, help="GRPO steps (default: what the preset says)")
    parser.add_argument("overrides", nargs="*", help="further key=value overrides for the GRPO run")
    return parser.parse_intermixed_args(argv)


def quickstart(out: Path, seed: int, steps: int | None, overrides: list[str]) -> int:
    """Run all stages and print the command that repeats each; returns the exit code.

    Where an earlier start was stopped in or after its GRPO run, it goes on there.
    """
    from verl.commands.quickstart.addition_task import CHARACTERS, make_split, write_split
    from verl.commands.quickstart.small_model import make_model

    start = time.perf_counter()
    os.environ.setdefault("VERL_FILE_LOGGER_ROOT", str(out / "metrics"))
    split, warm = make_split(seed, stages.NUM_HELD_OUT, stages.NUM_WORKED), out / "warm"
    step = resumable_step(out, seed, steps, overrides)
    for line in machine_lines():
        print(line)
    if not step:
        stages.remove_earlier_runs(out)
        write_split(split, out / "data")
        num_parameters = make_model(out / "model", CHARACTERS, seed)
        print(
            f"1/4  a model of {num_parameters:,} random parameters, {len(split.train):,} problems to train on, "
            f"{len(split.held_out)} held out"
        )
        print(f"2/4  supervised warm-up on {len(split.worked)} worked examples")
        stages.warm_up(out, seed, split.train[stages.NUM_WORKED : stages.NUM_WORKED + stages.NUM_HELD_OUT], warm)
    print(f"3/4  GRPO, going on after step {step}; --out FOLDER begins anew there" if step else "3/4  GRPO")
    metrics = stages.train(out, warm, seed, steps, overrides, resume=step > 0)
    print("4/4  the result, reloaded by transformers")
    before, after = (stages.greedy_answers(model, split.held_out) for model in (warm, stages.newest_model(out)))
    summary = stages.report_result(out, split.held_out, before, after, metrics, time.perf_counter() - start)
    return 0 if summary["after"] > summary["before"] else 1


def resumable_step(out: Path, seed: int, steps: int | None, extra: list[str]) -> int:
    """The saved step of an unfinished GRPO run of the same settings; 0 where there is none to go on with."""
    from verl.observe.trackers import metrics_path

    config = load_config([*stages.grpo_overrides(out, out / "warm", seed, steps), *extra])
    try:
        record = read_record(out / stages.GRPO_RUN)
    except DataError:
        return 0
    goes_there = record.metrics == metrics_path("quickstart", stages.GRPO_RUN).absolute()
    is_same = goes_there and record.total_steps == config.trainer.total_training_steps
    if (out / stages.RESULT).exists() or not is_same or results_change(find_changes(record.config, config)):
        return 0
    return max(complete_steps(out / stages.GRPO_RUN), default=0)


if __name__ == "__main__":
    end_process(main)
