"""A worker's endpoint of a weight transport, driven step by step: open, connect, send or receive, close."""

import asyncio
import importlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from verl.checkpoint_engine.base import (
    Bucket,
    BucketTransport,
    CheckpointEngine,
    CheckpointEngineRegistry,
    NamedTensors,
)
from verl.checkpoint_engine.buckets import NamedTensor, buckets
from verl.models.fingerprint import fingerprint

Manifest = dict[str, str]  # fingerprints of tensors by name


@dataclass(frozen=True)
class TransportSettings:
    """The backend of a transport, and its constructor's arguments."""

    backend: str
    bucket_bytes: int
    arguments: dict[str, Any]
    module: str | None = None  # imported first: it registers the transport

    def transport(self) -> type[CheckpointEngine]:
        """The class of the backend."""
        if self.module is not None:
            importlib.import_module(self.module)
        return CheckpointEngineRegistry.get(self.backend)


class TransportEndpoint:
    """One worker's endpoint. An error closes it; the other endpoints then fail, and the driver reopens all."""

    transport: CheckpointEngine | None = None

    def open(self, settings: TransportSettings) -> dict[str, Any]:
        """Build the transport; returns metadata for the other endpoints."""
        self.close()
        build: Callable[..., CheckpointEngine] = settings.transport()
        self.transport = build(bucket_size=settings.bucket_bytes, **settings.arguments)
        return self.transport.prepare() or {}

    def connect(self, arguments: dict[str, Any]) -> None:
        """Connect to the other endpoints, which connect at the same time."""
        assert self.transport is not None, "open() comes first"
        try:
            self.transport.init_process_group(**arguments)
        except BaseException:
            self.close()
            raise

    def send(self, weights: Iterable[NamedTensor], version: int, dtype: str | None) -> tuple[Manifest, int]:
        """Send all weights, floating-point ones as `dtype`; returns fingerprints and total bytes of what was sent.

        A rank that does not send only takes part in producing them, and returns ({}, 0).
        """
        transport, wire_dtype, weights = self.transport, None if dtype is None else getattr(torch, dtype), iter(weights)
        assert transport is not None, "open() comes first"
        if isinstance(transport, BucketTransport) and transport.rank != 0:
            for _ in weights:  # producing them is a collective
                pass
            return {}, 0
        manifest: Manifest = {}
        sizes: list[int] = []

        def record(bucket: Bucket) -> None:
            manifest.update((name, fingerprint(tensor)) for name, tensor in bucket)
            sizes.append(sum(tensor.nbytes for _, tensor in bucket))

        try:
            if isinstance(transport, BucketTransport):
                for bucket in transport.send_buckets(
                    buckets(weights, transport.max_bucket_bytes()), wire_dtype, version
                ):
                    record(bucket)
            else:
                run_blocking(transport.send_weights(record_each(weights, wire_dtype, record), version))
        except BaseException as error:
            if isinstance(transport, BucketTransport):
                transport.fail(f"{type(error).__name__}: {error}")
            self.close()
            if isinstance(error, Exception):
                for _ in weights:  # the trainer's other ranks are in the collectives that produce the rest, if any
                    pass
            raise
        return manifest, sum(sizes)

    def receive(self, version: int) -> Generator[Bucket, None, None]:
        """Received buckets of tensors; the caller closes the iterator if it cannot use them."""
        assert self.transport is not None, "open() comes first"
        try:
            if isinstance(self.transport, BucketTransport):
                yield from self.transport.receive_buckets(version)
            else:
                yield from ([named] for named in iterate_blocking(self.transport.receive_weights(version)))
        except BaseException:
            self.close()
            raise

    def close(self, _: Any = None) -> None:
        """Close the connections; endpoints that still wait for this one fail."""
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.finalize()


def record_each(weights: Iterable[NamedTensor], dtype: torch.dtype | None, record: Any) -> NamedTensors:
    """The weights as they are sent; passes each to `record` first."""
    for [named] in buckets(weights, 0, dtype):
        record([named])
        yield named


def run_blocking(call: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, also if an event loop already runs in this thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, call).result()


def iterate_blocking(generator: AsyncGenerator[NamedTensor, None]) -> Iterator[NamedTensor]:
    """The items of an async generator, for code that blocks."""
    loop = asyncio.new_event_loop()
    try:
        with ThreadPoolExecutor(1) as thread:

            async def step() -> NamedTensor | None:
                return await anext(generator, None)

            while (item := thread.submit(loop.run_until_complete, step()).result()) is not None:
                yield item
    finally:
        loop.close()
