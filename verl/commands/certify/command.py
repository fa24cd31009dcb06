"""`verl certify [key=value ...]`: check that the gradient does not depend on how a mini-batch is split."""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from verl.checks.findings import Findings
from verl.checks.machine import MODEL_KEY, check_files, check_model_place
from verl.config import HFModelConfig, RunConfig, load_config, schema
from verl.config.check import uses_critic
from verl.observe.progress import Progress
from verl.utils.errors import ConfigError, VerlError
from verl.utils.process_end import say_error

HELP = """Check that the gradient does not depend on how a mini-batch is split, packed and computed.

usage: verl certify [options] key=value ...

  verl certify actor_rollout_ref.model.path=DIR          the model, with the loss of this configuration
  verl certify --tiny actor_rollout_ref.model.path=DIR   a random two-layer model of the same family: seconds
  verl certify --tiny actor_rollout_ref.model.external_lib=my_loss actor_rollout_ref.actor.policy_loss.loss_mode=mine

Every variant is compared in float64 with the definition: one sequence at a time, no packing, every formula written out.
A relative difference above 1e-10 is a violation. In float32, more than twice the error of the plain computation is one
too. Exit code 0: all equal; 1: a violation, named; 2: a mistake the message explains.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the certificate of a configuration."""
    parser = argparse.ArgumentParser("verl certify", description=HELP, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tiny", action="store_true", help="random weights in the shape of a two-layer model")
    parser.add_argument("--ranks", type=int, default=1, help="also shard the model over this many processes (1)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--sequences", type=int, default=14, help="sequences of the mini-batch (14)")
    parser.add_argument("--length", type=int, default=48, help="tokens of the longest one (48)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mini-batch and of a tiny model (0)")
    options, overrides = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    if options.ranks < 1:
        parser.error(f"--ranks {options.ranks}: at least 1")
    try:
        config = load_config(overrides)
        check_models_and_files(config, options.tiny)
        with Progress() as progress:
            progress.stage("loading libraries")
            from verl.commands.certify.certificate import print_table
            from verl.commands.certify.comparison import certify

            certificate = certify(
                config, options.tiny, options.sequences, options.length, options.seed, options.ranks, progress
            )
    except VerlError as error:
        say_error(f"error: {error}")
        return 2
    if not options.json:
        print_table(certificate)
    else:
        print(json.dumps(certificate.as_json(), indent=2))
    return 0 if certificate.holds else 1


def check_models_and_files(config: RunConfig, tiny: bool) -> None:
    """One error with the models, data files and engines that are not there, before heavy libraries are loaded."""
    found, arr = Findings("things keep this configuration from being checked"), config.actor_rollout_ref
    models: list[tuple[str, HFModelConfig, str]] = [(MODEL_KEY, arr.model, arr.actor.strategy)]
    models += [("critic.model.path", config.critic.model, config.critic.strategy)] if uses_critic(config) else []
    for key, model, strategy in models:
        if model.path:
            check_model_place(key, model, strategy, found)
        elif not tiny:
            without = "no model.path; give the folder of a model, or --tiny for a small random one"
            found.refusal(key, ConfigError(without))
    default = schema.keys(RunConfig)["data.train_files"].default
    if config.data.train_files not in (default, os.path.expanduser(default)):  # without: random prompts
        check_files("data.train_files", config.data.train_files, found)
    found.raise_refusals()
