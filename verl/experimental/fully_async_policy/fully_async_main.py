"""`python3 -m verl.experimental.fully_async_policy.fully_async_main key=value …`: main_ppo, fully asynchronous."""

import sys
from collections.abc import Sequence

from verl.trainer import main_ppo
from verl.utils.process_end import end_process

PRESET = ("--config-name", "fully_async_ppo_trainer")


def main(argv: Sequence[str] | None = None) -> int:
    """As `main_ppo.main`, from the preset of fully asynchronous training unless the arguments name another."""
    return main_ppo.main([*PRESET, *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    end_process(main)
