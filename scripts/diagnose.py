"""Say what this machine can and cannot do, and whether a configuration can run on it: `verl doctor`, at its old path.

python scripts/diagnose.py
python scripts/diagnose.py --json data.train_files=train.parquet actor_rollout_ref.model.path=DIR
"""

import sys
from collections.abc import Sequence

from verl.commands.doctor import main as doctor


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of `verl doctor`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
    return doctor(arguments)


if __name__ == "__main__":
    sys.exit(main())
