"""The main job on real input: GSM8K rows, the real Qwen3 tokenizer and chat template, a small random Qwen3."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.tiers import slow
from verl.commands.quickstart.small_model import small_qwen3

ROOT = Path(__file__).resolve().parents[2]
ARR = "actor_rollout_ref"
REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Dense, so that gradients flow: the share of characters below 'm'."""
    assert data_source == "openai/gsm8k" and ground_truth.lstrip("-").replace(",", "").replace(".", "").isdigit()
    return sum(c < "m" for c in solution_str) / max(len(solution_str), 1)
'''


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, test_data: Path) -> Path:
    """data/*.parquet by the example script, model/ with the real tokenizer and random weights."""
    folder = tmp_path_factory.mktemp("gsm8k")
    script = ROOT / "examples" / "data_preprocess" / "gsm8k.py"
    command = [sys.executable, str(script), "--local_dataset_path", str(test_data / "gsm8k")]
    subprocess.run([*command, "--local_save_dir", str(folder / "data")], check=True, capture_output=True)
    tokenizer = AutoTokenizer.from_pretrained(test_data / "tokenizers" / "qwen3")
    small_qwen3(tokenizer, 0, hidden=32, layers=2, positions=4096).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    return folder


PPO = ["algorithm.adv_estimator=gae", "critic.fsdp.dtype=float32", f"{ARR}.actor.use_kl_loss=True"]


@pytest.mark.parametrize("extra", [*slow([["algorithm.adv_estimator=grpo"]]), PPO], ids=["grpo", "ppo"])
def test_main_ppo_trains_on_gsm8k_rows(prepared: Path, tmp_path: Path, extra: list[str]):
    command = [
        sys.executable,
        "-m",
        "verl.trainer.main_ppo",
        f"{ARR}.model.path={prepared / 'model'}",
        f"data.train_files={prepared / 'data' / 'train.parquet'}",
        f"data.val_files={prepared / 'data' / 'test.parquet'}",
        "data.val_max_samples=4",
        "data.train_batch_size=4",
        "data.max_prompt_length=256",
        "data.max_response_length=16",
        "data.filter_overlong_prompts=True",
        f"{ARR}.rollout.n=4",
        f"{ARR}.rollout.dtype=float32",
        f"{ARR}.actor.ppo_mini_batch_size=4",
        f"{ARR}.actor.fsdp_config.dtype=float32",
        f"{ARR}.actor.optim.lr=1e-3",
        f"custom_reward_function.path={prepared / 'reward.py'}",
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
        "trainer.test_freq=3",
        "trainer.project_name=smoke",
        "trainer.experiment_name=run",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
        *extra,
    ]
    environment = {**os.environ, "VERL_FILE_LOGGER_ROOT": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    saved = load_file(tmp_path / "run" / "global_step_3" / "actor" / "huggingface" / "model.safetensors")
    before = load_file(prepared / "model" / "model.safetensors")
    assert all(not torch.equal(saved[name], before[name]) for name in before)
    lines = (tmp_path / "smoke" / "run.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(math.isfinite(value) for row in rows for value in row["data"].values())
    assert all(row["data"]["actor/grad_norm"] > 0 for row in rows[1:])
    assert "val-core/openai/gsm8k/acc/mean@1" in rows[3]["data"]
    assert len((tmp_path / "rollouts" / "3.jsonl").read_text().splitlines()) == 16
