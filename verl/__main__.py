"""`python -m verl VERB ...` is the command `verl VERB ...`."""

import sys

from verl.cli import main

sys.exit(main())
