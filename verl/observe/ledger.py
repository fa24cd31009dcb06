"""The ledger: every trajectory of every step on disk, one small parquet file per step."""

import contextlib
import json
import logging
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.config.special_files import refuse_special
from verl.data.batch import Batch
from verl.utils.errors import ConfigError, DataError
from verl.utils.paths import fsync_dir, fsync_file, make_writable_folder

logger = logging.getLogger(__name__)

# dtype on disk of the token columns that are recorded when the batch has them
TOKEN_COLUMNS = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "rollout_logprobs": np.float32,
    "old_logprobs": np.float32,
    "ref_logprobs": np.float32,
    "values": np.float32,
    "advantages": np.float32,
}
SEQUENCE_COLUMNS = {"reward": "rewards", "group": "group_ids", "conversation": "conversations", "row": "rows"}
DICTIONARY_COLUMNS = ("tokens", "advantages", "stop_reason")
FORMAT_VERSION = 1
Texts = Sequence[str]


@dataclass(frozen=True)
class LedgerStep:
    """One recorded step: its batch, and the stop reason of each sequence."""

    step: int
    batch: Batch
    stop_reasons: list[str]


class Ledger:
    """Writes `folder/step_000012.parquet`: one row per trajectory, token columns as lists.

    Each file is written atomically. `append` does not wait for the disk; `sync` does (call it before a checkpoint).
    With `keep_steps` only the files of the last so many steps stay.
    """

    def __init__(self, folder: Path | str, keep_steps: int | None = None):
        self.keep_steps = keep_steps
        self.folder = make_writable_folder(folder, "the ledger's folder")
        self._unsynced: list[Path] = []

    def append(self, step: int, batch: Batch, stop_reasons: Texts | None = None, errors: Sequence[Texts] = ()) -> Path:
        """Record `batch` as step `step`, in place of an older file, and drop all but `keep_steps`; returns its path."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = trajectory_columns(step, batch, stop_reasons)
        columns |= {"tool_errors": pa.array(errors, pa.list_(pa.string()))} if errors else {}
        offsets = pa.array(batch.cu_seqlens.cpu().numpy().astype(np.int32))
        for name, dtype in TOKEN_COLUMNS.items():
            if name in batch:
                values = batch[name].detach().cpu().to(torch_dtype(dtype)).numpy()
                columns[name] = pa.ListArray.from_arrays(offsets, pa.array(values))
        table = pa.table(columns)
        header = json.dumps({"version": FORMAT_VERSION, "step": step})
        table = table.replace_schema_metadata({"verl.ledger": header})
        path = ledger_path(self.folder, step)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        encoding = {"compression": "zstd", "compression_level": 1, "use_dictionary": dictionary_columns(table)}
        encoding["write_page_checksum"] = True
        with self._os_errors_as_data_errors(f"record step {step}"):
            try:
                pq.write_table(table, temporary, **encoding)
                os.replace(temporary, path)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
        self._unsynced.append(path)
        if self.keep_steps is not None:
            old = [s for s in ledger_steps(self.folder) if s <= step - self.keep_steps]
            self._delete(f"drop the records up to step {step - self.keep_steps}", old)
        return path

    def _delete(self, task: str, steps: Sequence[int]) -> None:
        """Delete the files of these steps in order: a kill leaves whole files, and the next call finds the others."""
        with self._os_errors_as_data_errors(task):
            for step in steps:
                ledger_path(self.folder, step).unlink()
        if steps:
            self._unsynced = [path for path in self._unsynced if path.exists()]

    def rewind(self, step: int) -> None:
        """Delete the records of later steps, for a run that resumes after `step`."""
        self._delete(f"drop the records after step {step}", [s for s in ledger_steps(self.folder) if s > step])
        kept = range(max(1, step + 1 - (self.keep_steps or step)), step + 1)
        if lost := [why for number in kept if (why := self._damage(number))]:
            logger.warning(
                "%s: the records of %d steps before this start are missing or damaged, first %s",
                self.folder, len(lost), lost[0],
            )  # fmt: skip

    def _damage(self, step: int) -> str:
        """Why a record cannot be read, by its ends; what is between them, its reader compares with checksums."""
        import pyarrow.parquet as pq

        try:
            pq.read_metadata(refuse_special(ledger_path(self.folder, step), "ledger"))
        except (OSError, ValueError, ConfigError) as error:  # Arrow's errors are both
            return f"step {step}: {' '.join(str(error).split())[:200]}"
        return ""

    def sync(self) -> None:
        """Return when all appended files are on the disk and would survive a power cut."""
        with self._os_errors_as_data_errors("write its records to the disk"):
            for path in self._unsynced:
                fsync_file(path)
            fsync_dir(self.folder)
        self._unsynced = []

    @contextlib.contextmanager
    def _os_errors_as_data_errors(self, task: str) -> Iterator[None]:
        """Turn the operating system's errors into DataError with advice."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"the ledger in {self.folder} could not {task}: {error}. Was the folder deleted or made read-only, or "
                "is the disk full? Repair that and run the same command under its name, which goes on from the last "
                "checkpoint; trainer.ledger=False trains without a ledger"
            ) from error


