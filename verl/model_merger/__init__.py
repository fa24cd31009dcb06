"""`python -m verl.model_merger`: see `verl.commands.merge`."""
