"""`python3 -m verl.trainer.main_generation_server`: answer every prompt of a data file."""

import sys

from verl.commands.generate_answers import main

if __name__ == "__main__":
    sys.exit(main())
