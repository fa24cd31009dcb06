"""The synchronous scheduler loop of the native engine: prefill, decode one token per sequence, finish."""

import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from verl.data.random_streams import uniforms
from verl.models.decoder.lean import CacheTarget, CacheWindow, Decoder
from verl.models.decoder.prompt_cache import PromptSharing
from verl.utils.errors import WorkerError
from verl.workers.rollout.base import Completion, GenerationRequest
from verl.workers.rollout.engine_stats import Counters, DecodeTimes
from verl.workers.rollout.native.cache_limits import CacheLimits
from verl.workers.rollout.native.scheduler import (
    CachedPrompt,
    PrefillBatch,
    PrefillRequest,
    RequestState,
    RowTable,
    WaitingQueue,
    prompt_sharing,
)
from verl.workers.rollout.request_limits import check_request
from verl.workers.rollout.stop_texts import completes_stop_text, max_stop_tokens

_REFILL_DIVISOR = 16  # if prefill needs its own forward pass, it waits until 1/16 of the rows are free
_MIN_SHARED_PROMPT_TOKENS = 128  # shorter prompts are copied to each row: cheaper than a second matmul per layer


class NativeCore:
    """Runs many requests through one decoder. Not thread-safe: one caller drives `step`."""

    def __init__(
        self,
        decoder: Decoder,
        limits: CacheLimits,
        vocab_size: int,
        decode_text: Callable[[list[int]], str] | None = None,
        device: torch.device | None = None,
    ):
        self.decoder, self.limits, self.vocab_size, self.decode_text = decoder, limits, vocab_size, decode_text
        self.device = device or torch.device("cpu")
        self.version = 0
        self.counters, self.decode_times = Counters(), DecodeTimes()
        self.queue = WaitingQueue()
        self.states: dict[int, RequestState] = {}
        self.column, self.low, self.ragged = 0, 0, False
        self.table: RowTable | None = None
        self.cached_prompts: list[CachedPrompt] = []  # indexed by the decoder's slot
        self.sharing: PromptSharing | None = None

    @property
    def busy(self) -> bool:
        return bool(self.states)

    @property
    def is_decoding(self) -> bool:  # sequences are in the KV cache
        return self.table is not None and self.table.count > 0

    @property
    def runnable(self) -> bool:  # `step` has something to do
        return self.is_decoding or len(self.queue) > 0

    def use_version(self, version: int) -> None:
        """Sample from weights of `version` from now on; running sequences keep count of it."""
        self.decode_times.new_weights()
        for row in self.table.rows if self.table is not None and version != self.version else ():
            row.note_version(version, self.column + 1 - row.first_column)
        self.version = version

    def in_flight(self) -> list[GenerationRequest]:
        """All requests, each with what was sampled of it so far."""
        rows = self.table.rows if self.table is not None else []
        running = {
            (row.state.request.request_id, row.sample): self.table.so_far(n, self.column) for n, row in enumerate(rows)
        }

        def so_far(state: RequestState, sample: int) -> Completion:
            now = state.completions.get(sample) or running.get((state.request.request_id, sample))
            return now or state.before(sample)

        return [
            replace(state.request, sampled=tuple(so_far(state, n) for n in range(state.request.sampling.n)))
            for state in self.states.values()
        ]

    @property
    def allocated_rows(self) -> int:
        return len(self.table.starts) if self.table is not None else 0

    def submit(self, request: GenerationRequest, stop_ids: tuple[int, ...]) -> RequestState:
        """Queue a request; its samples start as rows become free."""
        check_request(request, self.limits.max_model_len, self.states, self.decode_text is not None, self.vocab_size)
        state = RequestState(request, self.version, stop_ids)
        self.states[request.request_id] = state
        self.queue.push(state)
        self.counters.requests += not request.sampled  # else it was counted when it came first
        return state

    @torch.inference_mode()
    def step(self) -> list[RequestState]:
        """Prefill new prompts, then decode one token per running row. Returns the requests that are now complete."""
        started, before, now = time.perf_counter(), replace(self.counters), self.counters
        finished = self._prefill_and_decode()
        for state in finished:
            del self.states[state.request.request_id]
        seconds = time.perf_counter() - started
        now.add_scheduling(seconds, before)
        if decoded := now.decoded_since(before):
            self.decode_times.record(*decoded, seconds)
        return finished

    def _prefill_and_decode(self) -> list[RequestState]:
        finished, batches = list[RequestState](), self._schedule_prefills()
        can_mix = batches and self.decoder.supports_mixed_batches and self.is_decoding
        prefill = batches.pop() if can_mix else None
        for batch in batches:
            finished += self._prefill(batch)
        return finished + (self._decode(prefill) if self.is_decoding else [])

    def run(self, requests: list[GenerationRequest], stop_ids: tuple[int, ...] = ()) -> list[list[Completion]]:
        """Completions of each request, in order: the synchronous entry point (benchmarks, tests)."""
        states = [
            self.submit(r, r.sampling.stop_token_ids + (() if r.sampling.ignore_eos else stop_ids)) for r in requests
        ]
        while not all(state.done for state in states):
            self.step()
        return [state.result() for state in states]

    @torch.inference_mode()
    def abort(self, request_id: int | None = None) -> list[RequestState]:
        """Stop one request or all; returns them with the tokens sampled so far."""
        removed = self.queue.remove(request_id)
        rows = self.table.rows if self.table is not None else []
        aborted = [i for i, row in enumerate(rows) if request_id is None or row.state.request.request_id == request_id]
        finished = self._take_completed_requests([(i, "aborted") for i in aborted])
        for state in removed:
            state.finish_waiting()
            if state.done and state not in finished:
                finished.append(state)
        for state in finished:
            del self.states[state.request.request_id]
        return finished

    def reset(self) -> None:
        """Drop all requests in flight and free the KV cache."""
        self.queue, self.states = WaitingQueue(), {}
        self.free_cache()

    def free_cache(self) -> None:  # which no running sequence needs
        self.table, self.cached_prompts, self.sharing = None, [], None
        self.decoder.free_cache()

    def _schedule_prefills(self) -> list[PrefillBatch]:
        """Batches of prompts to schedule now; allocates the rows and columns that they need."""
        running = self.table.count if self.table is not None else 0
        if running and not self.decoder.supports_continuous_batching:
            return []
        rows = self.limits.rows
        min_free = 1 if self.decoder.supports_mixed_batches or not running else -(-rows // _REFILL_DIVISOR)
        requests = self.queue.take(rows - running, min_free, not self.decoder.supports_padded_prompts)
        if not requests:
            return []
        self._ensure_rows(running + sum(len(r.samples) for r in requests))
        cached: list[PrefillRequest] = []
        shared: list[PrefillRequest] = []
        unshared: list[PrefillRequest] = []
        for request in requests:
            if request.goes_on:
                unshared.append(request)
                continue
            request.cached_prompt = self._find_cached(request.prompt)
            is_long = len(request.prompt) >= _MIN_SHARED_PROMPT_TOKENS
            long_group = self.decoder.supports_shared_prompts and request.is_group and is_long
            (cached if request.cached_prompt else shared if long_group else unshared).append(request)
        unshared.sort(key=lambda request: len(request.prompt))
        self._reserve_columns(max((len(r.prompt) for r in unshared), default=0))
        batches = [PrefillBatch(cached, shares_prompts=True)] if cached else []
        batches += [PrefillBatch(batch, shares_prompts=True) for batch in self._split_prefills(shared)]
        return batches + [PrefillBatch(batch, shares_prompts=False) for batch in self._split_prefills(unshared)]

    def _find_cached(self, prompt: list[int]) -> CachedPrompt | None:
        """The cached prompt, if the weights in use computed it."""
        return next((p for p in self.cached_prompts if p.version == self.version and p.tokens == prompt), None)

    def _ensure_rows(self, rows: int) -> None:
        """Make room for `rows` rows in all, in the table and the decoder's cache."""
        if self.device.type != "cpu":
            rows = self.limits.rows  # the memory is reserved, and captured graphs need fixed addresses
        if self.table is None:
            self.decoder.allocate(rows, self.limits.columns)
            self.table = RowTable(rows, self.limits.columns, self.vocab_size, self.device)
        elif rows > self.allocated_rows:
            rows = min(self.limits.rows, max(rows, 2 * self.allocated_rows))
            self.decoder.allocate(rows, self.limits.columns)
            self.table.grow(rows)

    def _reserve_columns(self, width: int) -> None:
        """Move the running column so that prompts of `width` tokens fit before it."""
        if not self.table.count:
            self.column = max(width, min(self.queue.longest_prompt(), self.limits.max_model_len))
        elif self.column < width:
            self._shift(width - self.column)

    def _shift(self, by: int) -> None:
        self.decoder.shift_columns(self.table.count, self.low, self.column, by)
        self.table.shift(self.low, self.column, by)
        self.column += by
        self.low += by

    def _split_prefills(self, requests: list[PrefillRequest]) -> list[list[PrefillRequest]]:
        """Split by padded tokens. Without continuous batching, all are one batch."""
        if not self.decoder.supports_continuous_batching or not requests:
            return [requests] if requests else []
        batches: list[list[PrefillRequest]] = [[]]
        for request in requests:
            if batches[-1] and not self.limits.is_one_prefill([len(r.prompt) for r in (*batches[-1], request)]):
                batches.append([])
            batches[-1].append(request)
        return batches

    def _prefill(self, batch: PrefillBatch) -> list[RequestState]:
        first = self.table.count
        logits = None
        if not batch.is_cached:
            with self.counters.timed_model():
                logits = self.decoder.prefill(batch.prompts, self._cache_target(batch, self.column))
        return self._sample(self._add_rows(batch, logits), slice(first, self.table.count))

    def _cache_target(self, batch: PrefillBatch, column: int) -> CacheTarget:
        slots = (
            self.decoder.prompt_cache.allocate_slots([len(p) for p in batch.prompts]) if batch.shares_prompts else None
        )
        return CacheTarget(column, self.table.count, batch.repeats, slots)

    def _add_rows(self, batch: PrefillBatch, logits_NV: Tensor | None) -> Tensor:
        """Add rows whose prompts end before the running column; returns logits (rows, V) for their first tokens.

        `logits_NV`: logits after each prefilled prompt; None if the prompts were cached already.
        """
        if logits_NV is None:
            logits_NV = torch.stack([r.cached_prompt.logits_V for r in batch.requests])
        else:
            self.counters.add_prefill(batch.prompts)
            for request, logits_V in zip(batch.requests, logits_NV, strict=True):
                if batch.shares_prompts:
                    request.cached_prompt = CachedPrompt(request.prompt, self.version, logits_V.clone())
                    self.cached_prompts.append(request.cached_prompt)
        self.table.append(batch.requests, self.column, self.version)
        self._update_columns()
        if max(batch.repeats) == 1:
            return logits_NV
        return logits_NV.repeat_interleave(torch.tensor(batch.repeats, device=logits_NV.device), 0)

    def _decode(self, prefill: PrefillBatch | None) -> list[RequestState]:
        """Decode one token per row; the prompts of `prefill` go through the same forward pass."""
        table = self.table
        if self.column + 1 >= self.limits.columns:
            width = max(map(len, prefill.prompts)) if prefill and not prefill.shares_prompts else 0
            self._shift(-min(self.low, self.column + 1 - width))
        count, column = table.count, self.column
        own_starts, tokens = table.own_starts[:count], table.tokens[:count, column]
        window = CacheWindow(column, self.low, table.starts[:count], self.ragged, own_starts, self.sharing)
        with self.counters.timed_model():
            if prefill and not prefill.is_cached:
                target = self._cache_target(prefill, column + 1)
                logits = self.decoder.decode_and_prefill(tokens, window, prefill.prompts, target)
            else:
                logits = self.decoder.decode(tokens, window)
        self.counters.add_decode(count, column + 1 - self.low)
        self.column += 1
        if prefill:
            first_logits = self._add_rows(prefill, None if prefill.is_cached else logits[count:])
            logits = torch.cat((logits[:count], first_logits))
        return self._sample(logits, slice(0, table.count))

    def _sample(self, logits: Tensor, rows: slice) -> list[RequestState]:
        """Sample one token per row of `rows` into the running column; finish the rows that end with it.

        Returns the requests whose last sample has ended."""
        started = time.perf_counter()
        table, column = self.table, self.column
        uniforms_B = uniforms(table.keys[rows], column - table.first_columns[rows])
        steps = table.needed_sampling_steps()
        if steps.top_logprobs:
            table.record_alternatives(logits, rows)
        tokens, logprobs = table.sample(logits, uniforms_B, rows, column)
        table.tokens[rows, column] = tokens
        table.logprobs[rows, column] = logprobs
        stopped = (tokens.unsqueeze(1) == table.stop_ids[rows]).any(1) & (column >= table.min_stop_columns[rows])
        not_finite = logprobs.isnan()
        ended = (stopped | (column >= table.last_columns[rows]) | not_finite).nonzero().squeeze(1)
        ended_rows = zip((ended + rows.start).tolist(), stopped[ended].tolist(), strict=True)
        reasons = {row: "stop" if stop else "length" for row, stop in ended_rows}
        self.counters.add_sampled(rows.stop - rows.start, time.perf_counter() - started)
        if reasons and bool(not_finite.any()):
            self._raise_not_finite(rows.start + int(not_finite.nonzero()[0]))
        if steps.stop_texts:
            running = (row for row in range(rows.start, rows.stop) if reasons.get(row) != "stop")
            reasons |= {row: "stop" for row in running if self._hits_stop_text(row)}
        return self._take_completed_requests(sorted(reasons.items()))

    def _raise_not_finite(self, row: int) -> None:
        raise WorkerError(
            0, "generate",
            f"the logits of request {self.table.rows[row].state.request.request_id} are not finite at weights version "
            f"{self.version}; the policy has diverged: look at actor/grad_norm, lower the learning rate, or check "
            f"the loaded weights",
        )  # fmt: skip

    def _hits_stop_text(self, row: int) -> bool:
        """Whether the newest token completed a stop string in the decoded text."""
        sequence = self.table.rows[row]
        params = sequence.state.request.sampling
        num_tokens = self.column + 1 - sequence.first_column
        first = max(sequence.first_column, self.column + 1 - max_stop_tokens(params))
        ids = self.table.tokens[row, first : self.column + 1].tolist()
        return completes_stop_text(params, num_tokens, ids, self.decode_text)

    def _take_completed_requests(self, ended: list[tuple[int, str]]) -> list[RequestState]:
        """Turn ended rows into completions and compact the table; returns the requests whose every sample has ended."""
        if not ended:
            return []
        table, finished = self.table, []
        rows = [row for row, _ in ended]
        low = min(table.rows[row].first_column for row in rows)
        columns = (values[rows, low : self.column + 1].tolist() for values in (table.tokens, table.logprobs))
        for (row, reason), tokens, logprobs in zip(ended, *columns, strict=True):
            sequence = table.rows[row]
            generated = slice(sequence.first_column - low, None)
            done = sequence.completion(tokens[generated], logprobs[generated], reason)
            sequence.state.completions[sequence.sample] = done
            if sequence.state.done:
                finished.append(sequence.state)
        self._remove_rows(rows)
        return finished

    def _remove_rows(self, rows: list[int]) -> None:
        table = self.table
        window = CacheWindow(self.column, self.low, table.starts, self.ragged)
        sources, targets = table.compact(rows)
        self.decoder.move_rows(sources, targets, table.count, window)
        if self.cached_prompts:
            self._free_unused_prompts()
        self._update_columns()

    def _free_unused_prompts(self) -> None:
        """Free the slots of prompts that no running row and no waiting request uses."""
        used = {id(row.cached_prompt) for row in self.table.rows}
        for slot in reversed(range(len(self.cached_prompts))):
            prompt = self.cached_prompts[slot]
            if id(prompt) in used or (prompt.version == self.version and self.queue.has(prompt.tokens)):
                continue
            self.decoder.prompt_cache.free_slot(slot)
            last = self.cached_prompts.pop()
            if last is not prompt:
                self.cached_prompts[slot] = last

    def _update_columns(self) -> None:
        """Update where the rows' own columns begin, and which prompts they share."""
        count = self.table.count
        if count:
            own_starts = self.table.own_starts[:count]
            self.low, high = int(own_starts.min()), int(own_starts.max())
            self.ragged = high != self.low
        self.sharing = prompt_sharing(self.table.rows, self.cached_prompts) if self.cached_prompts else None
