"""The predictions of `verl plan --schedule` against runs: six settings, synchronous and asynchronous in turns.

    python benchmarks/schedule.py [--pairs 5] [--only NAME] [--json benchmarks/results/schedule.json]

A pair is a synchronous run and an asynchronous one of the same seed, on the same cores: one thread a process, one
process a core; which comes first alternates. The synchronous run predicts by the code of the command, which takes its
last 20 steps; both arms are measured over the same steps, from ledger file to ledger file.
The figures are medians over the pairs. The results are written after each pair, and a later call goes on from them
(`--anew`: begins again). Alone on two cores a setting takes about ten minutes.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support.record import save
from support.schedule_bars import Pair, Summary, rate, summarise
from support.schedule_runs import SETTINGS, Setting, moments, overrides, prepare, train

from verl.commands.plan.observed_steps import MOST_STEPS, observe
from verl.commands.plan.schedule import plan_schedule
from verl.observe.trackers import read_metrics

LAST = 10  # steps whose mean reward is the final one
RESULTS = Path(__file__).parent / "results" / "schedule.json"
SCORE = "critic/score/mean"


def measure_pair(setting: Setting, seed: int, cores: list[int]) -> Pair:
    """One run of each arm."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "setting"
        prepare(folder, setting)
        arms = {"sync": setting.sync(), "async": setting.asynchronous()}
        for arm in ("sync", "async") if seed % 2 else ("async", "sync"):
            train(folder, overrides(folder, setting, arm, seed, arms[arm]), cores, folder / f"{arm}.log")
        run = observe(str(folder / "sync"))
        plan = plan_schedule(run, setting.ages())
        sync = plan.predictions[0]
        found = next(p for p in plan.predictions if p.schedule.name == setting.schedule)
        return Pair(
            seed,
            statistics.mean(1 / outcome.step_s for outcome in sync.outcomes),
            statistics.mean(1 / outcome.step_s for outcome in found.outcomes),
            statistics.mean(found.speedups),
            rate(moments(folder / "sync"), setting.steps - MOST_STEPS),
            rate(moments(folder / "async"), setting.steps - MOST_STEPS),
            final_reward(folder, "sync", setting.steps),
            final_reward(folder, "async", setting.steps),
            plan.verdict,
            time.time(),
        )


def final_reward(folder: Path, run: str, steps: int) -> float:
    records = read_metrics(folder / "metrics" / "schedule" / f"{run}.jsonl")
    return statistics.mean(r["data"][SCORE] for r in records if r["step"] > steps - LAST)


def read_pairs(path: Path, anew: bool) -> dict[str, list[Pair]]:
    """The pairs by setting of an earlier call; those of a setting that was another one are left out."""
    rows = json.loads(path.read_text())["settings"] if path.is_file() and not anew else []
    definitions = {setting.name: as_json(setting) for setting in SETTINGS}
    return {
        row["setting"]["name"]: [Pair(**pair) for pair in row["pairs"]]
        for row in rows
        if row["setting"] == definitions.get(row["setting"]["name"])
    }


def as_json(setting: Setting) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(setting)))


def write(path: Path, pairs: dict[str, list[Pair]], cores: list[int]) -> None:
    rows = [
        {
            "setting": as_json(setting),
            "summary": asdict(summarise(pairs[setting.name], setting.helps)),
            "pairs": [asdict(pair) for pair in pairs[setting.name]],
        }
        for setting in SETTINGS
        if pairs.get(setting.name)
    ]
    save(path, {"cores": cores, "settings": rows})


def show(name: str, summary: Summary) -> None:
    words = {True: "yes", False: "NO", None: "-"}
    print(
        f"{name:30} {summary.pairs:5} {summary.predicted_over_measured['sync']:6.2f} "
        f"{summary.predicted_over_measured['async']:6.2f} {summary.predicted_speedup:9.2f} "
        f"{summary.measured_speedup:9.2f} {summary.reward['sync']:7.3f} {summary.reward['async']:6.3f}   "
        + ", ".join(f"{bar} {words[held]}" for bar, held in summary.bars.items()),
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", choices=[setting.name for setting in SETTINGS])
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--anew", action="store_true", help="forget the pairs of earlier calls")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed, and this process may use one")
    pairs = read_pairs(args.json, args.anew)
    print(f"{'':30} {'':5} predicted/measured   speed-up           reward", flush=True)
    print(f"{'setting':30} {'pairs':>5} {'sync':>6} {'async':>6} predicted  measured    sync  async   bars", flush=True)
    held = True
    for setting in SETTINGS:
        if args.only not in (None, setting.name):
            continue
        of_setting = pairs.setdefault(setting.name, [])
        while len(of_setting) < args.pairs:
            of_setting.append(measure_pair(setting, len(of_setting) + 1, cores[: setting.devices]))
            write(args.json, pairs, cores)
        summary = summarise(of_setting, setting.helps)
        show(setting.name, summary)
        held = held and False not in summary.bars.values()
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
