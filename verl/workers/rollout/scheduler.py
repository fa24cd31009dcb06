"""Who is decoded next: waiting requests, and the table of running rows."""

from collections import deque
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from verl.workers.rollout.base import Completion, GenerationRequest
from verl.workers.rollout.sampling import Sharpening, stream_key


@dataclass
class RequestState:
    """A request on its way: samples not yet started, and those done."""

    request: GenerationRequest
    submitted_version: int
    stop_ids: tuple[int, ...]
    started: int = 0
    completions: dict[int, Completion] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        return self.request.sampling.n - self.started

    @property
    def done(self) -> bool:
        return len(self.completions) == self.request.sampling.n

    def finish(self, sample: int, completion: Completion) -> None:
        self.completions[sample] = completion

    def result(self) -> list[Completion]:
        return [self.completions[i] for i in range(self.request.sampling.n)]


@dataclass(eq=False)
class HeldPrompt:
    """A prompt whose keys and values lie in a slot of the decoder for all its rows, present and to come."""

    tokens: list[int]
    version: int
    logits_V: Tensor  # after its last token


@dataclass
class Row:
    """One running completion. Columns are those of the decoder's cache."""

    state: RequestState
    sample: int
    first: int  # column of its first generated token
    first_version: int
    prompt: HeldPrompt | None  # where its prompt is shared


@dataclass
class Admission:
    """One prompt and the (state, sample) pairs that continue it."""

    prompt: list[int]
    rows: list[tuple[RequestState, int]]
    held: HeldPrompt | None = None  # it needs no prefill

    @property
    def is_group(self) -> bool:
        return len(self.rows) > 1 or self.rows[0][0].request.sampling.n > 1


@dataclass(frozen=True)
class Part:
    """Admissions that enter in one pass."""

    admissions: list[Admission]
    shared: bool  # their prompts lie in slots, or will

    @property
    def is_held(self) -> bool:
        return self.admissions[0].held is not None

    @property
    def prompts(self) -> list[list[int]]:
        return [a.prompt for a in self.admissions]

    @property
    def repeats(self) -> list[int]:
        return [len(a.rows) for a in self.admissions]


class WaitingQueue:
    """Requests in order of arrival; a group enters together, one computation per distinct prompt."""

    def __init__(self) -> None:
        self._states: deque[RequestState] = deque()

    def __len__(self) -> int:
        return sum(state.waiting for state in self._states)

    def push(self, state: RequestState) -> None:
        self._states.append(state)

    def remove(self, request_id: int | None) -> list[RequestState]:
        """Take out what waits, of one request or of all."""
        gone = [s for s in self._states if request_id is None or s.request.request_id == request_id]
        self._states = deque(s for s in self._states if s not in gone)
        return gone

    def has(self, prompt: list[int]) -> bool:
        return any(state.request.prompt_ids == prompt for state in self._states)

    def longest_prompt(self) -> int:
        return max((len(s.request.prompt_ids) for s in self._states), default=0)

    def take(self, free: int, least: int, same_length: bool) -> list[Admission]:
        """What enters now; nothing while fewer than `least` rows are free and more than that wait."""
        if free < min(least, len(self)) or not self._states:
            return []
        groups: dict[tuple[int, ...], Admission] = {}
        length = len(self._states[0].request.prompt_ids)
        kept: deque[RequestState] = deque()
        while self._states and free:
            state = self._states.popleft()
            prompt = state.request.prompt_ids
            if same_length and len(prompt) != length:
                kept.append(state)
                continue
            count = min(free, state.waiting)
            admission = groups.setdefault(tuple(prompt), Admission(prompt, []))
            admission.rows.extend((state, state.started + i) for i in range(count))
            state.started += count
            free -= count
            if state.waiting:
                kept.append(state)
        self._states = kept + self._states
        return sorted(groups.values(), key=lambda admission: len(admission.prompt))


@dataclass(frozen=True)
class Needs:
    """Which of the costlier sampling steps any row needs."""

    temperature: bool
    greedy: bool
    top_k: bool
    top_p: bool
    min_tokens: int
    stop_texts: bool


