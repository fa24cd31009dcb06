"""The synchronous heart of the native engine: admit, decode one token for every row, retire."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from verl.models.decoder import Decoder, Window
from verl.utils.errors import WorkerError
from verl.workers.rollout.base import Completion, GenerationRequest, check_request, completes_stop_text, stop_tail
from verl.workers.rollout.sampling import sample, uniforms
from verl.workers.rollout.scheduler import Admission, RequestState, RowTable, WaitingQueue


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
        vocab: int,
        decode_text: Callable[[list[int]], str] | None = None,
        device: torch.device | None = None,
    ):
        self.decoder, self.limits, self.vocab, self.decode_text = decoder, limits, vocab, decode_text
        self.device = device or torch.device("cpu")
        self.version = 0
        self.counters = Counters()
        self.queue = WaitingQueue()
        self.states: dict[int, RequestState] = {}
        self.column = self.low = 0
        self.ragged = False
        self.table: RowTable | None = None

    @property
    def busy(self) -> bool:
        return bool(self.states)

    @property
    def allocated_rows(self) -> int:
        return len(self.table.starts) if self.table is not None else 0

    def submit(self, request: GenerationRequest, stop_ids: tuple[int, ...]) -> RequestState:
        """Queue a request; its samples enter as rows become free."""
        check_request(request, self.limits.max_model_len, self.states, self.decode_text is not None)
        state = RequestState(request, self.version, stop_ids)
        self.states[request.request_id] = state
        self.queue.push(state)
        self.counters.requests += 1
        return state

    @torch.inference_mode()
    def step(self) -> list[RequestState]:
        """Admit what fits, then give every running row one token. Returns the requests that are now complete."""
        before = time.perf_counter()
        busy_s = self.counters.model_s + self.counters.sampling_s
        finished = self._admit()
        if self.table is not None and self.table.count:
            finished += self._decode()
        other = self.counters.model_s + self.counters.sampling_s - busy_s
        self.counters.scheduling_s += time.perf_counter() - before - other
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
        gone = self.queue.remove(request_id)
        rows = self.table.rows if self.table is not None else []
        hit = [i for i, row in enumerate(rows) if request_id is None or row.state.request.request_id == request_id]
        finished = self._retire([(i, "aborted") for i in hit])
        for state in gone:
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
        self.queue, self.states, self.table = WaitingQueue(), {}, None
        self.decoder.free_cache()

    def _admit(self) -> list[RequestState]:
        running = self.table.count if self.table is not None else 0
        if running and not self.decoder.joins:
            return []
        batch = self.queue.take(self.limits.rows - running, running, self.limits.rows, not self.decoder.pads)
        if not batch:
            return []
        self._make_room(running + sum(len(a.rows) for a in batch))
        self._place(max(len(a.prompt) for a in batch))
        finished = []
        for part in self._prefill_parts(batch):
            finished += self._prefill(part)
        return finished

    def _make_room(self, rows: int) -> None:
        if self.device.type != "cpu":
            rows = self.limits.rows  # the memory is set aside, and captured graphs need it to stay in place
        if self.table is None:
            self.decoder.allocate(rows, self.limits.columns)
            self.table = RowTable(rows, self.limits.columns, self.vocab, self.device)
        elif rows > self.allocated_rows:
            rows = min(self.limits.rows, max(rows, 2 * self.allocated_rows))
            self.decoder.allocate(rows, self.limits.columns)
            self.table.grow(rows)

    def _place(self, width: int) -> None:
        """The running column leaves room for prompts of `width` tokens before it."""
        if not self.table.count:
            self.column = max(width, min(self.queue.longest_prompt(), self.limits.max_model_len))
        elif self.column < width:
            self._shift(width - self.column)

    def _shift(self, by: int) -> None:
        self.decoder.shift(self.table.count, self.low, self.column, by)
        self.table.shift(self.low, self.column, by)
        self.column += by
        self.low += by

    def _prefill_parts(self, batch: list[Admission]) -> list[list[Admission]]:
        """Cut by padded tokens; a prompt over the budget goes alone. Decoders that cannot join take all at once."""
        if not self.decoder.joins:
            return [batch]
        parts: list[list[Admission]] = [[]]
        for admission in batch:
            if parts[-1] and (len(parts[-1]) + 1) * len(admission.prompt) > self.limits.prefill_tokens:
                parts.append([])
            parts[-1].append(admission)
        return parts

    def _prefill(self, part: list[Admission]) -> list[RequestState]:
        first = self.table.count
        started = time.perf_counter()
        prompts, repeats = [a.prompt for a in part], [len(a.rows) for a in part]
        logits = self.decoder.prefill(prompts, repeats, first, self.column)
        self.counters.model_s += time.perf_counter() - started
        self.counters.prefill_tokens += sum(map(len, prompts))
        self.counters.prompts_computed += len(prompts)
        for admission in part:
            self.table.append(admission, self.column, self.version)
        self._measure()
        if max(repeats) > 1:
            logits = logits.repeat_interleave(torch.tensor(repeats, device=logits.device), 0)
        return self._sample(logits, slice(first, self.table.count))

    def _decode(self) -> list[RequestState]:
        table = self.table
        if self.column + 1 >= self.limits.columns:
            self._shift(-self.low)
        count, column = table.count, self.column
        window = Window(column, self.low, table.starts[:count], self.ragged)
        started = time.perf_counter()
        logits = self.decoder.decode(table.tokens[:count, column], window)
        self.counters.model_s += time.perf_counter() - started
        self.counters.decode_steps += 1
        self.counters.row_steps += count
        self.counters.cache_columns += count * (column + 1 - self.low)
        self.column += 1
        return self._sample(logits, slice(0, count))

    def _sample(self, logits: Tensor, rows: slice) -> list[RequestState]:
        """One token for each of `rows` into the running column; retire the rows that end with it."""
        started = time.perf_counter()
        table, column = self.table, self.column
        random = uniforms(table.keys[rows], column - table.firsts[rows])
        tokens, logprobs = sample(logits, random, table.sharpening(rows, column))
        table.tokens[rows, column] = tokens
        table.logprobs[rows, column] = logprobs
        stopped = (tokens.unsqueeze(1) == table.stop_ids[rows]).any(1) & (column >= table.earliest[rows])
        ends = stopped | (column >= table.limits[rows]) | logprobs.isnan()
        ended = [rows.start + i for i in ends.nonzero().squeeze(1).tolist()]
        self.counters.sampling_s += time.perf_counter() - started
        self.counters.generated_tokens += rows.stop - rows.start
        reasons = {row: self._reason(row) for row in ended}
        if table.needs().stop_texts:
            hits = [row for row in range(rows.start, rows.stop) if row not in reasons and self._hits_stop_text(row)]
            reasons |= dict.fromkeys(hits, "stop")
        return self._retire(sorted(reasons.items()))

    def _reason(self, row: int) -> str:
        table, column = self.table, self.column
        entry = table.rows[row]
        if torch.isnan(table.logprobs[row, column]):
            raise WorkerError(
                0, "generate",
                f"the logits of request {entry.state.request.request_id} are not finite at weights version "
                f"{self.version}; the policy has diverged: look at actor/grad_norm, lower the learning rate, or check "
                f"the loaded weights",
            )  # fmt: skip
        stops = entry.state.stop_ids
        early = column - entry.first < entry.state.request.sampling.min_tokens
        if (int(table.tokens[row, column]) in stops and not early) or self._hits_stop_text(row):
            return "stop"
        return "length"

    def _hits_stop_text(self, row: int) -> bool:
        """Whether the newest token completed a stop string in the decoded text."""
        entry = self.table.rows[row]
        params = entry.state.request.sampling
        made = self.column + 1 - entry.first
        ids = self.table.tokens[row, max(entry.first, self.column + 1 - stop_tail(params)) : self.column + 1].tolist()
        return completes_stop_text(params, made, ids, self.decode_text)

    def _retire(self, ended: list[tuple[int, str]]) -> list[RequestState]:
        """Turn rows into completions and close the gaps; returns the requests this completed."""
        if not ended:
            return []
        table, finished = self.table, []
        for row, reason in ended:
            entry = table.rows[row]
            span = slice(entry.first, self.column + 1)
            completion = Completion(
                table.tokens[row, span].tolist(),
                table.logprobs[row, span].tolist(),
                reason,
                (entry.first_version, self.version),
            )
            entry.state.finish(entry.sample, completion)
            if entry.state.done:
                finished.append(entry.state)
        window = Window(self.column, self.low, table.starts, self.ragged)
        sources, targets = table.compact([row for row, _ in ended])
        self.decoder.move(sources, targets, table.count, window)
        self._measure()
        return finished

    def _measure(self) -> None:
        """Where the rows in use begin."""
        count = self.table.count
        if count:
            starts = self.table.starts[:count]
            self.low, high = int(starts.min()), int(starts.max())
            self.ragged = high != self.low
