"""Scheduler state: the waiting requests, and the table of running sequences."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl.data.random_streams import stream_key
from verl.models.decoder.prompt_cache import PromptSharing
from verl.workers.rollout.base import Alternatives, Completion, GenerationRequest
from verl.workers.rollout.native.sampling import SamplingTensors, add_bias, most_likely, penalise, sample


@dataclass
class RequestState:
    """A request in flight: the samples that wait for a row, by number, and the completions that are done."""

    request: GenerationRequest
    submitted_version: int
    stop_ids: tuple[int, ...]
    waiting: list[int] = field(init=False)
    completions: dict[int, Completion] = field(init=False)

    def __post_init__(self) -> None:
        self.completions = {n: done for n, done in enumerate(self.request.sampled) if not done.is_unfinished}
        self.waiting = [n for n in range(self.request.sampling.n) if n not in self.completions]

    def before(self, sample: int) -> Completion:
        """The tokens that were sampled of it before the request came."""
        sampled = self.request.sampled
        return sampled[sample] if sampled else Completion.empty(self.submitted_version)

    @property
    def longest(self) -> int:
        """Tokens of the prompt, and of the longest sample that waits."""
        return len(self.request.prompt_ids) + max((len(self.before(n).token_ids) for n in self.waiting), default=0)

    @property
    def done(self) -> bool:
        return len(self.completions) == self.request.sampling.n

    def finish_waiting(self) -> None:
        """Each sample that waits ends with the tokens it came with."""
        self.completions |= {sample: self.before(sample) for sample in self.waiting}
        self.waiting = []

    def result(self) -> list[Completion]:
        return [self.completions[i] for i in range(self.request.sampling.n)]


@dataclass(eq=False)
class CachedPrompt:
    """A prompt whose KV cache is in a slot of the decoder; present and later sequences of the prompt share it."""

    tokens: list[int]
    version: int
    logits_V: Tensor  # after its last token


@dataclass
class RunningSequence:
    """One running completion. Columns are those of the decoder's KV cache."""

    state: RequestState
    sample: int
    first_column: int  # column of its first generated token
    cached_prompt: CachedPrompt | None  # None if its prompt is in its own row
    alternatives: list[Alternatives] | None  # of each token so far, if the request asks for them
    starts: list[tuple[int, int]]  # (version, tokens sampled before it), ascending

    @classmethod
    def going_on(cls, state: RequestState, sample: int, column: int, cached: CachedPrompt | None) -> "RunningSequence":
        """A sample with the tokens before it came, of which the first is in `column`."""
        before, starts, count = state.before(sample), list[tuple[int, int]](), 0
        for version, num_tokens in before.all_segments:
            starts.append((version, count))
            count += num_tokens
        return cls(state, sample, column, cached, before.alternatives and [*before.alternatives], starts)

    def note_version(self, version: int, num_tokens: int) -> None:
        """From the token with index `num_tokens` on, `version` samples."""
        if self.starts and self.starts[-1][1] == num_tokens:
            self.starts.pop()
        if not self.starts or self.starts[-1][0] != version:
            self.starts.append((version, num_tokens))

    def completion(self, tokens: list[int], logprobs: list[float], reason: str) -> Completion:
        """The answer, with the versions that sampled its tokens."""
        ends = [start for _, start in self.starts[1:]] + [len(tokens)]
        parts = [(v, end - start) for (v, start), end in zip(self.starts, ends, strict=True) if end > start]
        return Completion.of(tokens, logprobs, reason, parts, self.alternatives and [*self.alternatives])


@dataclass
class PrefillRequest:
    """One prompt and the (state, sample) pairs that continue it."""

    prompt: list[int]  # ends with the tokens so far of a sample that goes on, which is the only one
    samples: list[tuple[RequestState, int]]
    cached_prompt: CachedPrompt | None = None  # if set, it needs no prefill

    @property
    def goes_on(self) -> bool:
        state, sample = self.samples[0]
        return bool(state.before(sample).token_ids)

    @property
    def is_group(self) -> bool:
        return len(self.samples) > 1 or self.samples[0][0].request.sampling.n > 1


