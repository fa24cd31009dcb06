"""A worker's end of a weight transport, which the driver moves along: open, connect, then send or receive, close."""

import asyncio
import importlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry, NamedTensors, Piece, PieceTransport
from verl.checkpoint_engine.buckets import NamedTensor, buckets
from verl.models.fingerprint import fingerprint

Manifest = dict[str, str]  # fingerprints of tensors by name


@dataclass(frozen=True)
class TransportSettings:
    """Which transport, and what it is built with."""

    backend: str
    bucket_bytes: int
    arguments: dict[str, Any]
    module: str | None = None  # imported first: it registers the transport

    def transport(self) -> type[CheckpointEngine]:
        """The class of the backend."""
        if self.module is not None:
            importlib.import_module(self.module)
        return CheckpointEngineRegistry.get(self.backend)


class End:
    """One worker's end. After an error it is closed: the other ends notice, and the driver opens all of them anew."""

    transport: CheckpointEngine | None = None

    def open(self, settings: TransportSettings) -> dict[str, Any]:
        """Build the transport; what the other ends must know about it."""
        self.close()
        build: Callable[..., CheckpointEngine] = settings.transport()
        self.transport = build(bucket_size=settings.bucket_bytes, **settings.arguments)
        return self.transport.prepare() or {}

    def connect(self, arguments: dict[str, Any]) -> None:
        """Meet the other ends, which do the same at this time."""
        assert self.transport is not None, "open() comes first"
        try:
            self.transport.init_process_group(**arguments)
        except BaseException:
            self.close()
            raise

    def send(self, weights: Iterable[NamedTensor], version: int, dtype: str | None) -> tuple[Manifest, int]:
        """Send all weights, floating-point ones as `dtype`; the fingerprints of what was sent, and its bytes."""
        transport, kind = self.transport, None if dtype is None else getattr(torch, dtype)
        assert transport is not None, "open() comes first"
        if isinstance(transport, PieceTransport) and transport.rank != 0:
            for _ in weights:  # producing them is a collective
                pass
            return {}, 0
        manifest: Manifest = {}
        sizes: list[int] = []

        def note(piece: Piece) -> None:
            manifest.update((name, fingerprint(tensor)) for name, tensor in piece)
            sizes.append(sum(tensor.nbytes for _, tensor in piece))

        try:
            if isinstance(transport, PieceTransport):
                for piece in transport.send_pieces(buckets(weights, transport.piece_bytes()), kind, version):
                    note(piece)
            else:
                blocking(transport.send_weights(noted(weights, kind, note), version))
        except BaseException as error:
            if isinstance(transport, PieceTransport):
                transport.fail(f"{type(error).__name__}: {error}")
            self.close()
            raise
        return manifest, sum(sizes)

    def receive(self, version: int) -> Generator[Piece, None, None]:
        """What arrives, some tensors at a time; close the iterator where they cannot be used."""
        assert self.transport is not None, "open() comes first"
        try:
            if isinstance(self.transport, PieceTransport):
                yield from self.transport.receive_pieces(version)
            else:
                yield from ([named] for named in items(self.transport.receive_weights(version)))
        except BaseException:
            self.close()
            raise

    def close(self, _: Any = None) -> None:
        """End the connections; the other ends fail where they still wait for this one."""
        transport, self.transport = self.transport, None
        if transport is not None:
            transport.finalize()


def noted(weights: Iterable[NamedTensor], dtype: torch.dtype | None, note: Any) -> NamedTensors:
    """The weights as they are sent, each told to `note` first."""
    for [named] in buckets(weights, 0, dtype):
        note([named])
        yield named


def blocking(call: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns; an event loop may be running in this thread already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, call).result()


def items(generator: AsyncGenerator[NamedTensor, None]) -> Iterator[NamedTensor]:
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
