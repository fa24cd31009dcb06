"""Where a model is on this machine: a folder, or a Hub id that the local Hugging Face cache holds. No network."""

from pathlib import Path

from verl.config.check import NO_MODEL
from verl.config.special_files import refuse_special
from verl.data.file_places import HUB_ID, cached_snapshot
from verl.utils.errors import ConfigError
from verl.utils.paths import expand_home


def find_folder(path: str | Path, key: str) -> Path | None:
    """The folder that `path` names, itself or in the local Hugging Face cache; None where it is in neither place."""
    folder = expand_home(path, f"model.{key}")
    return refuse_special(folder, f"model.{key}") if folder.is_dir() else cached_snapshot(str(path), "model")


def reward_model_folder(path: str | Path) -> Path:
    """The folder of `reward.reward_model.model_path`; ConfigError where there is none."""
    if (folder := find_folder(path, "path")) is None:
        raise ConfigError(
            f"reward.reward_model.model_path={path} is neither a folder nor in the local Hugging Face cache; give the "
            "folder of a reward model, such as `verl reward-model` saves"
        )
    return folder


def existing_folder(path: str | Path | None, key: str) -> Path:
    """`find_folder`, or ConfigError that says how to get the model."""
    if path is None:
        raise ConfigError(NO_MODEL)
    folder = find_folder(path, key)
    if folder is not None:
        return folder
    if Path(path).expanduser().exists():
        raise ConfigError(f"model.{key}={path} is a file; give the folder that it is in")
    if HUB_ID.fullmatch(str(path)):
        raise ConfigError(
            f"model.{key}={path} is not a folder, and the local Hugging Face cache does not hold it; models are read "
            f"from disk only: run `hf download {path}` first, or `hf download {path} --local-dir DIR` and give DIR "
            "(a gated model asks for more: accept its terms on its page, then run `hf auth login`)"
        )
    raise ConfigError(
        f"model.{key}={path} is not a folder; models are read from disk only: give the folder of a model, or the id "
        "of one that `hf download ORG/NAME` has stored"
    )


def model_in_checkpoint(folder: Path) -> Path | None:
    """The Hugging Face folder inside a checkpoint, or inside the newest one of a run's folder; None for neither."""
    steps = [step for step in folder.glob("global_step_*") if step.name.removeprefix("global_step_").isdigit()]
    newest = sorted(steps, key=lambda step: int(step.name.removeprefix("global_step_")), reverse=True)
    for place in (folder, *newest):
        for inner in ("huggingface", "actor/huggingface"):
            if (place / inner / "config.json").is_file():
                return place / inner
    return None