@dataclass(frozen=True)
class PrefillBatch:
    """Prompts that are scheduled together: prefilled in one forward pass, or all cached."""

    requests: list[PrefillRequest]
    shares_prompts: bool  # the prompts are in slots of the prompt cache, or will be

    @property
    def is_cached(self) -> bool:
        return self.requests[0].cached_prompt is not None

    @property
    def prompts(self) -> list[list[int]]:
        return [request.prompt for request in self.requests]

    @property
    def repeats(self) -> list[int]:
        return [len(request.samples) for request in self.requests]


class WaitingQueue:
    """Requests in order of arrival; a group is scheduled together, with one prefill per distinct prompt."""

    def __init__(self) -> None:
        self._states: deque[RequestState] = deque()

    def __len__(self) -> int:
        return sum(len(state.waiting) for state in self._states)

    def push(self, *states: RequestState) -> None:
        self._states.extend(states)

    def remove(self, request_id: int | None) -> list[RequestState]:
        """Remove and return one waiting request, or all."""
        removed: list[RequestState] = []
        states, self._states = self._states, deque()
        for state in states:
            (removed if request_id in (None, state.request.request_id) else self._states).append(state)
        return removed

    def has(self, prompt: list[int]) -> bool:
        return any(state.request.prompt_ids == prompt for state in self._states)

    def longest_prompt(self) -> int:
        return max((state.longest for state in self._states), default=0)

    def take(self, free: int, min_free: int, same_length: bool) -> list[PrefillRequest]:
        """Prompts to schedule now; none while `free` is less than `min_free` and less than the waiting samples."""
        if free < min(min_free, len(self)) or not self._states:
            return []
        groups: dict[tuple[Any, ...], PrefillRequest] = {}
        length, still_waiting = 0, deque[RequestState]()
        while self._states and free:
            state = self._states.popleft()
            fresh, candidates, state.waiting = tuple(state.request.prompt_ids), state.waiting, []
            for number in candidates:
                tokens = state.before(number).token_ids
                length = length or len(fresh) + len(tokens)
                if not free or (same_length and len(fresh) + len(tokens) != length):
                    state.waiting.append(number)
                    continue
                key = (id(state), number) if tokens else fresh
                request = groups.setdefault(key, PrefillRequest(state.request.prompt_ids + tokens, []))
                request.samples.append((state, number))
                free -= 1
            if state.waiting:
                still_waiting.append(state)
        self._states = still_waiting + self._states
        return sorted(groups.values(), key=lambda request: len(request.prompt))


@dataclass(frozen=True)
class SamplingSteps:
    """Which optional sampling steps at least one row needs."""

    temperature: bool
    greedy: bool
    top_k: bool
    top_p: bool
    min_p: bool
    min_tokens: int
    stop_texts: bool
    changed_logits: bool
    top_logprobs: bool


class RowMoves(NamedTuple):
    """Row `sources[i]` moved to row `targets[i]`."""

    sources: list[int]
    targets: list[int]


