"""The `verl` command: each verb imports one module, when it is called, and runs its function."""

import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import NoReturn

from verl import __version__
from verl.commands.verbs import VERBS
from verl.utils.errors import VerlError
from verl.utils.process_end import end_process, say_error
from verl.utils.suggest import did_you_mean

SPEAKS_FIRST = (
    "train",
    "sft",
    "dpo",
    "reward-model",
    "config",
    "report",
    "plan",
    "completion",
)  # these print before they load what is slow


def usage() -> str:
    """The text of `verl --help`."""
    verbs = "\n".join(f"  {verb:<16}{text}" for verb, (_, text) in VERBS.items())
    return f"verl {__version__}\n\nusage: verl VERB [arguments]\n\n{verbs}\n\n`verl VERB --help` explains one verb."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code; 2: a mistake the message explains. 130: Ctrl-C, also while it loads."""
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        say_error("error: stopped by Ctrl-C")
        return 130
    except BrokenPipeError:
        if not _nobody_reads(sys.stdout.fileno()):
            raise  # it was another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # `| head` has read enough
        return 0


def _nobody_reads(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(argv: Sequence[str] | None) -> int:
    verb, *arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if verb in ("-h", "--help", "help"):
        print(usage())
        return 0
    if verb in ("-V", "--version"):
        print(__version__)
        return 0
    if verb not in VERBS:
        say_error(f"error: unknown verb {verb!r}; {did_you_mean(verb, VERBS)}")
        return 2
    if verb not in SPEAKS_FIRST and not {"-h", "--help", "--json"} & set(arguments):
        print(f"verl {verb}: loading libraries", file=sys.stderr, flush=True)  # they take seconds
    module_name, _, function = VERBS[verb][0].partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        say_error(f"error: `verl {verb}` is not part of this version yet")
        return 2
    try:
        return int(getattr(module, function)(arguments) or 0)
    except VerlError as error:
        say_error(f"error: {error}")
        return error.exit_code


def command() -> NoReturn:
    """The process of a `verl` command."""
    end_process(main)


if __name__ == "__main__":
    command()
