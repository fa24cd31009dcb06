"""A reward function that scores several answers in one call."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from verl.rewards.bounded_calls import Calls, Outcome

PLURALS = {
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}


class BatchCalls:
    """One call of `calls` for all answers of a run: it gets lists, and `kwargs`, and returns one result per answer."""

    def __init__(self, calls: Calls, kwargs: Mapping[str, Any]):
        self._calls, self._kwargs = calls, kwargs

    async def run(self, all_kwargs: Sequence[dict[str, Any]]) -> list[Outcome]:
        if not all_kwargs:
            return []
        lists = {plural: [kwargs[name] for kwargs in all_kwargs] for name, plural in PLURALS.items()}
        outcome = (await self._calls.run([{**lists, **self._kwargs}]))[0]
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