class RowTable:
    """What every running row samples with, as tensors over rows; rows 0..count-1 are in use."""

    def __init__(self, rows: int, columns: int, vocab: int, device: torch.device):
        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.vocab, self.device = vocab, device
        self._needs: Needs | None = None
        # A row's positions count from `starts`; its own columns begin at `owns`, later where its prompt is shared.
        self.numbers = ints(7, rows)
        self.starts, self.owns, self.firsts, self.limits, self.earliest, self.top_k, self.keys = self.numbers.unbind(0)
        self.temperature, self.top_p = torch.ones(2, rows, device=device).unbind(0)
        self.greedy = torch.zeros(rows, dtype=torch.bool, device=device)
        self.stop_ids = torch.full((rows, 1), -1, device=device)
        self.tokens = ints(rows, columns)
        self.logprobs = torch.zeros(rows, columns, device=device)
        self.rows: list[Row] = []

    @property
    def count(self) -> int:
        return len(self.rows)

    def _columns(self) -> list[Tensor]:
        return [
            self.numbers.T, self.temperature, self.top_p, self.greedy, self.stop_ids, self.tokens, self.logprobs
        ]  # fmt: skip

    def grow(self, rows: int) -> None:
        """Room for `rows` rows, keeping those in use."""
        wider = RowTable(rows, self.tokens.shape[1], self.vocab, self.device)
        wider._widen_stops(self.stop_ids.shape[1])
        for new, old in zip(wider._columns(), self._columns(), strict=True):
            new[: len(old)] = old
        wider.rows = self.rows
        self.__dict__ = wider.__dict__

    def _widen_stops(self, width: int) -> None:
        extra = width - self.stop_ids.shape[1]
        if extra > 0:
            self.stop_ids = torch.nn.functional.pad(self.stop_ids, (0, extra), value=-1)

    def append(self, admissions: list[Admission], column: int, version: int) -> None:
        """New rows whose prompts end before `column`, where their first tokens will be."""
        self._needs = None
        entering = [Row(state, n, column, version, a.held) for a in admissions for state, n in a.rows]
        rows, params = slice(self.count, self.count + len(entering)), [row.state.request.sampling for row in entering]
        numbers = []
        for row, how in zip(entering, params, strict=True):
            start = column - len(row.state.request.prompt_ids)
            limit, earliest = column + how.max_tokens - 1, column + how.min_tokens
            owns, top_k = column if row.prompt else start, how.top_k if how.top_k > 0 else self.vocab
            key = stream_key(how.seed, row.state.request.request_id, row.sample)
            numbers.append([start, owns, column, limit, earliest, top_k, key])
        self.numbers[:, rows] = torch.tensor(numbers).T
        self.top_p[rows] = torch.tensor([how.top_p for how in params])
        self.greedy[rows] = torch.tensor([how.temperature == 0 for how in params])
        self.temperature[rows] = torch.tensor([how.temperature or 1.0 for how in params])
        stops = [row.state.stop_ids for row in entering]
        self._widen_stops(max(map(len, stops)))
        width = self.stop_ids.shape[1]
        self.stop_ids[rows] = torch.tensor([[*ids, *[-1] * (width - len(ids))] for ids in stops])
        self.rows += entering

    def compact(self, dead: list[int]) -> tuple[list[int], list[int]]:
        """Drop rows; the last ones take their places. Returns (sources, targets) of the moves."""
        gone, count = set(dead), self.count - len(dead)
        sources = [row for row in range(count, self.count) if row not in gone]
        targets = [row for row in dead if row < count]
        if sources:
            to, of = (torch.tensor(rows, device=self.device) for rows in (targets, sources))
            for tensor in self._columns():
                tensor.index_copy_(0, to, tensor.index_select(0, of))
            for source, target in zip(sources, targets, strict=True):
                self.rows[target] = self.rows[source]
        del self.rows[count:]
        return sources, targets

    def shift(self, low: int, column: int, by: int) -> None:
        """Columns low..column move by `by`."""
        count, old, new = self.count, slice(low, column + 1), slice(low + by, column + 1 + by)
        for tensor in (self.starts, self.owns, self.firsts, self.limits, self.earliest):
            tensor[:count] += by
        for tensor in (self.tokens, self.logprobs):
            tensor[:count, new] = tensor[:count, old].clone()
        for row in self.rows:
            row.first += by

    def needs(self) -> Needs:
        """What the rows in use ask for, or those asked for that have left since rows last entered."""
        if self._needs is None:
            params = {id(p): p for p in map(attrgetter("state.request.sampling"), self.rows)}.values()
            self._needs = Needs(
                temperature=any(p.temperature not in (0, 1) for p in params),
                greedy=any(p.temperature == 0 for p in params),
                top_k=any(0 < p.top_k < self.vocab for p in params),
                top_p=any(p.top_p < 1 for p in params),
                min_tokens=max((p.min_tokens for p in params), default=0),
                stop_texts=any(p.stop for p in params),
            )
        return self._needs

    def sharpening(self, rows: slice, column: int) -> Sharpening:
        """Sampling settings of `rows` for the token in `column`; None for what no row needs."""
        needs, forbidden = self.needs(), None
        if needs.min_tokens:
            forbidden = torch.where((column < self.earliest[rows]).unsqueeze(1), self.stop_ids[rows], -1)
        return Sharpening(
            temperature_B=self.temperature[rows] if needs.temperature else None,
            greedy_B=self.greedy[rows] if needs.greedy else None,
            top_k_B=self.top_k[rows] if needs.top_k else None,
            top_p_B=self.top_p[rows] if needs.top_p else None,
            forbidden_BK=forbidden,
        )
