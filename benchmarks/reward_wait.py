"""What a reward that sleeps costs a step, beside the sleep divided by its concurrency; the bar is 1.2 times that.

    python benchmarks/reward_wait.py [--json PATH] [--answers 512] [--sleep 1.0] [--only NAME ...]

The answers come in groups of 8, as those of a step do, here all at once. The clock runs from the
first call to the last score; processes have started before, as after the first step of a run.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.record import save

from verl.config import load_config
from verl.rewards.base import Reward, RewardInput
from verl.rewards.reward_setup import build_reward
from verl.rewards.scoring_pool import end_scoring_processes

BAR, GROUP = 1.2, 8
PLAIN = "import time\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
PLAIN += "    time.sleep({sleep})\n    return 1.0\n"
ASYNC = "import asyncio\nasync def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
ASYNC += "    await asyncio.sleep({sleep})\n    return 1.0\n"
BATCH = "import time\ndef compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n"
BATCH += "    time.sleep({sleep})\n    return [1.0] * len(solution_strs)\n"
# (function, what the command line says, calls at once; None: all, calls per group)
CASES: dict[str, tuple[str, tuple[str, ...], int | None, int]] = {
    "threads": (PLAIN, ("num_workers=64",), 64, GROUP),
    "async": (ASYNC, (), None, GROUP),
    "rate_limited": (PLAIN, ("reward_manager.name=rate_limited", "max_concurrent=64"), 64, GROUP),
    "rate_limited_async": (ASYNC, ("reward_manager.name=limit", "max_concurrent=64"), 64, GROUP),
    "remote": (PLAIN, ("reward_manager.name=remote", "num_workers=16"), 16, GROUP),
    "prime": (PLAIN, ("reward_manager.name=prime", "num_workers=16"), 16, GROUP),
    "batch": (BATCH, ("reward_manager.name=batch", "num_workers=16"), 16, 1),
}


async def score_all(reward: Reward, groups: int, size: int = GROUP) -> None:
    """Score `groups` of `size` answers at once."""
    answers = [RewardInput("toy", f"answer {i}", "7", {"index": i}) for i in range(size)]
    found = await asyncio.gather(*(reward.score(answers) for _ in range(groups)))
    assert all(one.value == 1.0 for scores in found for one in scores)


def measure(function: str, overrides: Sequence[str], answers: int, sleep_s: float, warm_up: int) -> dict[str, float]:
    """Seconds on the clock and of the processor."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mine.py").write_text(function.format(sleep=sleep_s))
        path = f"reward.custom_reward_function.path={folder}/mine.py"
        reward = build_reward(load_config([path, "trainer.runtime=inline", *(f"reward.{o}" for o in overrides)]), None)  # type: ignore[arg-type]
        asyncio.run(score_all(reward, warm_up, 1))  # starts threads and processes
        start, cpu = time.perf_counter(), time.process_time()
        asyncio.run(score_all(reward, answers // GROUP))
        taken = {"clock_s": time.perf_counter() - start, "processor_s": time.process_time() - cpu}
        end_scoring_processes()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--answers", type=int, default=512, help="of a step (512)")
    parser.add_argument("--sleep", type=float, default=1.0, help="seconds of one call (1)")
    parser.add_argument("--only", nargs="+", default=[*CASES], help="names (all)")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for name in options.only:
        function, overrides, at_once, per_group = CASES[name]
        calls = options.answers // GROUP * per_group
        taken = measure(function, overrides, options.answers, options.sleep, min(at_once or 1, calls))
        ideal_s = options.sleep * calls / min(at_once or calls, calls)
        ratio = taken["clock_s"] / ideal_s
        figures[name] = {**taken, "calls_at_once": at_once or calls, "ideal_s": ideal_s, "ratio": ratio, "bar": BAR}
        figures[name]["ok"] = ratio <= BAR
        print(
            f"{name:20} {taken['clock_s']:7.2f} s, ideal {ideal_s:6.2f} s: {ratio:.3f} x (bar {BAR}); "
            f"processor {taken['processor_s']:.2f} s",
            flush=True,
        )
    if options.json:
        save(options.json, {"answers": options.answers, "sleep_s": options.sleep, "reward_wait": figures})
    print(json.dumps({name: round(one["ratio"], 3) for name, one in figures.items()}))


if __name__ == "__main__":
    main()
