"""`python3 -m verl.trainer.reward_trainer key=value …`: a reward model from pairs of answers."""

from collections.abc import Sequence
from functools import partial

from verl.config import RewardModelConfig
from verl.trainer.sft_trainer import train
from verl.utils.command_line import run_command
from verl.utils.process_end import end_process

HELP = """Train a model to score answers, the chosen of two above the rejected one.

usage: verl reward-model [--config-name NAME] [--config-dir DIR] key=value ...

  verl reward-model model.path=DIR data.train_files=pairs.jsonl
  torchrun --standalone --nproc-per-node=8 -m verl.trainer.reward_trainer key=value ...   (that many ranks)

Rows have the columns prompt, chosen and rejected, and perhaps margin (docs/train/preferences.md). Keys are those of
`verl sft`, and loss.*. The saved folder loads as AutoModelForSequenceClassification.
  verl config explain reward-model loss.name                               what a key means
  verl config print reward-model key=value    the whole resolved configuration
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run from command-line overrides. 0: done; 2: a mistake the message explains; 130, 143: interrupted."""
    return run_command(argv, HELP, partial(train, RewardModelConfig, "reward_trainer"))


if __name__ == "__main__":
    end_process(main)
