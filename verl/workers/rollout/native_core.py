"""The synchronous scheduler loop of the native engine: prefill, decode one token for every row, retire."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from verl.models.decoder.lean import CacheTarget, CacheWindow, Decoder
from verl.models.decoder.prompt_cache import PromptSharing
from verl.utils.errors import WorkerError
from verl.workers.rollout.base import Completion, GenerationRequest, check_request, completes_stop_text, max_stop_tokens
from verl.workers.rollout.sampling import sample, uniforms
from verl.workers.rollout.scheduler import (
    CachedPrompt,
    PrefillBatch,
    PrefillRequest,
    RequestState,
    RowTable,
    WaitingQueue,
)

_REFILL_DIVISOR = 16  # where prompts need a pass of their own: refill once 1/16 of the rows is free
_MIN_SHARED_PROMPT_TOKENS = 128  # tokens of a prompt that make a second product per layer cheaper than a copy per row


@dataclass(frozen=True)
class CacheLimits:
    """The cache's extent: rows decoded at once, the longest sequence, and columns (longer, so shifts are rare)."""

    rows: int
    max_model_len: int
    columns: int
    prefill_tokens: int


@dataclass
class Counters:
    """Sums since the last `take`."""

    generated_tokens: int = 0
    prefill_tokens: int = 0
    prompts_computed: int = 0
    requests: int = 0
    decode_steps: int = 0
    row_steps: int = 0
    cache_columns: int = 0
    model_s: float = 0.0
    sampling_s: float = 0.0
    scheduling_s: float = 0.0

    def take(self) -> dict[str, float]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        self.__init__()
        return values


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
        self.counters = Counters()
        self.queue = WaitingQueue()
        self.states: dict[int, RequestState] = {}
        self.column = self.low = 0
        self.ragged = False
        self.table: RowTable | None = None
        self.cached_prompts: list[CachedPrompt] = []  # by the decoder's slot
        self.sharing: PromptSharing | None = None

    @property
    def busy(self) -> bool:
        return bool(self.states)

    @property
    def allocated_rows(self) -> int:
        return len(self.table.starts) if self.table is not None else 0

    def submit(self, request: GenerationRequest, stop_ids: tuple[int, ...]) -> RequestState:
        """Queue a request; its samples enter as rows become free."""
        check_request(request, self.limits.max_model_len, self.states, self.decode_text is not None, self.vocab_size)
        state = RequestState(request, self.version, stop_ids)
        self.states[request.request_id] = state
        self.queue.push(state)
        self.counters.requests += 1
        return state

    @torch.inference_mode()
    def step(self) -> list[RequestState]:
        """Prefill what fits, then give every running row one token. Returns the requests that are now complete."""
        started = time.perf_counter()
        busy_s = self.counters.model_s + self.counters.sampling_s
        finished: list[RequestState] = []
        batches = self._schedule_prefills()
        enters_with_decode = (
            batches and self.decoder.supports_mixed_batches and self.table is not None and self.table.count
        )
        entering = batches.pop() if enters_with_decode else None
        for batch in batches:
            finished += self._prefill(batch)
        if self.table is not None and self.table.count:
            finished += self._decode(entering)
        model_and_sampling_s = self.counters.model_s + self.counters.sampling_s - busy_s
        self.counters.scheduling_s += time.perf_counter() - started - model_and_sampling_s
        for state in finished:
            del self.states[state.request.request_id]
        return finished

    def run(self, requests: list[GenerationRequest], stop_ids: tuple[int, ...] = ()) -> list[list[Completion]]:
        """Everything at once, in order: the synchronous door (benchmarks, tests)."""
        states = [
            self.submit(r, r.sampling.stop_token_ids + (() if r.sampling.ignore_eos else stop_ids)) for r in requests
        ]
        while not all(state.done for state in states):
            self.step()
        return [state.result() for state in states]

    @torch.inference_mode()
    def abort(self, request_id: int | None = None) -> list[RequestState]:
        """End one request or all; what was produced so far is their result."""
        removed = self.queue.remove(request_id)
        rows = self.table.rows if self.table is not None else []
        aborted = [i for i, row in enumerate(rows) if request_id is None or row.state.request.request_id == request_id]
        finished = self._finish_rows([(i, "aborted") for i in aborted])
        for state in removed:
            version = (state.submitted_version, self.version)
            for number in range(state.started, state.request.sampling.n):
                state.finish(number, Completion([], [], "aborted", version))
            state.started = state.request.sampling.n
            if state.done and state not in finished:
                finished.append(state)
        for state in finished:
            del self.states[state.request.request_id]
        return finished

    def reset(self) -> None:
        """Forget everything in flight and free the cache."""
        self.queue, self.states, self.table, self.cached_prompts, self.sharing = WaitingQueue(), {}, None, [], None
        self.decoder.free_cache()

    def _schedule_prefills(self) -> list[PrefillBatch]:
        """What enters now, with room made for it, in batches that are prefilled at once."""
        running = self.table.count if self.table is not None else 0
        if running and not self.decoder.supports_continuous_batching:
            return []
        rows = self.limits.rows
        min_free = 1 if self.decoder.supports_mixed_batches or not running else -(-rows // _REFILL_DIVISOR)
        requests = self.queue.take(rows - running, min_free, not self.decoder.supports_padded_prompts)
        if not requests:
            return []
        self._allocate_rows(running + sum(len(a.samples) for a in requests))
        cached: list[PrefillRequest] = []
        shared: list[PrefillRequest] = []
        unshared: list[PrefillRequest] = []
        for request in requests:
            request.cached_prompt = self._find_cached(request.prompt)
            long_group = (
                self.decoder.supports_shared_prompts
                and request.is_group
                and len(request.prompt) >= _MIN_SHARED_PROMPT_TOKENS
            )
            (cached if request.cached_prompt else shared if long_group else unshared).append(request)
        self._reserve_columns(max((len(a.prompt) for a in unshared), default=0))
        batches = [PrefillBatch(cached, shares_prompts=True)] if cached else []
        batches += [PrefillBatch(batch, shares_prompts=True) for batch in self._split_prefills(shared)]
        return batches + [PrefillBatch(batch, shares_prompts=False) for batch in self._split_prefills(unshared)]

    def _find_cached(self, prompt: list[int]) -> CachedPrompt | None:
        """Its slot's content, if it was computed by the weights in use."""
        return next((p for p in self.cached_prompts if p.version == self.version and p.tokens == prompt), None)

    def _allocate_rows(self, rows: int) -> None:
        if self.device.type != "cpu":
            rows = self.limits.rows  # the memory is set aside, and captured graphs need it to stay in place
        if self.table is None:
            self.decoder.allocate(rows, self.limits.columns)
            self.table = RowTable(rows, self.limits.columns, self.vocab_size, self.device)
        elif rows > self.allocated_rows:
            rows = min(self.limits.rows, max(rows, 2 * self.allocated_rows))
            self.decoder.allocate(rows, self.limits.columns)
            self.table.grow(rows)

    def _reserve_columns(self, width: int) -> None:
        """The running column leaves room for prompts of `width` tokens before it."""
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
        """Cut by padded tokens; a prompt over the budget goes alone. Decoders that cannot join take all at once."""
        if not self.decoder.supports_continuous_batching or not requests:
            return [requests] if requests else []
        batches: list[list[PrefillRequest]] = [[]]
        for request in requests:
            if batches[-1] and (len(batches[-1]) + 1) * len(request.prompt) > self.limits.prefill_tokens:
                batches.append([])
            batches[-1].append(request)
        return batches

    def _prefill(self, batch: PrefillBatch) -> list[RequestState]:
        first = self.table.count
        logits = None
        if not batch.is_cached:
            started = time.perf_counter()
            logits = self.decoder.prefill(batch.prompts, self._cache_target(batch, self.column))
            self.counters.model_s += time.perf_counter() - started
        return self._sample(self._add_sequences(batch, logits), slice(first, self.table.count))

    def _cache_target(self, batch: PrefillBatch, column: int) -> CacheTarget:
        slots = (
            self.decoder.prompt_cache.allocate_slots([len(p) for p in batch.prompts]) if batch.shares_prompts else None
        )
        return CacheTarget(column, self.table.count, batch.repeats, slots)

    def _add_sequences(self, batch: PrefillBatch, logits_NV: Tensor | None) -> Tensor:
        """New rows whose prompts end before the running column; logits (rows, V) for the first token of each.

        `logits_NV` after the prompts just computed; None where they were cached already.
        """
        if logits_NV is None:
            logits_NV = torch.stack([a.cached_prompt.logits_V for a in batch.requests])
        else:
            self.counters.prefill_tokens += sum(map(len, batch.prompts))
            self.counters.prompts_computed += len(batch.prompts)
            for request, logits_V in zip(batch.requests, logits_NV, strict=True):
                if batch.shares_prompts:
                    request.cached_prompt = CachedPrompt(request.prompt, self.version, logits_V.clone())
                    self.cached_prompts.append(request.cached_prompt)
        self.table.append(batch.requests, self.column, self.version)
        self._update_columns()
        if max(batch.repeats) == 1:
            return logits_NV
        return logits_NV.repeat_interleave(torch.tensor(batch.repeats, device=logits_NV.device), 0)

    def _decode(self, entering: PrefillBatch | None) -> list[RequestState]:
        """One token for every row; prompts that enter go through the weights in the same pass."""
        table = self.table
        if self.column + 1 >= self.limits.columns:
            width = max(map(len, entering.prompts)) if entering and not entering.shares_prompts else 0
            self._shift(-min(self.low, self.column + 1 - width))
        count, column = table.count, self.column
        window = CacheWindow(
            column, self.low, table.starts[:count], self.ragged, table.own_starts[:count], self.sharing
        )
        tokens = table.tokens[:count, column]
        started = time.perf_counter()
        if entering and not entering.is_cached:
            target = self._cache_target(entering, column + 1)
            logits = self.decoder.decode_and_prefill(tokens, window, entering.prompts, target)
        else:
            logits = self.decoder.decode(tokens, window)
        self.counters.model_s += time.perf_counter() - started
        self.counters.decode_steps += 1
        self.counters.row_steps += count
        self.counters.cache_columns += count * (column + 1 - self.low)
        self.column += 1
        if entering:
            first_logits = self._add_sequences(entering, None if entering.is_cached else logits[count:])
            logits = torch.cat((logits[:count], first_logits))
        return self._sample(logits, slice(0, table.count))

    def _sample(self, logits: Tensor, rows: slice) -> list[RequestState]:
        """One token for each of `rows` into the running column; retire the rows that end with it."""
        started = time.perf_counter()
        table, column = self.table, self.column
        uniforms_B = uniforms(table.keys[rows], column - table.first_columns[rows])
        tokens, logprobs = sample(logits, uniforms_B, table.sampling_tensors(rows, column))
        table.tokens[rows, column] = tokens
        table.logprobs[rows, column] = logprobs
        stopped = (tokens.unsqueeze(1) == table.stop_ids[rows]).any(1) & (column >= table.min_stop_columns[rows])
        not_finite = logprobs.isnan()
        ended = (stopped | (column >= table.last_columns[rows]) | not_finite).nonzero().squeeze(1)
        ended_rows = zip((ended + rows.start).tolist(), stopped[ended].tolist(), strict=True)
        reasons = {row: "stop" if stop else "length" for row, stop in ended_rows}
        self.counters.sampling_s += time.perf_counter() - started
        self.counters.generated_tokens += rows.stop - rows.start
        if reasons and bool(not_finite.any()):
            self._raise_not_finite(rows.start + int(not_finite.nonzero()[0]))
        if table.sampling_steps().stop_texts:
            running = (row for row in range(rows.start, rows.stop) if reasons.get(row) != "stop")
            reasons |= {row: "stop" for row in running if self._hits_stop_text(row)}
        return self._finish_rows(sorted(reasons.items()))

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
        ids = self.table.tokens[
            row, max(sequence.first_column, self.column + 1 - max_stop_tokens(params)) : self.column + 1
        ].tolist()
        return completes_stop_text(params, num_tokens, ids, self.decode_text)

    def _finish_rows(self, ended: list[tuple[int, str]]) -> list[RequestState]:
        """Turn rows into completions and close the gaps; returns the requests this completed."""
        if not ended:
            return []
        table, finished = self.table, []
        rows = [row for row, _ in ended]
        low = min(table.rows[row].first_column for row in rows)
        columns = (values[rows, low : self.column + 1].tolist() for values in (table.tokens, table.logprobs))
        for (row, reason), tokens, logprobs in zip(ended, *columns, strict=True):
            sequence = table.rows[row]
            generated = slice(sequence.first_column - low, None)
            completion = Completion(
                tokens[generated], logprobs[generated], reason, (sequence.first_version, self.version)
            )
            sequence.state.finish(sequence.sample, completion)
            if sequence.state.done:
                finished.append(sequence.state)
        window = CacheWindow(self.column, self.low, table.starts, self.ragged)
        sources, targets = table.compact(rows)
        self.decoder.move_rows(sources, targets, table.count, window)
        if self.cached_prompts:
            self._release_cached_prompts()
        self._update_columns()
        return finished

    def _release_cached_prompts(self) -> None:
        """Free the slots of prompts that no row continues and no request waits for."""
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
        """Where the rows' own columns begin, and which prompts they share."""
        count = self.table.count
        if count:
            own_starts = self.table.own_starts[:count]
            self.low, high = int(own_starts.min()), int(own_starts.max())
            self.ragged = high != self.low
        self.sharing = self._prompt_sharing() if self.cached_prompts else None

    def _prompt_sharing(self) -> PromptSharing | None:
        slots = {id(prompt): slot for slot, prompt in enumerate(self.cached_prompts)}
        counts = [0] * (len(slots) + 1)
        prompt_places = []
        for row in self.table.rows:
            slot = slots.get(id(row.cached_prompt), len(slots))
            prompt_places.append((slot, counts[slot] if row.cached_prompt else 0))
            counts[slot] += 1
        rows_per_slot = max(counts[:-1])
        if not rows_per_slot:
            return None
        return PromptSharing(
            torch.tensor([slot * rows_per_slot + number for slot, number in prompt_places]), rows_per_slot, len(slots)
        )
