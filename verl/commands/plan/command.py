"""`verl plan [key=value ...]`: which role sits on which devices, and what it holds in memory. Nothing is started."""

import argparse
import sys
import warnings
from collections.abc import Sequence

from verl.config import RunConfig, load_config
from verl.utils.errors import ConfigError

EPILOG = """Planned are the devices that the keys ask for, whether this machine has them or not; without
trainer.n_gpus_per_node, those of this machine. Two tables are printed: devices x roles, and phases x memory for each
pool. The memory is an estimate from the number of parameters: give actor_rollout_ref.model.path, a folder with a
config.json; weights are not needed.

  verl plan trainer.nnodes=2 trainer.n_gpus_per_node=8 actor_rollout_ref.model.path=DIR \\
      actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2
  verl plan --device-memory 80 ... actor_rollout_ref.hybrid_engine=False actor_rollout_ref.rollout.n_gpus_per_node=4

Exit code: 0 the plan can work, 2 it cannot; the message has the numbers and the nearest plan that can."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan. 0: it can work."""
    parser = argparse.ArgumentParser("verl plan", description=__doc__, epilog=EPILOG, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--placement", action="store_true", help="the same: placement and memory are what is planned")
    parser.add_argument(
        "--device-memory", type=float, metavar="GB", help="memory of a device (default: this machine's)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON; sizes are bytes")
    options, words = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    config = load_run_config(words)
    if not options.json:
        print("verl plan: loading libraries", file=sys.stderr, flush=True)  # they take seconds
    from verl.commands.plan.planning import print_plan

    print_plan(words, config, options.device_memory, options.json)
    return 0


def load_run_config(words: Sequence[str]) -> RunConfig:
    """The configuration that `words` give over the preset; a run says its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = load_config(words)
    if not isinstance(config, RunConfig):
        raise ConfigError("this command is for runs of main_ppo; drop --config-name")
    return config
