"""What `schedule.py` makes of its measurements, and the bars."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FAR_OFF, GAIN, PROMISED = 0.15, 0.9, 1.2  # of a prediction; of a promised speed-up; a speed-up that counts as promised
NO_HELP, HELP = "it will not help", "it helps"


@dataclass(frozen=True)
class Pair:
    """A synchronous run and an asynchronous one with the same seed, one after the other. Rates are steps per second."""

    seed: int
    predicted_sync: float
    predicted_async: float
    predicted_speedup: float
    measured_sync: float
    measured_async: float
    reward_sync: float  # mean of the last steps
    reward_async: float
    verdict: str  # of the plan
    ended: float  # seconds since the epoch

    @property
    def speedup(self) -> float:
        return self.measured_async / self.measured_sync


@dataclass(frozen=True)
class Summary:
    """Medians over the pairs of a setting, and which bars hold; None where the pairs cannot say."""

    pairs: int
    predicted_over_measured: dict[str, float]  # by arm
    predicted_speedup: float
    measured_speedup: float
    reward: dict[str, float]  # mean by arm
    reward_spread: float  # of the synchronous runs
    minutes: float  # from the end of the first pair to that of the last
    bars: dict[str, bool | None]


def summarise(pairs: Sequence[Pair], helps: bool) -> Summary:
    """The figures of a setting, about which the plan should say that asynchronous training `helps`, or does not."""
    arms = {
        "sync": statistics.median(pair.predicted_sync / pair.measured_sync for pair in pairs),
        "async": statistics.median(pair.predicted_async / pair.measured_async for pair in pairs),
    }
    promised = statistics.median(pair.predicted_speedup for pair in pairs)
    measured = statistics.median(pair.speedup for pair in pairs)
    finals = [pair.reward_sync for pair in pairs]
    reward = {"sync": statistics.mean(finals), "async": statistics.mean(pair.reward_async for pair in pairs)}
    said = sum(pair.verdict.startswith(HELP if helps else NO_HELP) for pair in pairs)
    bars: dict[str, bool | None] = {
        "prediction": all(abs(ratio - 1) <= FAR_OFF for ratio in arms.values()),
        "speedup": measured >= GAIN * promised if promised >= PROMISED else None,
        "reward": reward["async"] >= min(finals) if len(pairs) > 1 and promised >= PROMISED else None,
        "verdict": said * 2 > len(pairs),
    }
    minutes = (pairs[-1].ended - pairs[0].ended) / 60
    return Summary(len(pairs), arms, promised, measured, reward, max(finals) - min(finals), minutes, bars)


def rate(moments: Sequence[float], first: int) -> float:
    """Steps per second from the end of step `first` to that of the last; `moments[i]` is the end of step i + 1."""
    return (len(moments) - first) / (moments[-1] - moments[first - 1])
