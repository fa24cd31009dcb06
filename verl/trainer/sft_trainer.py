"""`python3 -m verl.trainer.sft_trainer key=value …`: supervised fine-tuning on conversations."""

import sys
from collections.abc import Sequence

from verl.config import SFTConfig, load_config
from verl.config.load import parse_command_line
from verl.utils.errors import VerlError


def main(argv: Sequence[str] | None = None) -> int:
    """Run from command-line overrides. 0: done; 2: a mistake the message explains."""
    try:
        options = parse_command_line(sys.argv[1:] if argv is None else argv, "sft_trainer", __doc__)
        run_sft(load_config(options.overrides, config_name=options.config_name, config_dir=options.config_dir))
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run_sft(config: SFTConfig) -> dict[str, float]:
    """Train as configured; returns the metrics of the last step."""
    from verl.trainer.sft import build_sft

    trainer = build_sft(config)
    with trainer.tracking:
        return trainer.fit()


if __name__ == "__main__":
    sys.exit(main())
