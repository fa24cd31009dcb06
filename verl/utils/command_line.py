"""Commands with key=value overrides: help, exit codes, errors without a traceback."""

import errno
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from verl.utils.errors import VerlError
from verl.utils.process_end import EarlyEndReport, say_error


def run_command(argv: Sequence[str] | None, help_text: str, run: Callable[[list[str]], Any]) -> int:
    """Exit code of `run(argv)`; `argv` is that of this process by default. 0: done; 2: a user error, which is printed.

    130, 143: ended by Ctrl-C, SIGTERM.

    An integer that `run` returns is the exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        print(help_text)
        return 0
    try:
        with EarlyEndReport():
            code = run(arguments)
    except VerlError as error:
        say_error(f"error: {error}")
        return error.exit_code
    except SystemExit as error:  # of user code, in a task of its own: our code returns
        say_error(
            f"error: user code called sys.exit({error.code!r}) before the run was over; raise an exception instead"
        )
        return error.code if isinstance(error.code, int) and error.code else 1
    except KeyboardInterrupt:
        say_error(
            "error: stopped at once by Ctrl-C; what was not saved is lost: a training run goes on from its last "
            "checkpoint when the same command is run again under its name (trainer.experiment_name)"
        )
        return 128 + signal.SIGINT
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        say_error(f"error: no room is left on the disk: {error}; make some and run the command again")
        return 2
    return code if isinstance(code, int) else 0
