"""The preference examples on a small model and 64 rows of GSM8K."""

import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import metrics
from tests.e2e.test_sft_examples import SMALL, folder, run
from tests.tiers import slow
from verl.data.data_files import FileRows

PREPARE = "examples/data_preprocess/gsm8k_preferences.py"

__all__ = ["folder"]  # a fixture


@pytest.mark.parametrize("kind", [*slow(["dpo"]), "reward_model"])
def test_the_example_trains_on_the_pairs_it_prepared(folder: Path, kind: str):
    pairs, out = folder / "pairs", folder / kind / "out"
    run(folder, sys.executable, PREPARE, "--local_dataset_path", f"{folder}/raw", "--local_save_dir", str(pairs))
    rows = list(FileRows(str(pairs / "train.parquet")))
    assert len(rows) == 64 and all(row["chosen"] != row["rejected"] for row in rows)
    place = ["trainer.project_name=e2e", f"trainer.experiment_name={kind}", f"trainer.default_local_dir={out}"]
    env = {"MODEL_PATH": str(folder / "small"), "DATA_DIR": str(pairs)}
    run(folder, "bash", f"examples/{kind}/run_qwen3_8b_fsdp.sh", *SMALL, *place, "trainer.test_freq=1", **env)
    steps = metrics(folder, kind)
    assert steps[2]["val/loss"] > 0 and steps[2]["val/rewards/margins"] != 0 and "train/rewards/accuracies" in steps[2]
    assert (out / "global_step_2" / "huggingface" / "model.safetensors").is_file()
