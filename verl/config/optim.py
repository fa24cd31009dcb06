"""Optimiser and learning-rate schedule."""

import math
from dataclasses import dataclass
from typing import Any

from verl.config.base import Section, accepts_keywords, key


@accepts_keywords(warmup_style="lr_scheduler_type", grad_clip="clip_grad")
@dataclass(frozen=True, kw_only=True)
class FSDPOptimizerConfig(Section):
    """Optimiser, schedule and gradient clipping of one model."""

    optimizer: str = key("AdamW", "Class name inside optimizer_impl.")
    optimizer_impl: str = key("torch.optim", "Module the optimiser class is imported from.")
    lr: float = key(1e-3, "Peak learning rate.", minimum=0, maximum=100)
    lr_warmup_steps: int = key(-1, "Training steps of linear warm-up; <= 0 uses lr_warmup_steps_ratio.")
    lr_warmup_steps_ratio: float = key(0.0, "Warm-up as a share of all training steps.", minimum=0, maximum=1)
    total_training_steps: int = key(
        -1, "Length of the schedule in training steps (of one or more optimiser steps); -1: the run."
    )
    weight_decay: float = key(0.01, "Decoupled weight decay.", minimum=0)
    betas: list[float] = key([0.9, 0.999], "Adam's two decay rates.")
    clip_grad: float = key(
        1.0,
        "Largest gradient norm; larger gradients are scaled down to it, inf: none.",
        greater_than=0,
        maximum=math.inf,
    )
    lr_scheduler_type: str = key("constant", "Shape after warm-up.", choices=("constant", "cosine"))
    min_lr_ratio: float = key(0.0, "Floor of the cosine schedule as a share of lr.", minimum=0)
    num_cycles: float = key(0.5, "Cosine cycles over the schedule.", minimum=0)
    zero_indexed_step: bool = key(True, "The first training step has schedule index 0 (false: 1).")
    override_optimizer_config: dict[str, Any] | None = key(None, "Extra keyword arguments for the optimiser.")
