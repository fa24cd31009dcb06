"""`python3 -m verl.experimental.one_step_off_policy.main_ppo key=value …`: main_ppo, one step off the policy."""

import sys
from collections.abc import Sequence

from verl.trainer import main_ppo
from verl.utils.process_end import end_process

PRESET = ("--config-name", "one_step_off_ppo_trainer")


def main(argv: Sequence[str] | None = None) -> int:
    """As `main_ppo.main`, from the preset one step off the policy unless the arguments name another."""
    return main_ppo.main([*PRESET, *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    end_process(main)
