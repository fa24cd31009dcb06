"""Runs of each kind that have come to step 2, which later versions must resume.

`python -m tests.e2e.started_runs` writes tests/data/started_runs. It was run at commit de2d62de, when FSDP1 was an
engine of its own. Each kind trains three steps (`grpo` on two ranks of FSDP1), and its folder keeps the checkpoint of
step 2. `expected.json` holds what the uninterrupted run logged at step 3. The model is not kept: a checkpoint holds its
weights.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

from tests.e2e import jobs, test_sft
from tests.e2e.test_resume import CRITIC
from verl.config import load_config
from verl.trainer.main_ppo import run_ppo
from verl.trainer.sft_trainer import run_sft
from verl.utils.checksummed import read_checksummed, write_checksummed

RUNS = Path(__file__).resolve().parents[1] / "data" / "started_runs"
KEPT = ("global_step_2", "run.json", "events.jsonl", "latest_checkpointed_iteration.txt")
HERE = Path(".")  # paths in the files are relative to the folder in which a run was started
APART = [f"{jobs.ARR}.hybrid_engine=False", f"{jobs.ARR}.rollout.n_gpus_per_node=1"]
RL = {
    "critic": CRITIC,
    "asynchronous": [*APART, "trainer.v1.trainer_mode=separate_async", "async_training.staleness_threshold=1"],
    "grpo": ["trainer.runtime=processes", "trainer.n_gpus_per_node=2", f"{jobs.ARR}.actor.strategy=fsdp"],
}
KINDS = [*RL, "sft"]
CONTENTS = "[model,optimizer,extra]"
STEPS = ["trainer.total_training_steps=3", "trainer.save_freq=2", "trainer.test_freq=-1", "trainer.device=cpu"]


def enter(folder: Path) -> None:
    """Work in `folder`, with the data of the runs."""
    os.chdir(folder)
    os.environ["VERL_FILE_LOGGER_ROOT"] = "metrics"
    jobs.prepare(HERE, hidden=8)


def train(kind: str) -> dict[str, float]:
    """Start or resume the run of this kind in the working folder; the metrics of step 3."""
    if kind in RL:
        saved = [f"{role}.checkpoint.save_contents={CONTENTS}" for role in (f"{jobs.ARR}.actor", "critic")]
        extra = [*STEPS, "trainer.val_before_train=False", *saved, *RL[kind]]
        run_ppo(load_config(jobs.overrides(HERE, kind, *extra)))
    else:
        run_sft(test_sft.config(HERE, kind, *STEPS, f"checkpoint.save_contents={CONTENTS}"))
    return jobs.metrics(HERE, kind)[3]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        enter(Path(folder))
        expected = {kind: jobs.without_timings({3: train(kind)})[3] for kind in KINDS}
        for kind in KINDS:
            Path(kind, "latest_checkpointed_iteration.txt").write_text("2")
            for path in (Path(kind) / name for name in KEPT):
                target = RUNS / path
                target.parent.mkdir(parents=True, exist_ok=True)
                if path.is_dir():
                    shutil.copytree(path, target, ignore=shutil.ignore_patterns("huggingface"))
                elif path.suffix == ".json":
                    record = read_checksummed(path)
                    write_checksummed(target, {**record, "metrics": f"metrics/e2e/{kind}.jsonl"})
                elif path.is_file():
                    shutil.copy(path, target)
        (RUNS / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
