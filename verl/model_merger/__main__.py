"""`python -m verl.model_merger`: the same as `verl merge`."""

import sys

from verl.commands.parsers import merge_main
from verl.utils.errors import VerlError

if __name__ == "__main__":
    try:
        sys.exit(merge_main())
    except VerlError as error:
        sys.exit(f"error: {error}")
