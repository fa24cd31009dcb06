"""Print the configuration that a command line becomes: `verl config print`, at its old path.

python scripts/print_cfg.py data.train_batch_size=64
python scripts/print_cfg.py --changed --config-name sft_trainer optim.lr=1e-5
"""

import sys
from collections.abc import Sequence

from verl.config.explain import main as config


def main(argv: Sequence[str] | None = None) -> int:
    """0: printed; 2: a mistake the message explains."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return config(["--help"])
    return config(["print", *arguments])


if __name__ == "__main__":
    sys.exit(main())
