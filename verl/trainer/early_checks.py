"""What is looked at before heavy libraries are loaded; the preflight looks again, with all the rest."""

import os
from collections.abc import Sequence

from verl.config import RunConfig
from verl.models.model_place import existing_folder
from verl.trainer.engine_installed import check_engine_is_installed
from verl.utils.errors import Mistakes


def check_what_is_there(config: RunConfig) -> None:
    """VerlError that names all of rollout engine, model folder and data files that are not on this machine."""
    arr, mistakes = config.actor_rollout_ref, Mistakes()
    with mistakes:
        check_engine_is_installed(arr.rollout)
    with mistakes:
        existing_folder(arr.model.path, "path")
    for files in files_read(config).values() if not config.data.custom_cls.path else ():
        with mistakes:
            _check_files([files] if isinstance(files, str) else files)
    mistakes.refuse("things keep this run from starting")


def files_read(config: RunConfig) -> dict[str, str | list[str]]:
    """The data files that the run reads, by key."""
    data = config.data
    files = {"data.train_files": data.train_files}
    if validates(config) and data.val_files is not None:
        files["data.val_files"] = data.val_files
    return files


def validates(config: RunConfig) -> bool:
    """Whether the run ever validates."""
    settings = config.trainer
    return bool(config.data.val_files) and (settings.val_before_train or settings.val_only or settings.test_freq > 0)


def _check_files(files: Sequence[str]) -> None:
    if not files or not all(os.path.isfile(os.path.expanduser(file)) for file in files):
        from verl.data.data_files import data_paths  # for its errors: it loads pyarrow

        data_paths(files)
