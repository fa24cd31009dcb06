"""The validation metrics, where earlier programs import them; everything is defined in `verl.trainer.ppo`."""

from verl.trainer.ppo.validation_metrics import *
