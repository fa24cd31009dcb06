"""`python3 -m verl.trainer.sft_trainer_ray key=value …`: `sft_trainer` with trainer.runtime=ray."""

import sys
from collections.abc import Sequence

from verl.trainer import sft_trainer
from verl.utils.process_end import end_process


def main(argv: Sequence[str] | None = None) -> int:
    """Run from command-line overrides, of which trainer.runtime=ray is the first. Codes are those of `sft_trainer`."""
    return sft_trainer.main(["trainer.runtime=ray", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    end_process(main)
