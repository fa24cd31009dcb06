"""`python -m verl VERB ...` is the command `verl VERB ...`."""

from verl.cli import command

command()
