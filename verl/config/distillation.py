"""On-policy distillation: teachers, and the loss that brings the policy closer to them."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import Section, key, section
from verl.utils.errors import ConfigError
from verl.utils.suggest import did_you_mean

TEACHER_KEYS = ("model_path", "key", "temperature")
SERVER_KEYS = ("num_replicas", "inference", "_target_")  # of teachers in servers of their own


@dataclass(frozen=True, kw_only=True)
class DistillationLossConfig(Section):
    """The divergence from the teacher, and how it is trained."""

    loss_mode: str = key(
        "k3",
        "forward_kl_topk (KL(teacher, policy) over the teacher's topk tokens); or an estimate of KL(policy, teacher) "
        "on sampled tokens: kl|k1, abs, mse|k2, low_var_kl|k3; or your own.",
    )
    topk: int = key(32, "forward_kl_topk: the teacher's most likely tokens at every position.", minimum=1)
    topk_tail: bool = key(
        True,
        "forward_kl_topk: the rest of the vocabulary counts as one more outcome, so that a policy equal to the teacher "
        "has gradient 0; False sums over the topk tokens alone.",
    )
    use_task_rewards: bool = key(True, "Train the policy loss of the task's rewards too.")
    distillation_loss_coef: float = key(1.0, "Weight of the distillation loss.", minimum=0, maximum=1e6)
    loss_max_clamp: float | None = key(
        None, "Largest absolute loss of a token, beyond which it has no gradient.", greater_than=0
    )
    log_prob_min_clamp: float | None = key(
        None, "Smallest log-prob (nats) of policy and teacher in the loss.", maximum=0
    )
    use_policy_gradient: bool = key(
        False, "Minus the loss of a token is its advantage, in a policy loss; otherwise the loss itself is trained."
    )
    policy_loss_mode: str = key("vanilla", "use_policy_gradient: the policy loss.")
    clip_ratio: float = key(0.2, "use_policy_gradient: clip range below and above 1.", minimum=0)
    clip_ratio_low: float = key(None, "use_policy_gradient: clip range below 1.", sibling="clip_ratio", minimum=0)
    clip_ratio_high: float = key(None, "use_policy_gradient: clip range above 1.", sibling="clip_ratio", minimum=0)
    extra: dict[str, Any] = key({}, "Any keys of your own, for a distillation loss that you registered.")


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Section):
    """On-policy distillation: teachers score what the policy samples. They run on its devices, as a reference does."""

    enabled: bool = key(False, "Train with a distillation loss.")
    distillation_loss: DistillationLossConfig = section(DistillationLossConfig)
    teacher_key: str = key("data_source", "Column of a row whose value is the `key` of its teacher.")
    teacher_models: dict[str, Any] = key(
        {},
        "Teachers by a name of yours: NAME.model_path, a folder; NAME.key, the value of teacher_key in its rows "
        "(needed with several teachers); NAME.temperature, by default that of the rollout.",
    )


@dataclass(frozen=True)
class Teacher:
    """A teacher: its model, the rows that are its own (None: all), and the temperature of its distribution."""

    name: str
    path: str
    key: str | None
    temperature: float | None


def role_name(teacher: str) -> str:
    """The role of this teacher, which is also the attribute of the rank's workers that does it."""
    return f"teacher_{teacher}"


def teachers(config: DistillationConfig) -> tuple[Teacher, ...]:
    """The teachers that have a model, by name; ConfigError for what cannot be used. None where it is not enabled."""
    if not config.enabled:
        return ()
    where = "distillation.teacher_models"
    found = [_teacher(f"{where}.{name}", name, given) for name, given in sorted(config.teacher_models.items())]
    out = tuple(teacher for teacher in found if teacher is not None)
    if not out:
        raise ConfigError(f"distillation.enabled=True needs a teacher; set {where}.teacher_model.model_path=DIR")
    keys = [teacher.key for teacher in out]
    if len(out) > 1 and None in keys:
        raise ConfigError(
            f"{where} has {len(out)} teachers, but {where}.{out[keys.index(None)].name}.key is not set; give the value "
            f"of the column {config.teacher_key!r} in the rows of each (distillation.teacher_key)"
        )
    twice = sorted({str(key) for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"{where}: key={twice[0]} belongs to several teachers; each needs one of its own")
    return out


def _teacher(where: str, name: str, given: Any) -> Teacher | None:
    if not isinstance(given, dict):
        raise ConfigError(f"{where}={given!r} must be a teacher: {where}.model_path=DIR")
    for unknown in given.keys() - {*TEACHER_KEYS, *SERVER_KEYS}:
        raise ConfigError(f"{where}.{unknown} is no key of a teacher; {did_you_mean(unknown, TEACHER_KEYS)}")
    path, key_, temperature = (given.get(part) for part in TEACHER_KEYS)
    if temperature is not None and not (isinstance(temperature, int | float) and temperature > 0):
        raise ConfigError(f"{where}.temperature={temperature!r} must be a number above 0")
    if path is None:
        return None
    return Teacher(name, str(path), None if key_ is None else str(key_), temperature)


def requested_server_keys(config: DistillationConfig) -> list[str]:
    """The keys of teachers in servers of their own that ask for something."""
    return [
        f"distillation.teacher_models.{name}.{part}"
        for name, given in sorted(config.teacher_models.items())
        for part in SERVER_KEYS[:2]
        if isinstance(given, dict) and given.get(part)
    ]
