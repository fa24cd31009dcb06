"""A replica of several engines of vLLM, its data-parallel ranks, each in a process of its own.

Each rank has all weights; with expert parallelism the ranks share the experts, and step together: one without requests
computes an empty batch. vLLM sends a request to the rank with the least to do.
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from verl.runtime.wire import deserialize, serialize
from verl.workers.rollout.vllm.engine import VLLMEngine
from verl.workers.rollout.vllm.requests import logprobs_of_prompt


class DataParallelVLLMEngine(VLLMEngine):
    """`VLLMEngine` over `rollout.data_parallel_size` ranks; built where an event loop runs, in a process of its own,
    which ends when a rank has ended.

    From the first step of an update to its end the ranks are paused: all begin with the new weights together, and none
    waits in a step for one that waits for the trainer.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._followed: dict[str, asyncio.Task[None]] = {}  # by vLLM's request id
        self._is_paused = False
        self._watch = asyncio.create_task(self._end_with_ranks())
        self._take_turns_with_outputs()

    def _take_turns_with_outputs(self) -> None:
        """Let other tasks run between two messages of the ranks: vLLM reads on while any waits, and an abort would wait
        until all were read."""
        socket = self.llm.engine_core.resources.output_socket
        receive = socket.recv_multipart

        async def receive_in_turn(**kwargs: Any) -> Any:
            await asyncio.sleep(0)
            return await receive(**kwargs)

        socket.recv_multipart = receive_in_turn

    async def _end_with_ranks(self) -> None:
        while True:
            self._check_ranks()
            await asyncio.sleep(1)

    def _check_ranks(self) -> None:
        """End this process, whose replica another then takes the place of, if a rank has ended."""
        if self.llm.errored:
            print("a data-parallel rank of vLLM has ended, and its replica with it", file=sys.stderr, flush=True)
            os._exit(1)

    def _submit(self, name: str, token_ids: Sequence[int], params: Any) -> None:
        task = self._followed[name] = asyncio.create_task(self._follow(name, self._prompt(token_ids), params))
        task.add_done_callback(partial(self._forget, name))

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        if self._followed.get(name) is task:  # else asked again meanwhile
            del self._followed[name]

    async def _follow(self, name: str, prompt: dict[str, Any], params: Any) -> None:
        try:
            async for output in self.llm.generate(prompt, params, name, lora_request=self._adapters):
                self._append_tokens(output)
        except Exception as error:
            self._check_ranks()
            if name in self._samples:
                self._fail(self._samples[name][0], error)

    def _stop(self, names: Sequence[str]) -> None:
        for name in names:
            if task := self._followed.get(name):
                task.cancel()

    async def _on_engine(self, method: str, *args: Any) -> list[Any]:
        try:
            return await self.llm.engine_core.call_utility_all_async(method, *args)
        except Exception:
            self._check_ranks()
            raise

    async def _on_workers(self, method: str, *args: Any) -> list[Any]:
        await self._pause()
        message = serialize([method, args])
        by_rank = await self._on_engine("collective_rpc", "verl_over_wire", None, (message,), None)
        return [deserialize(answer) for answers in by_rank for answer in answers]

    async def finish_update(self, version: int) -> None:
        await super().finish_update(version)
        if not self._is_parked:
            await self._go_on()

    async def _pause(self) -> None:
        if not self._is_paused:
            await self.llm.pause_generation(mode="keep", clear_cache=False)
            self._is_paused = True

    async def _go_on(self) -> None:
        if self._is_paused:
            await self.llm.resume_generation()
            self._is_paused = False

    async def flush_cache(self) -> None:
        await self._on_engine("reset_prefix_cache", True)  # an aborted request may still run; raises where it cannot

    async def wake(self) -> None:
        await super().wake()
        self._is_paused = False  # vLLM samples when it wakes

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of rank 0, then of each other rank: `data_parallel_size` times as many as `sequences`."""
        ranks = range(self.config.data_parallel_size)
        await self._go_on()
        found = await asyncio.gather(*(self._logprobs_of(list(ids), rank) for rank in ranks for ids in sequences))
        if self._is_parked:
            await self._pause()
        return found

    async def _logprobs_of(self, ids: list[int], rank: int) -> list[float]:
        from vllm import SamplingParams

        params, logprobs = SamplingParams(prompt_logprobs=0, max_tokens=1, detokenize=False), [0.0]
        prompt, where = {"prompt_token_ids": ids}, {"data_parallel_rank": rank, "lora_request": self._adapters}
        async for output in self.llm.generate(prompt, params, f"logprobs:{rank}", **where):
            if output.prompt_logprobs is not None:
                logprobs = logprobs_of_prompt(ids, output)
        return logprobs
