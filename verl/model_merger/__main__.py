"""`python -m verl.model_merger`: the same as `verl merge`."""

import sys

from verl.commands.merge import main
from verl.utils.errors import VerlError

if __name__ == "__main__":
    try:
        sys.exit(main())
    except VerlError as error:
        sys.exit(f"error: {error}")