class RowTable:
    """State of the running sequences as tensors, one row per sequence; rows 0..count-1 are in use."""

    def __init__(self, rows: int, columns: int, vocab_size: int, device: torch.device):
        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.vocab_size, self.device = vocab_size, device
        self._sampling_steps: SamplingSteps | None = None
        # Positions of a row count from `starts`; its own columns begin at `own_starts`, later if its prompt is shared.
        self.integers = ints(7, rows)
        (
            self.starts,
            self.own_starts,
            self.first_columns,
            self.last_columns,
            self.min_stop_columns,
            self.top_k,
            self.keys,
        ) = self.integers.unbind(0)
        self.temperature, self.top_p = torch.ones(2, rows, device=device).unbind(0)
        self.greedy = torch.zeros(rows, dtype=torch.bool, device=device)
        self.stop_ids = torch.full((rows, 1), -1, device=device)
        self.tokens = ints(rows, columns)
        self.logprobs = torch.zeros(rows, columns, device=device)
        self.rows: list[RunningSequence] = []

    @property
    def count(self) -> int:
        return len(self.rows)

    def _columns(self) -> list[Tensor]:
        return [
            self.integers.T, self.temperature, self.top_p, self.greedy, self.stop_ids, self.tokens, self.logprobs
        ]  # fmt: skip

    def grow(self, rows: int) -> None:
        """Enlarge the table to `rows` rows; rows in use keep their values."""
        grown = RowTable(rows, self.tokens.shape[1], self.vocab_size, self.device)
        grown._widen_stop_ids(self.stop_ids.shape[1])
        for new, old in zip(grown._columns(), self._columns(), strict=True):
            new[: len(old)] = old
        grown.rows = self.rows
        self.__dict__ = grown.__dict__

    def _widen_stop_ids(self, width: int) -> None:
        extra = width - self.stop_ids.shape[1]
        if extra > 0:
            self.stop_ids = torch.nn.functional.pad(self.stop_ids, (0, extra), value=-1)

    def append(self, requests: list[PrefillRequest], column: int, version: int) -> None:
        """Add rows whose prompts end before `column`; `column` gets their first tokens."""
        self._sampling_steps = None
        entering: list[RunningSequence] = []
        for request in requests:
            for state, number in request.samples:
                before = state.before(number)
                first, place = column - len(before.token_ids), self.count + len(entering)
                if first < column:
                    self.tokens[place, first:column] = torch.tensor(before.token_ids, device=self.device)
                    self.logprobs[place, first:column] = torch.tensor(before.logprobs, device=self.device)
                entering.append(RunningSequence.going_on(state, number, first, request.cached_prompt))
                entering[-1].note_version(version, len(before.token_ids))
        rows, params = slice(self.count, self.count + len(entering)), [row.state.request.sampling for row in entering]
        integers = []
        for row, sampling in zip(entering, params, strict=True):
            first = row.first_column
            start = first - len(row.state.request.prompt_ids)
            last_column, min_stop_column = first + sampling.max_tokens - 1, first + sampling.min_tokens
            own_start = first if row.cached_prompt else start
            top_k = sampling.top_k if sampling.top_k > 0 else self.vocab_size
            key = stream_key(sampling.seed, row.state.request.stream_id, row.sample)
            integers.append([start, own_start, first, last_column, min_stop_column, top_k, key])
        self.integers[:, rows] = torch.tensor(integers).T
        self.top_p[rows] = torch.tensor([sampling.top_p for sampling in params])
        self.greedy[rows] = torch.tensor([sampling.temperature == 0 for sampling in params])
        self.temperature[rows] = torch.tensor([sampling.temperature or 1.0 for sampling in params])
        stops = [row.state.stop_ids for row in entering]
        self._widen_stop_ids(max(map(len, stops)))
        width = self.stop_ids.shape[1]
        self.stop_ids[rows] = torch.tensor([[*ids, *[-1] * (width - len(ids))] for ids in stops])
        self.rows += entering

    def so_far(self, number: int, column: int) -> Completion:
        """The unfinished answer of a row whose newest token is in `column`."""
        sampled = slice(self.rows[number].first_column, column + 1)
        tokens, logprobs = self.tokens[number, sampled].tolist(), self.logprobs[number, sampled].tolist()
        return self.rows[number].completion(tokens, logprobs, "aborted")

    def compact(self, finished: list[int]) -> RowMoves:
        """Remove rows and move the last rows into their places."""
        removed, count = set(finished), self.count - len(finished)
        sources = [row for row in range(count, self.count) if row not in removed]
        targets = [row for row in finished if row < count]
        if sources:
            target_rows, source_rows = (torch.tensor(rows, device=self.device) for rows in (targets, sources))
            for tensor in self._columns():
                tensor.index_copy_(0, target_rows, tensor.index_select(0, source_rows))
            for source, target in zip(sources, targets, strict=True):
                self.rows[target] = self.rows[source]
        del self.rows[count:]
        return RowMoves(sources, targets)

    def shift(self, low: int, column: int, by: int) -> None:
        """Move columns low..column by `by`."""
        count, old, new = self.count, slice(low, column + 1), slice(low + by, column + 1 + by)
        for tensor in (self.starts, self.own_starts, self.first_columns, self.last_columns, self.min_stop_columns):
            tensor[:count] += by
        for tensor in (self.tokens, self.logprobs):
            tensor[:count, new] = tensor[:count, old].clone()
        for row in self.rows:
            row.first_column += by

    def needed_sampling_steps(self) -> SamplingSteps:
        """Steps that the rows in use need; may include steps of rows removed since the last `append`."""
        if self._sampling_steps is None:
            params = {id(p): p for p in map(attrgetter("state.request.sampling"), self.rows)}.values()
            self._sampling_steps = SamplingSteps(
                temperature=any(p.temperature not in (0, 1) for p in params),
                greedy=any(p.temperature == 0 for p in params),
                top_k=any(0 < p.top_k < self.vocab_size for p in params),
                top_p=any(p.top_p < 1 for p in params),
                min_p=any(p.min_p > 0 for p in params),
                min_tokens=max((p.min_tokens for p in params), default=0),
                stop_texts=any(p.stop for p in params),
                changed_logits=any(p.changes_logits for p in params),
                top_logprobs=any(p.top_logprobs for p in params),
            )
        return self._sampling_steps

    def sample(self, logits_BV: Tensor, uniforms_B: Tensor, rows: slice, column: int) -> tuple[Tensor, Tensor]:
        """Tokens for `column` and their log-probs; a bias and penalties choose the token and leave its log-prob."""
        settings = self.sampling_tensors(rows, column)
        if not self.needed_sampling_steps().changed_logits:
            return sample(logits_BV, uniforms_B, settings)
        sampled_BV, changed = (
            logits_BV.float().clone(),
            [row.state.request.sampling.changes_logits for row in self.rows],
        )
        for logits_V, number in zip(sampled_BV, range(rows.start, rows.stop), strict=True):
            row = self.rows[number]
            request = row.state.request
            add_bias(logits_V, request.sampling)
            if request.sampling.has_penalties:
                prompt = torch.tensor(request.prompt_ids, device=self.device)
                penalise(logits_V, prompt, self.tokens[number, row.first_column : column], request.sampling)
        tokens_B, logprobs_B = sample(sampled_BV, uniforms_B, settings)
        policy_BV = logits_BV.float() if settings.temperature_B is None else logits_BV / settings.temperature_B[:, None]
        policy_B = policy_BV.log_softmax(-1).gather(1, tokens_B[:, None])[:, 0]
        return tokens_B, policy_B.where(torch.tensor(changed[rows], device=self.device), logprobs_B)

    def record_alternatives(self, logits_BV: Tensor, rows: slice) -> None:
        """Append the most likely tokens of the next position to the rows of `rows` that ask for them."""
        for logits_V, row in zip(logits_BV, self.rows[rows], strict=True):
            params = row.state.request.sampling
            if params.top_logprobs:
                row.alternatives = row.alternatives or []
                row.alternatives.append(most_likely(logits_V, params.temperature or 1.0, params.top_logprobs))

    def sampling_tensors(self, rows: slice, column: int) -> SamplingTensors:
        """Sampling settings of `rows` for the token in `column`; None for settings that no row needs."""
        sampling_steps, forbidden, min_p = self.needed_sampling_steps(), None, None
        if sampling_steps.min_p:
            min_p = torch.tensor([row.state.request.sampling.min_p for row in self.rows[rows]], device=self.device)
        if sampling_steps.min_tokens:
            forbidden = torch.where((column < self.min_stop_columns[rows]).unsqueeze(1), self.stop_ids[rows], -1)
        return SamplingTensors(
            temperature_B=self.temperature[rows] if sampling_steps.temperature else None,
            greedy_B=self.greedy[rows] if sampling_steps.greedy else None,
            top_k_B=self.top_k[rows] if sampling_steps.top_k else None,
            top_p_B=self.top_p[rows] if sampling_steps.top_p else None,
            min_p_B=min_p,
            forbidden_BK=forbidden,
        )


def prompt_sharing(rows: Sequence[RunningSequence], cached_prompts: Sequence[CachedPrompt]) -> PromptSharing | None:
    """Which rows share which cached prompt; None where no row has one."""
    slots = {id(prompt): slot for slot, prompt in enumerate(cached_prompts)}
    counts = [0] * (len(slots) + 1)
    prompt_places = []
    for row in rows:
        slot = slots.get(id(row.cached_prompt), len(slots))
        prompt_places.append((slot, counts[slot] if row.cached_prompt else 0))
        counts[slot] += 1
    rows_per_slot = max(counts[:-1])
    if not rows_per_slot:
        return None
    return PromptSharing(
        torch.tensor([slot * rows_per_slot + number for slot, number in prompt_places]), rows_per_slot, len(slots)
    )
