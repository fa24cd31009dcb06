"""Checks before a run starts: all reasons against it at once, and the checks that every kind of run shares."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from verl.config import HFModelConfig
from verl.config.checkpoint import CheckpointConfig
from verl.config.engine import EngineConfig
from verl.config.trainer import SFTTrainerConfig, TrainerConfig
from verl.data.file_places import data_paths
from verl.models.folder_checks import check_model_for_run, check_readable_weights
from verl.models.load import build_config, dtype_of, load_tokenizer, model_folder
from verl.models.parameter_counts import stored_parameters
from verl.observe.tracker_checks import check_trackers
from verl.placement.memory import gigabytes
from verl.plugin.findings import Finding, Status
from verl.plugin.platform import PlatformBase, choose_platform
from verl.trainer.early_checks import WHAT
from verl.utils.errors import ConfigError, Mistakes, VerlError

T = TypeVar("T")
logger = logging.getLogger(__name__)

ON_THIS_MACHINE = "on this machine"


@dataclass
class Findings:
    """Findings about a run, good and bad, in the order of the checks."""

    rows: list[Finding] = field(default_factory=list)
    mistakes: Mistakes = field(default_factory=Mistakes)

    @property
    def errors(self) -> list[VerlError]:
        return self.mistakes.errors

    def run(self, name: str, check: Callable[[], T], say: Callable[[T], str] = str) -> T | None:
        """The result of `check`, which `say` puts into words; None where it raised, which is kept as a refusal."""
        try:
            result = check()
        except VerlError as error:
            self.refusal(name, error)
            return None
        self.rows.append(Finding(name, Status.GOOD, say(result)))
        return result

    def refusal(self, name: str, error: VerlError) -> None:
        """Keep a reason against the run, once; what is not on this machine, under the check that finds it too."""
        row = Finding(name, Status.BAD, str(error))
        if str(error) not in map(str, self.errors):
            self.mistakes.add(error)
            self.rows.append(row)
        elif (absent := Finding(ON_THIS_MACHINE, Status.BAD, str(error))) in self.rows:
            self.rows[self.rows.index(absent)] = row

    def check(self, name: str, check: Callable[[], object], text: str = "") -> bool:
        """Whether `check` did not raise; `text` is what is then shown."""
        return self.run(name, lambda: (check(), True), lambda _: text) is not None

    def missing(self, mistakes: Mistakes) -> None:
        """Keep what is not on this machine."""
        for error in mistakes.errors:
            self.refusal(ON_THIS_MACHINE, error)

    def attempt(self, look: Callable[[], int]) -> int:
        """The number that `look` finds; 0 where it cannot look, which another check says."""
        try:
            return look()
        except VerlError:
            return 0

    def warn(self, name: str, text: str) -> None:
        """A doubt that does not keep the run from starting."""
        self.rows.append(Finding(name, Status.WARN, text))

    def refuse(self, say: Callable[[str], None] = logger.warning) -> None:
        """Say the doubts. Raise the refusal, or all of them in one ConfigError."""
        for row in self.rows:
            if row.status is Status.WARN:
                say(row.detail)
        self.mistakes.raise_if_any(WHAT)


def find_device(device: str, found: Findings) -> PlatformBase | None:
    """The platform of `trainer.device`, where this machine has it."""
    return found.run("trainer.device", lambda: choose_platform(device), lambda p: f"{device}: {p.device_name}")


def check_logging(settings: TrainerConfig | SFTTrainerConfig, found: Findings) -> None:
    """The trackers of `trainer.logger`."""
    names, errors = settings.logger, settings.tracker_errors
    found.check("trainer.logger", lambda: check_trackers(names, errors), ", ".join(names))


def find_files(key: str, files: str | list[str], found: Findings) -> bool:
    """Whether the data files of `key` are there."""
    return found.check(key, lambda: data_paths(files), files if isinstance(files, str) else ", ".join(files))


def check_weights_are_there(model: HFModelConfig) -> Path:
    """The folder of the model; ConfigError where it lacks its configuration or its weights."""
    folder = model_folder(model.path)
    if not model.override_config.get("init_random"):
        check_readable_weights(folder)
    return folder


def find_tokenizer(key: str, model: HFModelConfig, longest: int, length_keys: str, found: Findings) -> Any:
    """The tokenizer of the model at `key`; also what does not go together in model, tokenizer and lengths."""
    folder = found.run(key, lambda: check_weights_are_there(model))
    if folder is None and model.tokenizer_path is None:
        return None
    tokenizer = found.run("tokenizer", lambda: load_tokenizer(model), lambda t: f"{len(t)} tokens")
    if folder is not None and tokenizer is not None:
        config = found.run("model", lambda: build_config(model)[0], lambda c: str(c.model_type))
        if config is not None:
            fits = found.run(
                "lengths",
                lambda: check_model_for_run(config, folder, tokenizer, longest, length_keys),
                lambda _: f"{longest} tokens ({length_keys})",
            )
            for line in fits or ():
                found.warn("lengths", line)
    return tokenizer


@dataclass(frozen=True)
class TrainedModel:
    """One model that a run saves."""

    model: HFModelConfig
    engine: EngineConfig
    checkpoint: CheckpointConfig

    def checkpoint_bytes(self) -> int:
        """About the size of one checkpoint; 0 where the weights are not counted (random ones, adapters)."""
        if self.model.override_config.get("init_random") or self.model.lora_rank or self.model.lora_adapter_path:
            return 0
        contents = self.checkpoint.save_contents
        copies = ("model" in contents) + 2 * ("optimizer" in contents) + ("hf_model" in contents)
        size = dtype_of(self.engine.parameter_dtype.removeprefix("torch."), "model_dtype").itemsize
        return copies * size * stored_parameters(model_folder(self.model.path)).all


def warn_of_narrow_parameters(trained: list[TrainedModel], found: Findings) -> None:
    """A doubt where parameters are trained in fewer bits than small updates need; adapters are in float32."""
    for one in trained:
        name = one.engine.parameter_dtype
        adapts = one.model.lora_rank or one.model.lora_adapter_path
        if not adapts and dtype_of(name.removeprefix("torch."), "model_dtype").itemsize < 4:
            found.warn(
                "model_dtype",
                f"model_dtype={name} trains parameters in {name}: an update below about 1/256 of a parameter, as most "
                "are at lr 1e-6, is rounded away (the metric updates_lost says how many); model_dtype=fp32 with "
                "dtype=bf16 computes in bfloat16 and keeps every update; `verl plan` counts the memory",
            )


def check_disk_room(folder: str, trained: list[TrainedModel], keep: int | None, found: Findings) -> None:
    """Whether a checkpoint of the `trained` fits on the disk of `folder`; a doubt where `keep` of them may not."""
    place = Path(folder).expanduser().absolute()
    place = next(parent for parent in (place, *place.parents) if parent.is_dir())
    free, needed = (
        shutil.disk_usage(place).free,
        found.attempt(lambda: sum(map(TrainedModel.checkpoint_bytes, trained))),
    )
    if not needed:
        return
    text = f"a checkpoint needs about {gigabytes(needed)}, {gigabytes(free)} are free at {place}"
    move = "make room, name another trainer.default_local_dir, or save less (checkpoint.save_contents)"

    def fits() -> str:
        if needed > free:
            raise ConfigError(f"{text}; {move}")
        return text

    if found.run("disk", fits) and keep and needed * (keep + 1) > free:
        found.warn("disk", f"{text}, but {keep} are kept while the next is written; {move}")
