"""The synchronous heart of the native engine: admit, decode one token for every row, retire."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from verl.models.decoder import Decoder, Where, Window
from verl.models.decoder_shared import Sharing
from verl.utils.errors import WorkerError
from verl.workers.rollout.base import Completion, GenerationRequest, check_request, completes_stop_text, stop_tail
from verl.workers.rollout.sampling import sample, uniforms
from verl.workers.rollout.scheduler import Admission, HeldPrompt, Part, RequestState, RowTable, WaitingQueue

_REFILL_SHARE = 16  # where prompts need a pass of their own: refill once 1/16 of the rows is free
_SHARE_FROM = 128  # tokens of a prompt that make a second product per layer cheaper than a copy per row


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
        self.held: list[HeldPrompt] = []  # by the decoder's slot
        self.sharing: Sharing | None = None

    @property
    def busy(self) -> bool:
        return bool(self.states)

    @property
    def allocated_rows(self) -> int:
        return len(self.table.starts) if self.table is not None else 0

    def submit(self, request: GenerationRequest, stop_ids: tuple[int, ...]) -> RequestState:
        """Queue a request; its samples enter as rows become free."""
        check_request(request, self.limits.max_model_len, self.states, self.decode_text is not None, self.vocab)
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
        finished: list[RequestState] = []
        parts = self._admit()
        joins = parts and self.decoder.mixes and self.table is not None and self.table.count
        entering = parts.pop() if joins else None
        for part in parts:
            finished += self._prefill(part)
        if self.table is not None and self.table.count:
            finished += self._decode(entering)
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
        self.queue, self.states, self.table, self.held, self.sharing = WaitingQueue(), {}, None, [], None
        self.decoder.free_cache()

    def _admit(self) -> list[Part]:
        """What enters now, with room made for it, in parts that are prefilled at once."""
        running = self.table.count if self.table is not None else 0
        if running and not self.decoder.joins:
            return []
        rows = self.limits.rows
        least = 1 if self.decoder.mixes or not running else -(-rows // _REFILL_SHARE)
        batch = self.queue.take(rows - running, least, not self.decoder.pads)
        if not batch:
            return []
        self._make_room(running + sum(len(a.rows) for a in batch))
        held: list[Admission] = []
        shared: list[Admission] = []
        apart: list[Admission] = []
        for admission in batch:
            admission.held = self._find(admission.prompt)
            long_group = self.decoder.shares and admission.is_group and len(admission.prompt) >= _SHARE_FROM
            (held if admission.held else shared if long_group else apart).append(admission)
        self._place(max((len(a.prompt) for a in apart), default=0))
        parts = [Part(held, shared=True)] if held else []
        parts += [Part(part, shared=True) for part in self._prefill_parts(shared)]
        return parts + [Part(part, shared=False) for part in self._prefill_parts(apart)]

    def _find(self, prompt: list[int]) -> HeldPrompt | None:
        """Its slot's content, if it was computed by the weights in use."""
        return next((p for p in self.held if p.version == self.version and p.tokens == prompt), None)

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
        if not self.decoder.joins or not batch:
            return [batch] if batch else []
        parts: list[list[Admission]] = [[]]
        for admission in batch:
            if parts[-1] and (len(parts[-1]) + 1) * len(admission.prompt) > self.limits.prefill_tokens:
                parts.append([])
            parts[-1].append(admission)
        return parts

    def _prefill(self, part: Part) -> list[RequestState]:
        first = self.table.count
        logits = None
        if not part.is_held:
            started = time.perf_counter()
            logits = self.decoder.prefill(part.prompts, self._where(part, self.column))
            self.counters.model_s += time.perf_counter() - started
        return self._sample(self._enter(part, logits), slice(first, self.table.count))

    def _where(self, part: Part, column: int) -> Where:
        slots = self.decoder.prompts.enter([len(p) for p in part.prompts]) if part.shared else None
        return Where(column, self.table.count, part.repeats, slots)

    def _enter(self, part: Part, logits_NV: Tensor | None) -> Tensor:
        """New rows whose prompts end before the running column; logits (rows, V) for the first token of each.

        `logits_NV` after the prompts just computed; None where they were held already.
        """
        if logits_NV is None:
            logits_NV = torch.stack([a.held.logits_V for a in part.admissions])
        else:
            self.counters.prefill_tokens += sum(map(len, part.prompts))
            self.counters.prompts_computed += len(part.prompts)
            for admission, logits_V in zip(part.admissions, logits_NV, strict=True):
                if part.shared:
                    admission.held = HeldPrompt(admission.prompt, self.version, logits_V.clone())
                    self.held.append(admission.held)
        self.table.append(part.admissions, self.column, self.version)
        self._measure()
        if max(part.repeats) == 1:
            return logits_NV
        return logits_NV.repeat_interleave(torch.tensor(part.repeats, device=logits_NV.device), 0)

    def _decode(self, entering: Part | None) -> list[RequestState]:
        """One token for every row; prompts that enter go through the weights in the same pass."""
        table = self.table
        if self.column + 1 >= self.limits.columns:
            width = max(map(len, entering.prompts)) if entering and not entering.shared else 0
            self._shift(-min(self.low, self.column + 1 - width))
        count, column = table.count, self.column
        window = Window(column, self.low, table.starts[:count], self.ragged, table.owns[:count], self.sharing)
        tokens = table.tokens[:count, column]
        started = time.perf_counter()
        if entering and not entering.is_held:
            where = self._where(entering, column + 1)
            logits = self.decoder.decode_and_prefill(tokens, window, entering.prompts, where)
        else:
            logits = self.decoder.decode(tokens, window)
        self.counters.model_s += time.perf_counter() - started
        self.counters.decode_steps += 1
        self.counters.row_steps += count
        self.counters.cache_columns += count * (column + 1 - self.low)
        self.column += 1
        if entering:
            firsts = self._enter(entering, None if entering.is_held else logits[count:])
            logits = torch.cat((logits[:count], firsts))
        return self._sample(logits, slice(0, table.count))

    def _sample(self, logits: Tensor, rows: slice) -> list[RequestState]:
        """One token for each of `rows` into the running column; retire the rows that end with it."""
        started = time.perf_counter()
        table, column = self.table, self.column
        random = uniforms(table.keys[rows], column - table.firsts[rows])
        tokens, logprobs = sample(logits, random, table.sharpening(rows, column))
        table.tokens[rows, column] = tokens
        table.logprobs[rows, column] = logprobs
        stopped = (tokens.unsqueeze(1) == table.stop_ids[rows]).any(1) & (column >= table.earliest[rows])
        wrong = logprobs.isnan()
        ended = (stopped | (column >= table.limits[rows]) | wrong).nonzero().squeeze(1)
        by_token = zip((ended + rows.start).tolist(), stopped[ended].tolist(), strict=True)
        reasons = {row: "stop" if stop else "length" for row, stop in by_token}
        self.counters.sampling_s += time.perf_counter() - started
        self.counters.generated_tokens += rows.stop - rows.start
        if reasons and bool(wrong.any()):
            self._refuse(rows.start + int(wrong.nonzero()[0]))
        if table.needs().stop_texts:
            running = (row for row in range(rows.start, rows.stop) if reasons.get(row) != "stop")
            reasons |= {row: "stop" for row in running if self._hits_stop_text(row)}
        return self._retire(sorted(reasons.items()))

    def _refuse(self, row: int) -> None:
        raise WorkerError(
            0, "generate",
            f"the logits of request {self.table.rows[row].state.request.request_id} are not finite at weights version "
            f"{self.version}; the policy has diverged: look at actor/grad_norm, lower the learning rate, or check "
            f"the loaded weights",
        )  # fmt: skip

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
        rows = [row for row, _ in ended]
        low = min(table.rows[row].first for row in rows)
        made = (values[rows, low : self.column + 1].tolist() for values in (table.tokens, table.logprobs))
        for (row, reason), tokens, logprobs in zip(ended, *made, strict=True):
            entry = table.rows[row]
            own = slice(entry.first - low, None)
            completion = Completion(tokens[own], logprobs[own], reason, (entry.first_version, self.version))
            entry.state.finish(entry.sample, completion)
            if entry.state.done:
                finished.append(entry.state)
        window = Window(self.column, self.low, table.starts, self.ragged)
        sources, targets = table.compact(rows)
        self.decoder.move(sources, targets, table.count, window)
        if self.held:
            self._release()
        self._measure()
        return finished

    def _release(self) -> None:
        """Free the slots of prompts that no row continues and no request waits for."""
        used = {id(row.prompt) for row in self.table.rows}
        for slot in reversed(range(len(self.held))):
            prompt = self.held[slot]
            if id(prompt) in used or (prompt.version == self.version and self.queue.has(prompt.tokens)):
                continue
            self.decoder.prompts.drop(slot)
            last = self.held.pop()
            if last is not prompt:
                self.held[slot] = last

    def _measure(self) -> None:
        """Where the rows' own columns begin, and which prompts they share."""
        count = self.table.count
        if count:
            owns = self.table.owns[:count]
            self.low, high = int(owns.min()), int(owns.max())
            self.ragged = high != self.low
        self.sharing = self._places() if self.held else None

    def _places(self) -> Sharing | None:
        slots = {id(prompt): slot for slot, prompt in enumerate(self.held)}
        counts = [0] * (len(slots) + 1)
        places = []
        for row in self.table.rows:
            slot = slots.get(id(row.prompt), len(slots))
            places.append((slot, counts[slot] if row.prompt else 0))
            counts[slot] += 1
        each = max(counts[:-1])
        if not each:
            return None
        return Sharing(torch.tensor([slot * each + number for slot, number in places]), each, len(slots))
