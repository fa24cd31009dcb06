"""`python3 -m verl.trainer.dpo_trainer key=value …`: preference optimization of a policy on pairs of answers."""

from collections.abc import Sequence
from functools import partial

from verl.config import DPOConfig
from verl.trainer.sft_trainer import train
from verl.utils.command_line import run_command
from verl.utils.process_end import end_process

HELP = """Train a model to prefer the chosen of two answers over the rejected one.

usage: verl dpo [--config-name NAME] [--config-dir DIR] key=value ...

  verl dpo model.path=DIR data.train_files=pairs.jsonl loss.name=sigmoid loss.beta=0.1
  torchrun --standalone --nproc-per-node=8 -m verl.trainer.dpo_trainer key=value ...   (that many ranks)

Rows have the columns prompt, chosen and rejected (docs/train/preferences.md). Keys are those of `verl sft`, and loss.*.
  verl config explain dpo loss.name                            what a key means
  verl config print dpo key=value    the whole resolved configuration
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run from command-line overrides. 0: done; 2: a mistake the message explains; 130, 143: interrupted."""
    return run_command(argv, HELP, partial(train, DPOConfig, "dpo_trainer"))


if __name__ == "__main__":
    end_process(main)