def size_line(bytes_per_step: int, total_steps: int, keep_steps: int | None) -> str:
    """The size of a run's ledger as a sentence, from that of one step."""
    kept = total_steps if keep_steps is None else min(keep_steps, total_steps)
    what = f"all {total_steps} steps" if kept == total_steps else f"the last {kept} of {total_steps} steps"
    limit = "trainer.ledger_keep_steps bounds it"
    return f"ledger: {bytes_per_step / 1e6:.3g} MB per step, {bytes_per_step * kept / 1e9:.3g} GB for {what} ({limit})"


def trajectory_columns(step: int, batch: Batch, stop_reasons: Sequence[str] | None) -> dict[str, Any]:
    """The per-trajectory columns of the file; DataError if one has the wrong length."""
    count = batch.num_sequences
    columns: dict[str, Any] = {"step": np.full(count, step, dtype=np.int32)}
    if "policy_versions" in batch:
        versions = batch["policy_versions"].cpu().numpy()
        columns["policy_version_min"], columns["policy_version_max"] = versions[:, 0], versions[:, 1]
    for name, source in SEQUENCE_COLUMNS.items():
        if source in batch:
            columns[name] = batch[source].detach().cpu().numpy()
    columns["stop_reason"] = list(stop_reasons) if stop_reasons is not None else [""] * count
    for name, values in columns.items():
        if len(values) != count:
            raise DataError(f"ledger of step {step}: {name!r} has {len(values)} values for {count} trajectories")
    return columns


def dictionary_columns(table: Any) -> list[str]:
    """Parquet paths of the columns to dictionary-encode: their values repeat, unlike those of log-probs."""
    present = [name for name in DICTIONARY_COLUMNS if name in table.column_names]
    return [f"{name}.list.element" if name in TOKEN_COLUMNS else name for name in present]


def read_ledger(folder: Path | str, step: int) -> LedgerStep:
    """The record of step `step`; DataError if there is none or its file is not a ledger file."""
    import pyarrow.parquet as pq

    path = ledger_path(Path(folder), step)
    if not path.exists():
        steps = ledger_steps(folder)
        span = f"steps {steps[0]}..{steps[-1]} are recorded" if steps else "nothing is recorded there"
        raise DataError(f"no ledger of step {step} in {folder}: {span}")
    try:
        table = pq.read_table(
            refuse_special(path, "ledger"), partitioning=None, page_checksum_verification=True
        ).combine_chunks()
    except (OSError, ValueError) as error:  # Arrow's errors are both
        raise DataError(f"{path} is damaged ({' '.join(str(error).split())[:200]}); its step is lost") from error
    header = json.loads((table.schema.metadata or {}).get(b"verl.ledger", b"{}"))
    if header.get("version") != FORMAT_VERSION:
        raise DataError(f"{path} is not a ledger file of version {FORMAT_VERSION} (found {header.get('version')})")
    tokens = {name: flatten_column(table[name]) for name in TOKEN_COLUMNS if name in table.column_names}
    tokens["tokens"] = tokens["tokens"].to(torch.int64)
    offsets = torch.tensor(table["tokens"].combine_chunks().offsets.to_numpy(), dtype=torch.int64)
    kept = {name: column for name, column in SEQUENCE_COLUMNS.items() if name in table.column_names}
    sequences = {column: torch.tensor(table[name].to_numpy()) for name, column in kept.items()}
    if "policy_version_min" in table.column_names:
        bounds = [torch.tensor(table[f"policy_version_{side}"].to_numpy()) for side in ("min", "max")]
        sequences["policy_versions"] = torch.stack(bounds, dim=1)
    batch = Batch(offsets - offsets[0], tokens, sequences)
    return LedgerStep(step, batch, table["stop_reason"].to_pylist())


def flatten_column(column: Any) -> Tensor:
    """The values of a list column, concatenated."""
    values = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return torch.from_numpy(np.array(values))


def torch_dtype(dtype: type) -> torch.dtype:
    return {np.int32: torch.int32, np.bool_: torch.bool, np.float32: torch.float32}[dtype]


def ledger_path(folder: Path | str, step: int) -> Path:
    return Path(folder) / f"step_{step:06d}.parquet"


def ledger_steps(folder: Path | str) -> list[int]:
    """The recorded steps, ascending."""
    names = (re.fullmatch(r"step_([0-9]{6,})\.parquet", path.name) for path in Path(folder).glob("step_*.parquet"))
    return sorted(int(name.group(1)) for name in names if name)
