"""`verl plan [key=value ...]`: which role sits on which devices, and what it holds in memory; with --schedule RUN, what
asynchronous training would gain. Nothing is started."""

import argparse
import sys
from collections.abc import Sequence

from verl.commands.plan.run_config import load_run_config
from verl.utils.errors import ConfigError

EPILOG = """Planned are the devices that the keys ask for, whether this machine has them or not; without
trainer.n_gpus_per_node, those of this machine. Two tables are printed: devices x roles, and phases x memory for each
pool. The memory is an estimate from the number of parameters: give actor_rollout_ref.model.path, a folder with a
config.json; weights are not needed.

  verl plan trainer.nnodes=2 trainer.n_gpus_per_node=8 actor_rollout_ref.model.path=DIR \\
      actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2
  verl plan --device-memory 80 ... actor_rollout_ref.hybrid_engine=False actor_rollout_ref.rollout.n_gpus_per_node=4

With --schedule, from three synchronous steps or more of a run (its folder): steps per hour and age of the answers for
sync, colocate_async, one_step_off and fully_async, the best split of the devices, and whether it helps at all. Keys:
async_training.staleness_threshold, trainer.v1.sampler.*, trainer.n_gpus_per_node (devices), and with
actor_rollout_ref.rollout.n_gpus_per_node a split of your own.

  verl plan --schedule checkpoints/tutorial/mine async_training.staleness_threshold=0.5 trainer.n_gpus_per_node=8

Exit code: 0 the plan can work (or the schedules are printed), 2 it cannot; the message has the numbers and the nearest
plan that can."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan. 0: it can work."""
    parser = argparse.ArgumentParser("verl plan", description=__doc__, epilog=EPILOG, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--placement", action="store_true", help="the same: placement and memory are what is planned")
    parser.add_argument("--schedule", metavar="RUN", help="plan the schedule of a run: its folder, or its metrics file")
    parser.add_argument(
        "--device-memory", type=float, metavar="GB", help="memory of a device (default: this machine's)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON; sizes are bytes")
    options, words = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    if options.schedule is not None:
        return _plan_schedule(options, words)
    config = load_run_config(words)
    if not options.json:
        print("verl plan: loading libraries", file=sys.stderr, flush=True)  # they take seconds
    from verl.commands.plan.planning import print_plan

    print_plan(words, config, options.device_memory, options.json)
    return 0


def _plan_schedule(options: argparse.Namespace, words: Sequence[str]) -> int:
    if options.placement or options.device_memory is not None:
        raise ConfigError("--schedule plans no placement and no memory; drop --placement and --device-memory")
    if not options.json:
        print("verl plan: loading libraries", file=sys.stderr, flush=True)
    from verl.commands.plan.schedule import print_schedule

    print_schedule(options.schedule, words, options.json)
    return 0
