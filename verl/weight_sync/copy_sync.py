"""Copy sync: sends weights to engines with their own copy, compares fingerprints, and probes log-probs regularly."""

import time
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from verl.checkpoint_engine.buckets import buckets
from verl.checkpoint_engine.endpoint import Manifest
from verl.models.fingerprint import fingerprint
from verl.utils.errors import VerlError
from verl.weight_sync.base import Receipt
from verl.weight_sync.logprob_probe import LogprobProbe, ProbeResult
from verl.weight_sync.weight_transfer import WeightTransfer
from verl.workers.rollout.base import CopyingEngine, StaleWeightsError


class CopySync:
    """Sends all of `weights()` to every replica and verifies that they arrived and are used.

    `weights` yields (HF name, full tensor) pairs for an engine of this process; with `weight_transfer`, the trainer or
    the engine is in another process. `adapters(with_base)` takes their place: every replica gets the base weights once,
    then adapters alone. `probe_every`: publishes between two probes (0: only the first of this process, which is also
    the first after every restart). A replica that took the place of another is probed when it joins.
    """

    def __init__(
        self,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        engine: CopyingEngine,
        probe: LogprobProbe | None = None,
        probe_every: int = 10,
        weight_transfer: WeightTransfer | None = None,
        adapters: Callable[[bool], Iterable[tuple[str, Tensor]]] | None = None,
    ):
        self.weights, self.engine, self.probe, self.probe_every = weights, engine, probe, probe_every
        self.weight_transfer, self.adapters = weight_transfer, adapters
        self._with_base: Sequence[CopyingEngine] = ()  # that have the weights to which adapters belong
        self._published = 0
        self._probed: Sequence[CopyingEngine] = ()

    async def publish(self, version: int) -> Receipt:
        """Make every replica sample the trainer's weights as `version`; StaleWeightsError names one that does not.

        Replacements of lost replicas join, and are probed. If a replica is lost meanwhile, the others get all again.
        """
        start = time.perf_counter()
        await self.engine.renew()
        while True:
            replicas = self.engine.replicas
            try:
                return await self._publish(version, start)
            except VerlError:
                await self.engine.renew()
                if all(replica in self.engine.replicas for replica in replicas):
                    raise

    async def _publish(self, version: int, start: float) -> Receipt:
        await self.engine.wake()
        transfer = self._transfer_in_process if self.weight_transfer is None else self.weight_transfer.transfer
        numbers, replicas = self.engine.replica_numbers, self.engine.replicas
        with_base = None if self.adapters is None else any(replica not in self._with_base for replica in replicas)
        if with_base:
            self._with_base = ()  # also of those that had them, until all have them again
        manifest, num_bytes, arrived = await transfer(version, with_base)
        for number, received in zip(numbers, arrived, strict=True):
            check_manifests(manifest, received, number, version)
        await self.engine.finish_update(version)
        for number, replica in zip(self.engine.replica_numbers, self.engine.replicas, strict=True):
            if replica.version != version:
                raise StaleWeightsError(
                    f"replica {number} says that it samples from version {replica.version} after {version} was sent"
                )
        self._with_base = replicas
        results = await self._probe(version)
        read_back = [replica.read_back for replica in self.engine.replicas]
        return Receipt(
            version,
            num_replicas=len(arrived),
            seconds=time.perf_counter() - start,
            bytes_moved=num_bytes * len(arrived),
            num_tensors=len(manifest),
            probes=results,
            num_read_back=min(held.num_tensors for held in read_back),
            unread=read_back[0].unread,
            pause_s=max((held.pause_s for held in read_back if held.pause_s is not None), default=None),
        )

    async def _transfer_in_process(self, version: int, with_base: bool | None) -> tuple[Manifest, int, list[Manifest]]:
        """Fingerprints and bytes of the sent tensors, and the fingerprints that each replica received."""
        await self.engine.begin_update()
        manifest: Manifest = {}
        arrived: list[Manifest] = [{} for _ in self.engine.replicas]
        num_bytes = 0
        weights = self.weights() if self.adapters is None else self.adapters(bool(with_base))
        for bucket in buckets(weights, self.engine.bucket_bytes, self.engine.dtype):
            manifest |= {name: fingerprint(tensor) for name, tensor in bucket}
            num_bytes += sum(tensor.nbytes for _, tensor in bucket)
            for replica_manifest, bucket_manifest in zip(arrived, await self.engine.load_bucket(bucket), strict=True):
                replica_manifest |= bucket_manifest
        return manifest, num_bytes, arrived

    async def _probe(self, version: int) -> tuple[ProbeResult, ...]:
        number, self._published = self._published, self._published + 1
        due = number == 0 or (self.probe_every > 0 and number % self.probe_every == 0)
        replicas = self.engine.replicas
        due = due or any(replica not in self._probed for replica in replicas)
        if self.probe is None or not due:
            return ()
        results = tuple(await self.probe.check(replicas, version, self.engine.replica_numbers))
        self._probed = replicas
        return results


def check_manifests(manifest: dict[str, str], received: dict[str, str], replica: int, version: int) -> None:
    """Compare the sent manifest with the one a replica reports; the error names the first tensor that differs."""
    for name, sent in manifest.items():
        if name not in received:
            raise StaleWeightsError(f"replica {replica} did not receive {name} of version {version}")
        if received[name] != sent:
            raise StaleWeightsError(
                f"replica {replica} received another {name} than version {version} has: sent {sent}, arrived "
                f"{received[name]}"
            )
    for name in received.keys() - manifest.keys():
        raise StaleWeightsError(f"replica {replica} received {name}, which version {version} does not have")
