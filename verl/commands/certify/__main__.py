"""`python -m verl.trainer.certify key=value …`."""

import sys

from verl.commands.certify.command import main

if __name__ == "__main__":
    sys.exit(main())
