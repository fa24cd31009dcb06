"""`python3 -m verl.trainer.certify key=value ...`: the earlier spelling of `verl certify`."""

import sys

from verl.commands.certify import main

if __name__ == "__main__":
    sys.exit(main())
