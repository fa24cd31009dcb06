"""What commands whose arguments are key=value overrides share: help, exit codes, errors without a traceback."""

import errno
import sys
from collections.abc import Callable, Sequence
from typing import Any

from verl.utils.errors import VerlError


def run_command(argv: Sequence[str] | None, help_text: str, run: Callable[[list[str]], Any]) -> int:
    """`run` with the arguments, those of this process by default. 0: done; 2: a mistake the message explains.

    An integer that `run` returns is the exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(help_text)
        return 0
    try:
        code = run(arguments)
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: no room is left on the disk: {error}; make some and run the command again", file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0
