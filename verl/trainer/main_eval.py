"""`python3 -m verl.trainer.main_eval`: score a file of answers."""

import sys

from verl.commands.score_answers import main

if __name__ == "__main__":
    sys.exit(main())
