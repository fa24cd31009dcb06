"""What the rules of asynchronous training cost: CPU seconds for a million events of groups with a heavy tail.

    python benchmarks/admission.py [--events 1000000] [--batch 512] [--json PATH]

An event is an admission, a finished group, a step or a publish; the bar is 10 s for a million. No group is older than
the largest age in any of them, and without the second rule some are: the run fails otherwise.
"""

import argparse
import sys
import time
from pathlib import Path

from support.admission_events import NoSecondRule, simulate
from support.record import save

from verl.trainer.ppo.sources.admission import DROP, WAIT, AdmissionRules

BAR_S, SIGMA, MAX_LAG = 10.0, 2.5, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results, failed = {}, False
    for name, rules in {
        "wait": AdmissionRules(args.batch, 1.0, MAX_LAG, WAIT),
        "drop": AdmissionRules(args.batch, 1.0, MAX_LAG, DROP),
        "no second rule": NoSecondRule(args.batch, 1.0, MAX_LAG),
    }.items():
        start = time.process_time()
        found = simulate(rules, args.events, SIGMA)
        seconds, oldest = time.process_time() - start, max(found.lags)
        mean = sum(found.lags) / len(found.lags)
        results[name] = {"cpu_s": seconds, "events": found.events, "mean_age": mean, "largest_age": oldest}
        print(f"{name:<15} {seconds:6.2f} s for {found.events:,} events, mean age {mean:.3f}, largest {oldest}")
        failed |= seconds > BAR_S or (oldest > MAX_LAG) != (name == "no second rule")
    if args.json:
        save(args.json, {"batch": args.batch, "rules": results})
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
