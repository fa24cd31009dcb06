"""A sample of which the tokens come one by one, or in parts, under one version of the weights or several."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from verl.workers.rollout.base import Alternatives, Completion


@dataclass(eq=False)
class PartialAnswer:
    """One sample so far, and the versions that sampled its tokens."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens), versions ascending
    stop_reason: str | None = None  # None: unfinished
    alternatives: list[Alternatives] = field(default_factory=list)

    def add_token(self, token: int, logprob: float, version: int) -> None:
        """Append what `version` has sampled."""
        self._append((token,), (logprob,), ((version, 1),))

    def add(self, part: Completion) -> None:
        """Append what the engine has sampled; an aborted part leaves the answer unfinished."""
        self.alternatives += part.alternatives or []
        self._append(part.token_ids, part.logprobs, part.all_segments)
        self.stop_reason = None if part.is_unfinished else part.stop_reason

    def _append(self, tokens: Sequence[int], logprobs: Sequence[float], segments: Sequence[tuple[int, int]]) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        for version, count in segments:
            if count and self.segments and self.segments[-1][0] == version:
                self.segments[-1] = (version, self.segments[-1][1] + count)
            elif count:
                self.segments.append((version, count))

    def completion(self, version: int) -> Completion:
        """The whole answer so far; `version` is that of one without tokens."""
        segments, alternatives = self.segments or [(version, 0)], [*self.alternatives] or None
        return Completion.of([*self.tokens], [*self.logprobs], self.stop_reason or "aborted", segments, alternatives)


def joined(first: Completion, rest: Completion) -> Completion:
    """The answer that begins with `first` and goes on with `rest`."""
    whole = PartialAnswer()
    whole.add(first)
    whole.add(rest)
    return whole.completion(rest.policy_version[1])
