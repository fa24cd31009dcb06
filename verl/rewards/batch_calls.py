"""A reward function that scores several answers in one call."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from verl.rewards.calls import PLURALS, Calls, Outcome


class BatchCalls:
    """One call of `calls` for all answers that come together: it gets lists, and returns one result per answer."""

    def __init__(self, calls: Calls):
        self._calls = calls

    async def call(self, all_kwargs: Sequence[dict[str, Any]]) -> list[Outcome]:
        if not all_kwargs:
            return []
        lists = {plural: [kwargs[name] for kwargs in all_kwargs] for name, plural in PLURALS.items()}
        outcome = (await self._calls.call([lists]))[0]
        if outcome.error is not None:
            outcomes = [Outcome(error=outcome.error)] * len(all_kwargs)
        else:
            outcomes = _one_each(outcome.result, len(all_kwargs))
        outcomes[0] = replace(outcomes[0], earlier=outcome.earlier)  # the attempts of one call are counted once
        return outcomes


def _one_each(results: Any, count: int) -> list[Outcome]:
    try:
        number: int | None = len(results)
    except TypeError:
        number = None
    if number == count and not isinstance(results, str | bytes | Mapping | Set):  # a set has no order
        return [Outcome(result=result) for result in results]
    found = f"{number} results" if number is not None else f"{results!r:.80}"
    kind = type(results).__name__
    wrong = ValueError(f"it returned a {kind} with {found} for {count} answers; return a list with one result for each")
    return [Outcome(error=wrong)] * count
