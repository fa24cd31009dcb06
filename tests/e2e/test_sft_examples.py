"""The fine-tuning examples as their pages print them, on a small model and 64 rows of GSM8K."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import ROOT
from tests.e2e.jobs import metrics
from tests.tiers import slow
from verl.data.data_files import FileRows

PREPARE = "examples/data_preprocess/gsm8k_multiturn_sft.py"
SCRIPTS = {"gsm8k/run_qwen3_0_6b.sh": [], "multiturn/run_qwen2_5_0_5b_fsdp.sh": ["--steps"]}
SMALL = [
    "data.train_batch_size=8",
    "data.truncation=right",
    "data.val_max_samples=16",
    "engine.dtype=float32",
    "optim.lr=1e-2",
    "optim.lr_warmup_steps_ratio=0",
    "trainer.total_training_steps=2",
]


@pytest.fixture(scope="module")
def folder(test_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Raw rows and a small model with the real Qwen3 tokenizer."""
    folder = tmp_path_factory.mktemp("sft")
    (folder / "raw").mkdir()
    for split in ("train", "test"):
        lines = (test_data / "gsm8k" / f"{split}.jsonl").read_text().splitlines()[:64]
        (folder / "raw" / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = str(test_data / "tokenizers" / "qwen3")
    run(folder, sys.executable, "examples/sft/small_model.py", "--tokenizer", tokenizer, "--out", str(folder / "small"))
    return folder


def prepare(folder: Path, *arguments: str) -> None:
    run(folder, sys.executable, PREPARE, "--local_dataset_path", str(folder / "raw"), *arguments)


def run(folder: Path, *command: str, **extra: str) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1", **extra}
    environment["VERL_FILE_LOGGER_ROOT"] = str(folder / "metrics")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("script", ["gsm8k/run_qwen3_0_6b.sh", *slow(["multiturn/run_qwen2_5_0_5b_fsdp.sh"])])
def test_the_example_trains_on_the_rows_it_prepared(folder: Path, script: str):
    name = Path(script).stem
    prepare(folder, *SCRIPTS[script], "--local_save_dir", str(folder / name))
    out = folder / name / "out"
    place = ["trainer.project_name=e2e", f"trainer.experiment_name={name}", f"trainer.default_local_dir={out}"]
    env = {"MODEL_PATH": str(folder / "small"), "DATA_DIR": str(folder / name)}
    run(folder, "bash", f"examples/sft/{script}", *SMALL, *place, "trainer.resume_mode=disable", **env)
    rows = metrics(folder, name)
    assert rows[2]["train/loss"] < rows[1]["train/loss"] and rows[2]["val/loss"] > 0
    trained = load_file(out / "global_step_2" / "huggingface" / "model.safetensors")
    start = load_file(folder / "small" / "model.safetensors")
    assert any(not tensor.equal(start[weight]) for weight, tensor in trained.items())


def test_an_answer_of_many_lines_is_a_turn_each(folder: Path):
    prepare(folder, "--steps", "--local_save_dir", str(folder / "steps"))
    prepare(folder, "--local_save_dir", str(folder / "whole"))
    many, one = (FileRows(str(folder / kind / "train.parquet"))[0]["messages"] for kind in ("steps", "whole"))
    said = [message["content"] for message in many if message["role"] == "assistant"]
    assert [message["role"] for message in one] == ["user", "assistant"] and said == one[1]["content"].splitlines()
    assert many[0] == one[0] and {m["content"] for m in many[2::2]} == {"Next step, please."}
