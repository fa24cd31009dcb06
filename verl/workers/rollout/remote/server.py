"""A rollout engine in its own process: reads calls from a socket and sends each result when it is ready.

`server_process.LocalServer` starts it, in another Python environment if the configuration names one. Frames have the
format of `verl.runtime.wire`: received data cannot run code.
"""

import argparse
import asyncio
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

from verl.config.rollout import RolloutConfig
from verl.runtime.wire import deserialize, serialize
from verl.utils.errors import TransportError, VerlError
from verl.workers.rollout.base import CopyingEngine
from verl.workers.rollout.remote.handshake import SECRET_BYTES, accept_trainer
from verl.workers.rollout.remote.profiles import VLLMProfiling

HEADER_BYTES = 8  # bytes of a frame's length, little-endian
MAX_FRAME_BYTES = 1 << 30  # more is no frame of ours


def frame_bytes(header: bytes) -> int:
    """The length of the frame that follows its header; TransportError for more than `MAX_FRAME_BYTES`."""
    if (size := int.from_bytes(header, "little")) > MAX_FRAME_BYTES:
        raise TransportError(f"a frame of {size} bytes was announced, and none has more than {MAX_FRAME_BYTES}")
    return size


def encode_frame(message: Any) -> bytes:
    """The bytes of a message: its length, then its content."""
    data = serialize(message)
    return len(data).to_bytes(HEADER_BYTES, "little") + data


def build_vllm_engine(config: RolloutConfig, model_path: str, eos_token_ids: list[int], replica: int) -> CopyingEngine:
    """The vLLM engine of one replica."""
    from transformers import AutoTokenizer

    from verl.workers.rollout.vllm.data_parallel import DataParallelVLLMEngine
    from verl.workers.rollout.vllm.engine import VLLMEngine

    engine = VLLMEngine if config.data_parallel_size == 1 else DataParallelVLLMEngine
    tokenizer = None
    if any(Path(model_path).glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    return engine(config, model_path, tokenizer, eos_token_ids, replica)


def build_native_engine(
    config: RolloutConfig, model_path: str, eos_token_ids: list[int], replica: int
) -> CopyingEngine:
    """The native engine of one replica."""
    from transformers import AutoTokenizer

    from verl.workers.rollout.native.replica import NativeReplica

    tokenizer = None
    if any(Path(model_path).glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False)
    return NativeReplica(config, model_path, tokenizer, eos_token_ids, replica)


def build_sglang_engine(
    config: RolloutConfig, model_path: str, eos_token_ids: list[int], replica: int
) -> CopyingEngine:
    """The SGLang engine of one replica, which has started. This process ends with SGLang, and says how that ended."""
    from verl.workers.rollout.sglang import SGLangEngine

    engine = SGLangEngine(config, model_path, eos_token_ids, replica)
    server = engine.server
    assert server is not None, "it joins no server"

    def end_with_sglang() -> None:
        server.process.wait()
        print(f"the SGLang server: {server.how_it_ended()}", flush=True)
        server.close()
        os._exit(1)

    threading.Thread(target=end_with_sglang, name="SGLang", daemon=True).start()
    engine.wait_until_ready()
    return engine


class RolloutServer:
    """Executes calls of the engine interface, many at once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.engine: CopyingEngine | None = None
        self.calls: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Consumes frames; returns when the trainer closes the connection."""
        while True:
            try:
                size = frame_bytes(await self.reader.readexactly(HEADER_BYTES))
                call_id, method, arguments = deserialize(await self.reader.readexactly(size))
            except asyncio.IncompleteReadError:
                return
            calls = arguments["calls"] if method == "together" else [[call_id, method, arguments]]
            for each in calls:  # all of them begin before any goes on
                call = asyncio.create_task(self.answer(*each))
                self.calls.add(call)
                call.add_done_callback(self.calls.discard)

    async def answer(self, call_id: int, method: str, arguments: dict[str, Any]) -> None:
        def send_tokens(*message: Any) -> None:
            self.writer.write(encode_frame([call_id, None, message]))

        try:
            if method == "stream":
                arguments["on_tokens"] = send_tokens
            reply = [call_id, True, await self.dispatch(method, arguments)]
        except Exception as error:  # the trainer raises it in the caller
            error_class = type(error).__name__ if isinstance(error, VerlError) else ""
            reply = [call_id, False, [error_class, str(error) if error_class else f"{type(error).__name__}: {error}"]]
        self.writer.write(encode_frame(reply))
        await self.writer.drain()

    async def dispatch(self, method: str, arguments: dict[str, Any]) -> Any:
        if method == "start":
            name = arguments["config"].name
            build = {"native": build_native_engine, "sglang": build_sglang_engine}.get(name, build_vllm_engine)
            self.engine = build(**arguments)
            return None
        assert self.engine is not None, "the first call is start"
        match method:
            case "generate":
                return await self.engine.generate(**arguments)
            case "stream":
                return await self.engine.stream(**arguments)
            case "abort":
                return await self.engine.abort(arguments["request_id"])
            case "transport_step":
                return await self.engine.transport_step(arguments["step"], arguments["argument"])
            case "finish_update":
                await self.engine.finish_update(arguments["version"])
                return self.engine.read_back
            case "compute_logprobs":
                return await self.engine.compute_logprobs(arguments["sequences"])
            case "stats":
                return await self.engine.stats()
            case "in_flight":
                return await self.engine.in_flight()
            case "set_profiling":
                return (
                    await self.engine.set_profiling(arguments["on"]) if isinstance(self.engine, VLLMProfiling) else None
                )
            case "begin_update" | "park" | "resume" | "sleep" | "sleep_until_update" | "wake":
                return await getattr(self.engine, method)()
        raise VerlError(f"a rollout server has no method {method!r}; trainer and server must run one version of verl")


async def serve(descriptor: int, secret: bytes | None = None) -> None:
    """Serve calls from the inherited socket `descriptor`, which with `secret` listens for a trainer that knows it."""
    inherited = socket.socket(fileno=descriptor)
    if secret is None:
        reader, writer = await asyncio.open_connection(sock=inherited)
    else:
        reader, writer = await accept_trainer(inherited, secret)
    await RolloutServer(reader, writer).run()


def read_secret() -> bytes:
    """The secret, which comes first on the standard input. Once that ends, this process and all below it are killed:
    who has started them is gone."""
    launcher, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    stream = os.fdopen(launcher, "rb", buffering=0)
    secret = b""
    while len(secret) < SECRET_BYTES and (part := stream.read(SECRET_BYTES - len(secret))):
        secret += part
    if len(secret) < SECRET_BYTES:
        raise SystemExit("the secret of the connection did not come over the standard input")

    def watch() -> None:
        while stream.read(1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
    return secret


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    socket_of = parser.add_mutually_exclusive_group(required=True)
    socket_of.add_argument("--descriptor", type=int, help="inherited socket to the trainer")
    socket_of.add_argument("--listener", type=int, help="inherited socket that listens for the trainer")
    arguments = parser.parse_args()
    if arguments.listener is not None:
        asyncio.run(serve(arguments.listener, read_secret()))
    else:
        asyncio.run(serve(arguments.descriptor))


if __name__ == "__main__":
    main()
