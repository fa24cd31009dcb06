"""Where data files are: paths, patterns, folders of shards, data sets of the local Hugging Face cache. No network."""

import functools
import glob
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from verl.config.special_files import refuse_special
from verl.utils.errors import DataError
from verl.utils.paths import expand_home
from verl.utils.suggest import did_you_mean

logger = logging.getLogger(__name__)

KNOWN = ".parquet; .json, .jsonl, .csv and .tsv, also as .gz, .bz2, .xz or .zst"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NAME = re.compile(  # such as train-00000-of-00002.parquet, test.jsonl.gz
    r"(?P<split>.+?)(?:[-_.]\d+-of-(?P<count>\d+).*?)?"
    r"(?:(?P<parquet>\.parquet)|(?P<text>\.(?:jsonl?|csv|tsv))(?:\.(?:gz|bz2|xz|zst))?)",
    re.IGNORECASE,
)
_ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # what libraries write of rows
_IN_CACHE = re.compile(r"/datasets--([^/]+?)--([^/]+?)/snapshots/")


def suffix_of(path: Path) -> str | None:
    """Which table a file is by its name, packed or not, such as ".csv"; None for another file."""
    name = _NAME.fullmatch(path.name)
    return (name["parquet"] or name["text"]).lower() if name else None


def source_of(path: Path) -> str:
    """The data source of rows that name none: `org/name` of the cache, else the file's name, without suffix."""
    cached = _IN_CACHE.search(path.as_posix())
    return f"{cached[1]}/{cached[2]}" if cached else _split_of(path)


def data_paths(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files as a list of existing paths; DataError names the first that cannot be used."""
    given = [files] if isinstance(files, str | Path) else list(files)
    if not given:
        raise DataError(
            "no data files were given; set data.train_files and data.val_files to a path or a list of paths"
        )
    return [path for one in given for path in _paths_of(str(one))]


def _paths_of(given: str) -> list[Path]:
    if "://" in given:
        raise DataError(f"{given}: remote files are not supported; copy the file to a local disk and give that path")
    path = refuse_special(expand_home(given, "data file"), "data file")
    if path.is_file():
        return [path]
    if found := [file for file in map(Path, sorted(glob.glob(str(path), recursive=True))) if file.is_file()]:
        return [file for file in found if suffix_of(file)] or found
    name, split = (given, "") if path.is_dir() or ":" not in given else given.rsplit(":", 1)
    if folder := _folder(name):
        return _files_in(folder, name, split)
    raise DataError(_absence(path, name))


def _folder(name: str) -> Path | None:
    """A folder on disk, `org/name` of the local Hugging Face cache, or a folder inside it."""
    if (folder := expand_home(name, "data file")).is_dir():
        return folder
    snapshot = cached_snapshot("/".join(name.split("/")[:2]), "dataset")
    inner = snapshot.joinpath(*name.split("/")[2:]) if snapshot else None
    return inner if inner and inner.is_dir() else None


def cached_snapshot(hub_id: str, kind: str) -> Path | None:
    """The folder of a `model` or `dataset` in the local Hugging Face cache; None where it is not there."""
    if not HUB_ID.fullmatch(hub_id):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, repo_type=kind, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return None


def _absence(path: Path, name: str) -> str:
    if siblings := [p.name for p in path.parent.glob("*.*") if suffix_of(p)]:
        return f"{path} does not exist; {did_you_mean(path.name, siblings)}"
    hint = "holds no data file" if path.parent.is_dir() else "does not exist"
    download = f"; of a data set of the Hub, run `hf download {name} --repo-type dataset` first"
    return f"{path} does not exist; the folder {path.parent} {hint}{download if HUB_ID.fullmatch(name) else ''}"


def _files_in(folder: Path, given: str, split: str) -> list[Path]:
    """The files of one split in a folder, two levels of folders deep; of no name the only split, or `train`."""
    found = [file for depth in ("*", "*/*", "*/*/*") for file in sorted(folder.glob(depth)) if suffix_of(file)]
    found = [f for f in found if f.is_file() and f.name not in _ABOUT and "/." not in f"/{f.relative_to(folder)}"]
    found = [file for file in found if suffix_of(file) == ".parquet"] or found
    splits = sorted({_split_of(file) for file in found})
    chosen = split or (splits if len(splits) == 1 else ["train"])[0]
    files = [file for file in found if _split_of(file) == chosen]
    if not files:
        known = f"the splits {', '.join(splits)}; give one as {given}:SPLIT" if splits else f"no data file ({KNOWN})"
        raise DataError(f"{given} is a folder without a split {chosen!r}: it holds {known}")
    if not split and len(splits) > 1:
        _say_once(f"{given} has the splits {', '.join(splits)}: {chosen} is read ({given}:SPLIT for another)")
    if len(parents := {file.parent: f"{given}/{file.parent.relative_to(folder)}" for file in files}) > 1:
        raise DataError(f"{given} holds the split {chosen} several times; give one of {', '.join(parents.values())}")
    count = max(int((_NAME.fullmatch(file.name) or {"count": 0})["count"] or 0) for file in files)
    if count > len(files):
        raise DataError(f"{given} holds {len(files)} of {count} shards of the split {chosen}; download it again")
    return files


def _split_of(path: Path) -> str:
    """`train` of train.jsonl.gz, train-00000-of-00002.parquet and train/0000.parquet."""
    name = _NAME.fullmatch(path.name)
    stem = name["split"] if name else path.stem
    return path.parent.name if re.fullmatch(r"(part-)?\d+|part-\d+-.*", stem) else stem


@functools.cache  # a run looks several times
def _say_once(text: str) -> None:
    logger.warning("%s", text)
