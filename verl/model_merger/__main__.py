"""`python -m verl.model_merger`: the same as `verl merge`."""

import sys

from verl.commands.parsers import merge_main
from verl.utils.errors import VerlError
from verl.utils.process_end import end_process

if __name__ == "__main__":
    try:
        status = merge_main()
    except VerlError as error:
        sys.exit(f"error: {error}")
    end_process(status)
