"""`python3 -m verl.trainer.main_ppo key=value …`: train a policy with PPO, GRPO and their relatives."""

import sys
from collections.abc import Sequence

from verl.config import RunConfig, load_config
from verl.config.load import parse_command_line
from verl.utils.errors import VerlError


def main(argv: Sequence[str] | None = None) -> int:
    """Run from command-line overrides. 0: done; 2: a mistake the message explains."""
    try:
        options = parse_command_line(sys.argv[1:] if argv is None else argv, "ppo_trainer", __doc__)
        run_ppo(load_config(options.overrides, config_name=options.config_name, config_dir=options.config_dir))
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run_ppo(config: RunConfig) -> dict[str, float]:
    """Train as configured; returns the last validation's metrics."""
    from verl.trainer.ppo.build import build_run

    run = build_run(config)
    with run.tracking:
        try:
            return run.fit()
        finally:
            run.trainer.close()


if __name__ == "__main__":
    sys.exit(main())
