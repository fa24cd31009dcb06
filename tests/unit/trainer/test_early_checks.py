"""Reasons against a run that are said before heavy libraries are loaded."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from verl.config import load_config
from verl.trainer.main_ppo import run_ppo

def announce(line):
    if line.startswith("error: "):
        print(line)
        sys.exit(40 if "torch" in sys.modules or "transformers" in sys.modules else 0)

words = ["actor_rollout_ref.model.path=/m", "actor_rollout_ref.rollout.name=sglang", "data.train_files=/x.jsonl"]
words += ["data.val_files=[/y.jsonl]"]
run_ppo(load_config(words), announce)
"""


def test_a_missing_engine_model_and_data_are_said_at_once_before_heavy_libraries_are_loaded(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("error: 4 things keep this run from starting:")
    for text in ("model.path=/m is not a folder", "/x.jsonl does not exist", "/y.jsonl does not exist"):
        assert text in done.stdout
    assert "rollout.name=sglang needs sglang, which is not installed here" in done.stdout
