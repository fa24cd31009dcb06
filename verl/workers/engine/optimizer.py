"""Optimiser, learning-rate schedule and gradient norm."""

import importlib
import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from verl.config import FSDPOptimizerConfig
from verl.models.expert_parallel import parameter_meshes
from verl.utils.errors import ConfigError
from verl.utils.suggest import did_you_mean

_SAMPLES = 256  # about, of each parameter


def build_optimizer(parameters: Iterable[nn.Parameter], config: FSDPOptimizerConfig) -> torch.optim.Optimizer:
    """`optim.optimizer` of module `optim.optimizer_impl`; fused if class and device support it."""
    try:
        module = importlib.import_module(config.optimizer_impl)
    except ImportError as error:
        raise ConfigError(
            f"optim.optimizer_impl={config.optimizer_impl!r} cannot be imported ({error}); install it "
            "or use torch.optim"
        ) from error
    factory = getattr(module, config.optimizer, None)
    if factory is None:
        names = [n for n, c in vars(module).items() if isinstance(c, type)]
        raise ConfigError(
            f"optim.optimizer={config.optimizer!r} is not in {config.optimizer_impl}; "
            f"{did_you_mean(config.optimizer, names)}"
        )
    accepted = inspect.signature(factory).parameters
    defaults: dict[str, Any] = {
        "lr": config.lr,
        "betas": tuple(config.betas),
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    arguments = {name: value for name, value in defaults.items() if name in accepted}
    override = dict(config.override_optimizer_config or {})
    if {"foreach", "capturable", "differentiable"} & override.keys():
        arguments.pop("fused", None)
    unknown = [name for name in override if name not in accepted]
    if unknown:
        raise ConfigError(
            f"optim.override_optimizer_config.{unknown[0]} is no argument of {config.optimizer}; "
            f"{did_you_mean(unknown[0], [n for n in accepted if n != 'params'])}"
        )
    by_mesh = [{"params": some} for some in parameter_meshes(list(parameters))]  # which a kernel takes one of
    return factory(by_mesh, **{**arguments, **override})


def warmup_steps(config: FSDPOptimizerConfig) -> int:
    """Steps of linear warm-up: lr_warmup_steps when positive, else the ratio of all steps."""
    if config.lr_warmup_steps > 0:
        return config.lr_warmup_steps
    if config.lr_warmup_steps_ratio > 0:
        return int(config.lr_warmup_steps_ratio * _total_steps(config, "lr_warmup_steps_ratio"))
    return 0


def learning_rate_factor(step: int, config: FSDPOptimizerConfig) -> float:
    """Learning rate at schedule index `step` divided by `optim.lr`: linear warm-up from 0, then flat or cosine."""
    warmup = warmup_steps(config)
    floor = config.min_lr_ratio if config.lr_scheduler_type == "cosine" else 1.0
    if step < warmup:
        return step / warmup
    if config.lr_scheduler_type == "constant":
        return 1.0
    total = _total_steps(config, "lr_scheduler_type=cosine")
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    cosine = 0.5 * (1.0 + math.cos(2.0 * math.pi * config.num_cycles * progress))
    return floor + (1.0 - floor) * cosine


def _total_steps(config: FSDPOptimizerConfig, needed_by: str) -> int:
    if config.total_training_steps <= 0:
        raise ConfigError(
            f"optim.{needed_by} needs the length of the schedule; set optim.total_training_steps "
            f"(now {config.total_training_steps}) to the number of training steps"
        )
    return config.total_training_steps


class LearningRateSchedule:
    """Sets the optimiser's learning rate from the number of training steps done. Its state is that number."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: FSDPOptimizerConfig):
        if config.lr_scheduler_type not in ("constant", "cosine"):
            raise ConfigError(f"optim.lr_scheduler_type={config.lr_scheduler_type!r}; use constant or cosine")
        self.optimizer, self.config, self.steps_done = optimizer, config, 0
        self._apply()

    @property
    def lr(self) -> float:
        """The learning rate of the next optimiser step."""
        index = self.steps_done + (0 if self.config.zero_indexed_step else 1)
        return self.config.lr * learning_rate_factor(index, self.config)

    def step(self) -> float:
        """Count one training step; return the new learning rate."""
        self.steps_done += 1
        return self._apply()

    def state_dict(self) -> dict[str, int]:
        return {"steps_done": self.steps_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps_done = int(state["steps_done"])
        self._apply()

    def _apply(self) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr
        return self.lr


def gradient_norm(gradients: list[Tensor]) -> float:
    """2-norm over all `gradients`; 0 if there are none."""
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


def clip_gradients(gradients: list[Tensor], norm: float, max_norm: float | None) -> None:
    """Scale gradients with 2-norm `norm` down to `max_norm`; None or 0 never clips."""
    if gradients and max_norm and norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / (norm + 1e-6))


def sample_updates(parameters: Iterable[Tensor], gradients: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Samples numbers of each parameter narrower than float32: as a view, and as they are now.

    Now is before a step; NaN stands where the gradient is 0. All others change, unless rounding swallows the update.
    """
    out = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.itemsize < torch.float32.itemsize and parameter.is_contiguous():
            stride = max(1, parameter.numel() // _SAMPLES)
            values = parameter.view(-1)[::stride]
            out.append((values, torch.where(gradient.reshape(-1)[::stride] != 0, values, torch.nan)))
    return out


def count_lost_updates(samples: list[tuple[Tensor, Tensor]]) -> tuple[int, int]:
    """How many of the sampled updates changed nothing, and how many there were."""
    counts = [torch.stack([(values == before).sum(), (~before.isnan()).sum()]) for values, before in samples]
    lost, total = torch.stack(counts).sum(0).tolist()
    return lost, total


def first_non_finite_gradient(named_gradients: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first gradient that holds a NaN or an infinity."""
    for name, gradient in named_gradients:
        if not bool(gradient.isfinite().all()):
            return name
    return None
