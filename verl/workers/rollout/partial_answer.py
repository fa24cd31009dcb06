"""A sample of which the tokens come one by one, or in parts, under one version of the weights or several."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
        segments = part.segments or ((part.policy_version[1], len(part.token_ids)),)
        self._append(part.token_ids, part.logprobs, segments)
        self.stop_reason = None if part.stop_reason == "aborted" else part.stop_reason

    def _append(self, tokens: Sequence[int], logprobs: Sequence[float], segments: Sequence[Sequence[int]]) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        for version, count in segments:
            if count and self.segments and self.segments[-1][0] == version:
                self.segments[-1] = (version, self.segments[-1][1] + count)
            elif count:
                self.segments.append((version, count))

    def saved(self, running: dict[str, Any] | None = None) -> dict[str, Any]:
        """As JSON values, with what `samples_in_flight` says about the part that the engine samples now."""
        whole = PartialAnswer([*self.tokens], [*self.logprobs], [*self.segments], self.stop_reason)
        if running is not None:
            whole._append(running["tokens"], running["logprobs"], running["segments"])
            whole.stop_reason = None if running["stop_reason"] == "aborted" else running["stop_reason"]
        sampled = {"tokens": whole.tokens, "logprobs": whole.logprobs, "segments": whole.segments}
        return {**sampled, "stop_reason": whole.stop_reason}

    def completion(self, version: int) -> Completion:
        """The whole answer; `version` is that of one without tokens."""
        segments = self.segments or [(version, 0)]
        return Completion(
            self.tokens,
            self.logprobs,
            self.stop_reason or "aborted",
            (segments[0][0], segments[-1][0]),
            self.alternatives or None,
            tuple(segments) if len(segments) > 1 else (),
        )
