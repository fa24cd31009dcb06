"""Findings about a reward from its scores. docs/rewards/check_reward.md has the rules."""

from collections.abc import Sequence

import numpy as np

from verl.commands.check_data.checks import found, short
from verl.commands.check_reward.answers import CUT, EMPTY, GARBAGE, GOLD, OTHER, Answer, Call
from verl.commands.check_reward.passes import FEWEST_MEMORY_CALLS, is_late
from verl.observe.check_report import GOOD, SKIPPED, WARNING, WRONG, CheckResult
from verl.rewards.base import Score
from verl.rewards.canary import has_value

LENGTH_ALONE = 0.95  # rank correlation of score and length above which nothing else seems to count
LEAK_MB = 10.0  # per 1,000 calls
Scored = list[tuple[Answer, Score]]


def shown(answer: Answer, score: Score) -> str:
    return f"{answer.kind} answer {short(answer.given.solution_str, 60)!r} got {value_text(score)}"


def value_text(score: Score) -> str:
    return score.error or ("no score" if score.value is None else f"{score.value:g}")


def value(score: Score) -> float:
    return 0.0 if score.value is None else score.value


def check_gold(scored: Scored, note: str) -> list[CheckResult]:
    """Gold answers against each kind of bad ones. Wrong: not higher in more than half of the rows, net."""
    golds = {id(answer.row): (answer, score) for answer, score in scored if answer.kind == GOLD and has_value(score)}
    if not golds:
        text = "no gold answer has a score; name the gold answers of the rows: --gold-key extra_info.KEY"
        failed = any(answer.kind == GOLD for answer, _ in scored)
        return [CheckResult("gold answers", WRONG if failed else SKIPPED, text, note=note)]
    results = []
    for kind in (EMPTY, GARBAGE, OTHER, CUT):
        bad = [(*golds[id(a.row)], a, s) for a, s in scored if a.kind == kind and has_value(s) and id(a.row) in golds]
        if not bad:
            results.append(CheckResult(f"gold above {kind} answers", SKIPPED, "there are none with a score"))
            continue
        high, low = np.array([value(pair[1]) for pair in bad]), np.array([value(pair[3]) for pair in bad])
        lower = int((high < low).sum())
        unlike = [(a.row.where, f"{shown(g, one)}, {shown(a, s)}") for g, one, a, s in bad if not value(one) > value(s)]
        level = WRONG if kind != CUT and (high > low).sum() - lower <= len(bad) / 2 else WARNING
        text = "gold answers do not score higher" + ", as if the sign were wrong" * (lower > len(bad) / 2)
        means = f"means {high.mean():.3g} and {low.mean():.3g}" + f"; gold answers: {note}" * (kind == EMPTY)
        results.append(found(f"gold above {kind} answers", unlike, len(bad), text, level, means))
    return results


def check_failures(scored: Scored, level: str) -> list[CheckResult]:
    """Calls that raise, return what is no score, or take too long; abstentions."""
    failed = [(a.row.where, shown(a, s)) for a, s in scored if s.error and not is_late(s)]
    late = [(a.row.where, shown(a, s)) for a, s in scored if is_late(s)]
    abstained = [(a.row.where, f"abstains from {a.kind} answer") for a, s in scored if s.abstained]
    return [
        found("calls that fail", failed, len(scored), "calls fail", level),
        found("calls that take too long", late, len(scored), "calls reach their time limit", level),
        found("abstentions", abstained, len(scored), "answers are left out", WARNING),
    ]


def check_values(scored: Scored) -> list[CheckResult]:
    """Whether scores depend on the answer at all, and on more than its length; parts that are missing sometimes."""
    some = [(a, s) for a, s in scored if has_value(s)]
    values = np.array([s.value for _, s in some], dtype=float)
    lengths = np.array([len(a.given.solution_str) for a, _ in some], dtype=float)
    constant = len(some) > 1 and bool((values == values[0]).all())
    rho = 0.0 if constant or len(some) < 10 or len(set(lengths)) < 5 else rank_correlation(values, lengths)
    examples = [(a.row.where, f"{shown(a, s)} ({len(a.given.solution_str)} characters)") for a, s in some]
    results = [
        CheckResult("scores that differ", WRONG, f"all {len(some)} answers got {values[0]:g}", examples[:3])
        if constant
        else CheckResult("scores that differ", GOOD, f"{len(set(values))} different scores"),
        CheckResult(
            "scores beyond length", WRONG, "scores follow length alone", examples[:10], f"correlation {rho:.2f}"
        )
        if abs(rho) > LENGTH_ALONE
        else CheckResult("scores beyond length", GOOD, f"rank correlation with length {rho:.2f}"),
    ]
    names = sorted(set[str]().union(*(s.extra for _, s in some)))
    missing = [(a.row.where, f"{shown(a, s)} without {n}") for n in names for a, s in some if n not in s.extra]
    return [*results, found("parts of every score", missing, len(some) * len(names), "parts are missing", WARNING)]


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's; equal values share the mean of their ranks."""
    ranks = []
    for values in (one, other):
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts + 1) / 2)[place])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def check_same(
    check: str, answers: Sequence[Answer], first: Sequence[Score], again: Sequence[Score], level: str
) -> CheckResult:
    """Scores of the same answers that differ, and how far at most."""
    pairs = [(a, f, s) for a, f, s in zip(answers, first, again, strict=False) if is_change(f, s)]
    examples = [(a.row.where, f"{shown(a, f)}, then {value_text(s)}") for a, f, s in pairs]
    sizes = [abs(value(f) - value(s)) for _, f, s in pairs if not f.error and not s.error]
    text = f"answers get another score (by {max(sizes, default=0):.3g} at most)"
    return found(check, examples, len(again), text, level)


def is_change(one: Score, other: Score) -> bool:
    undecided = one.extra.get("undecided") or other.extra.get("undecided")
    return one.value != other.value and not undecided


def check_time(answers: Sequence[Answer], calls: Sequence[Call], limit_s: float | None) -> CheckResult:
    """How long calls take, alone; a warning where one takes half of reward.timeout_s."""
    times = sorted(seconds for _, seconds in calls)
    numbers = (("median", times[len(times) // 2]), ("p99", times[len(times) * 99 // 100]), ("largest", times[-1]))
    note = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in numbers)
    rows = [(a.row.where, shown(a, s), t) for a, (s, t) in zip(answers, calls, strict=False)]
    slow = [(where, f"{text} after {t:.3g} s") for where, text, t in rows if limit_s and t > limit_s / 2]
    slow_text = f"{len(slow)} of them take more than half of reward.timeout_s={limit_s}; " if slow else ""
    return CheckResult(
        "time of a call", WARNING if slow else GOOD, f"{len(calls):,} calls", slow[:10], slow_text + note
    )


def check_memory(calls: int, growth_mb: float) -> CheckResult:
    """How much this process grows; where few calls fit the time, nothing is said."""
    if calls < FEWEST_MEMORY_CALLS:
        return CheckResult("memory", SKIPPED, f"only {calls} calls fit the time of this check")
    level = WARNING if growth_mb > LEAK_MB else GOOD
    return CheckResult("memory", level, f"{calls:,} calls", note=f"{growth_mb:+.1f} MB per 1,000 calls")
