"""`checkpoint_engine.backend=file`: safetensors files in a folder that trainer and rollout both see.

For engines on other machines with a shared file system. A publish writes a folder and renames it when it is complete.
Folder names are never reused, so that a file system cache cannot return older weights.
"""

import shutil
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from verl.checkpoint_engine.base import Bucket, BucketTransport
from verl.utils.errors import ConfigError, TransportError
from verl.utils.paths import expand_home


class FileTransport(BucketTransport):
    """Rank 0 writes all weights, then the others read them."""

    sends_first = True

    def __init__(self, bucket_size: int, timeout: float = 300.0, folder: str | None = None):
        super().__init__(bucket_size, timeout)
        if folder is None:
            raise ConfigError(
                "checkpoint_engine.backend=file needs the folder that trainer and rollout both see; set "
                "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.file.folder=DIR"
            )
        self.shared_folder, self.folder = expand_home(folder, "file.folder"), Path()
        self.num_publishes = 0  # every endpoint counts them

    def prepare(self) -> dict[str, Any]:
        return {"folder": str(self.shared_folder.absolute())}

    @classmethod
    def build_topology(cls, actor_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]) -> Any:
        folder = Path(metadata[0]["folder"]) / f"weights-{uuid.uuid4().hex}"
        return cls.topology_by_rank(actor_world_size, rollout_world_size, folder=str(folder))

    def init_process_group(self, rank: int, folder: str) -> None:
        self.rank, self.folder = rank, Path(folder)

    def send_buckets(self, buckets: Iterable[Bucket], dtype: torch.dtype | None, version: int) -> Iterator[Bucket]:
        version_folder = self._next_version_folder(version)
        partial_folder = version_folder.with_suffix(".partial")
        shutil.rmtree(self.folder, ignore_errors=True)  # every replica has read the previous publish
        partial_folder.mkdir(parents=True, mode=0o700)
        with ThreadPoolExecutor(1) as writer:
            for number, bucket in enumerate(buckets):
                sent_bucket = [(name, to_host(tensor, dtype)) for name, tensor in bucket]
                written = writer.submit(save_file, dict(sent_bucket), partial_folder / f"{number:05d}.safetensors")
                yield sent_bucket  # the caller computes fingerprints meanwhile
                written.result()
        partial_folder.rename(version_folder)

    def receive_buckets(self, version: int) -> Iterator[Bucket]:
        folder = self._next_version_folder(version)
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise TransportError(f"no weights in {folder}; trainer and rollout must see one folder under that path")
        for path in files:
            yield list(load_file(path).items())

    def _next_version_folder(self, version: int) -> Path:
        self.num_publishes += 1
        return self.folder / f"{self.num_publishes:06d}-version-{version}"

    def finalize(self) -> None:
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


def to_host(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor as written to the file: on the host, contiguous, floating ones as `dtype`."""
    written_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", written_dtype).contiguous()
