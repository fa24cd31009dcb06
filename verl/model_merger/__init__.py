"""`python -m verl.model_merger`: see `verl.trainer.merge`."""
