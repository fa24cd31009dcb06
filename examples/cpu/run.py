"""Run a recipe of this folder's neighbours on a CPU: the same script, with the model and the task of the quickstart.

    python3 examples/cpu/run.py dapo                       # about two minutes; --steps, --seed, --out
    python3 examples/cpu/run.py gspo actor_rollout_ref.actor.clip_ratio_high=0.01

The script of the recipe gets the variables of `VARIABLES`, so what belongs to the algorithm is written there alone.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

EXAMPLES = Path(__file__).resolve().parents[1]
FSDP = "run_qwen3_8b_fsdp.sh"
DISTILLATION = "on_policy_distillation"
REWARD_MODEL = "reward_model"
RECIPES = {
    "grpo": f"grpo_trainer/{FSDP}",
    "dr_grpo": "grpo_trainer/run_qwen3_8b_drgrpo.sh",
    "dapo": f"dapo_trainer/{FSDP}",
    "ppo": f"ppo_trainer/{FSDP}",
    "gspo": f"gspo_trainer/{FSDP}",
    "rloo": f"rloo_trainer/{FSDP}",
    "remax": f"remax_trainer/{FSDP}",
    "reinforce_plus_plus": f"reinforce_plus_plus_trainer/{FSDP}",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_trainer/run_qwen3_8b_baseline.sh",
    "cispo": f"cispo_trainer/{FSDP}",
    "sapo": f"sapo_trainer/{FSDP}",
    "gpg": f"gpg_trainer/{FSDP}",
    "opo": f"opo_trainer/{FSDP}",
    "gmpo": f"gmpo_trainer/{FSDP}",
    "dppo": f"dppo_trainer/{FSDP}",
    "clip_cov": "entropy_trainer/run_qwen3_8b_clip_cov.sh",
    "kl_cov": "entropy_trainer/run_qwen3_8b_kl_cov.sh",
    "otb": f"otb_trainer/{FSDP}",
    "gdpo": f"gdpo_trainer/{FSDP}",
    "rollout_correction": f"rollout_correction/{FSDP}",
    REWARD_MODEL: "ppo_trainer/run_qwen2-7b_rm_seq_balance.sh",
    DISTILLATION: f"on_policy_distillation_trainer/{FSDP}",
    "prefix_grouper": f"prefix_grouper/{FSDP}",
    "lora": f"tuning/lora/{FSDP}",
    "scaling": f"tuning/scaling/{FSDP}",
    "scalerl": f"scalerl_trainer/{FSDP}",
}
TASK = "verl.commands.quickstart.addition_task"
VARIABLES = {  # sizes of the task; 512 answers a step for every recipe
    "DEVICE": "cpu",
    "NGPUS_PER_NODE": "1",
    "TRAIN_BATCH_SIZE": "64",
    "PPO_MINI_BATCH_SIZE": "32",
    "ROLLOUT_N": "8",
    "MAX_PROMPT_LENGTH": "8",
    "MAX_RESPONSE_LENGTH": "24",
    "OVERLONG_BUFFER_LEN": "4",
    "ACTOR_LR": "4e-4",
    "CRITIC_LR": "2e-3",
    "KL_COEF": "0.001",  # the score is at most 1 and the model small: it has to move far
    "LORA_RANK": "16",
    "SP_SIZE": "1",
    "REWARD_KEYS": "score,acc",
    "REWARD_FILE": f"pkg://{TASK}",
    "SAVE_FREQ": "-1",
    "TEST_FREQ": "30",
    "PROJECT_NAME": "recipes",
}
ONE_ANSWER_PER_PROMPT = {"TRAIN_BATCH_SIZE": "512", "PPO_MINI_BATCH_SIZE": "256", "ROLLOUT_N": "1"}
OF_RECIPE = {
    "ppo": ONE_ANSWER_PER_PROMPT,
    REWARD_MODEL: ONE_ANSWER_PER_PROMPT | {"PPO_MAX_TOKEN_LEN_PER_GPU": "24576"},
    "reinforce_plus_plus": ONE_ANSWER_PER_PROMPT,
    "lora": {"ACTOR_LR": "4e-3"},  # ten times that of a whole model, as in the script
}
TEACHER_EPOCHS = 2
ARR = "actor_rollout_ref"
# coefficients; one answer per prompt is sure too early without
ENTROPY = {"ppo": 0.005, REWARD_MODEL: 0.005, "reinforce_plus_plus": 0.003}
OVERRIDES = (  # what a CPU and so small a model need
    "trainer.device=cpu",
    "trainer.logger=[console,file]",
    f"{ARR}.model.enable_gradient_checkpointing=False",
    f"{ARR}.actor.fsdp_config.dtype=float32",
    f"{ARR}.ref.fsdp_config.dtype=float32",
    f"{ARR}.rollout.dtype=float32",
    f"{ARR}.actor.optim.betas=[0.9,0.95]",
    f"{ARR}.actor.optim.lr_warmup_steps=5",
    f"{ARR}.actor.optim.lr_scheduler_type=cosine",
    f"{ARR}.actor.optim.min_lr_ratio=0.3",
    "critic.model.enable_gradient_checkpointing=False",
    "critic.fsdp.dtype=float32",
    f"reward.custom_reward_function.path=pkg://{TASK}",
    "reward.custom_reward_function.name=compute_score",
)


def prepare(out: Path, seed: int) -> Path:
    """The folder of a model that knows the format of the answers only; made once per folder, with its data."""
    from verl.commands.quickstart.addition_task import CHARACTERS, make_split, write_split
    from verl.commands.quickstart.small_model import make_model
    from verl.commands.quickstart.stages import NUM_HELD_OUT, NUM_WORKED, remove_earlier_runs, warm_up

    if (out / "warm" / "config.json").is_file():
        return out / "warm"
    out.mkdir(parents=True, exist_ok=True)
    remove_earlier_runs(out)
    split = make_split(seed, NUM_HELD_OUT, NUM_WORKED)
    write_split(split, out / "data")
    make_model(out / "model", CHARACTERS, seed)
    warm_up(out, seed, split.train[NUM_WORKED : NUM_WORKED + NUM_HELD_OUT], out / "warm")
    return out / "warm"


def prepare_teacher(out: Path, seed: int) -> Path:
    """The folder of `DISTILLATION`'s teacher: a model fine-tuned on worked answers to all training problems."""
    from verl.commands.quickstart.addition_task import make_split, write_split
    from verl.commands.quickstart.stages import NUM_HELD_OUT, keep_quiet, newest_checkpoint, sft_overrides
    from verl.config import load_config
    from verl.trainer.sft_trainer import run_sft

    prepare(out, seed)
    if not (out / "teacher" / "config.json").is_file():
        split, folder = make_split(seed, NUM_HELD_OUT, num_worked=0), out / "teacher_run"
        write_split(replace(split, worked=split.train), out / "teacher_data")
        changed = {
            "data.train_files": out / "teacher_data" / "worked.jsonl",
            "trainer.total_epochs": TEACHER_EPOCHS,
            "trainer.save_freq": -1,
            "trainer.default_local_dir": folder,
            "trainer.experiment_name": "teacher",
        }
        own = [f"{key}={value}" for key, value in changed.items()]
        run_sft(load_config([*sft_overrides(out, seed), *own], config_name="sft_trainer"), announce=keep_quiet)
        shutil.copytree(newest_checkpoint(folder) / "huggingface", out / "teacher", dirs_exist_ok=True)
    return out / "teacher"


def prepare_reward_model(out: Path, seed: int) -> Path:
    """The folder of `REWARD_MODEL`'s model, which tells right worked answers from wrong ones."""
    from verl.utils.external_code import load_module

    prepare_teacher(out, seed)
    if not (out / REWARD_MODEL / "config.json").is_file():
        load_module(str(EXAMPLES / "reward_model" / "on_sums.py"), "the example").train_reward_model(out, seed)
    return out / REWARD_MODEL


PREPARE = {DISTILLATION: prepare_teacher, REWARD_MODEL: prepare_reward_model}


def variables(name: str, out: Path) -> dict[str, str]:
    """What the script of recipe `name` gets for the model and the data below `out`."""
    train, test = (str(out / "data" / file) for file in ("train.jsonl", "test.jsonl"))
    own = {
        "MODEL_PATH": str(out / "warm"),
        "TEACHER_MODEL_PATH": str(out / "teacher"),
        "REWARD_MODEL_PATH": str(out / REWARD_MODEL),
        "TRAIN_FILE": train,
        "TEST_FILE": test,
        "EXPERIMENT_NAME": name,
    }
    return VARIABLES | OF_RECIPE.get(name, {}) | own


def overrides(name: str, out: Path, seed: int, steps: int) -> list[str]:
    """What is added to the command of recipe `name`."""
    return [
        *OVERRIDES,
        *([f"{ARR}.actor.entropy_coeff={ENTROPY[name]}"] if name in ENTROPY else []),
        *(["reward.weights.rm=1.0"] if name == REWARD_MODEL else []),  # the function is only logged
        f"data.seed={seed}",
        f"{ARR}.rollout.seed={seed}",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={out / 'runs' / name}",
    ]


def run(name: str, out: Path, seed: int, steps: int, extra: Sequence[str] = (), output: IO[str] | None = None) -> int:
    """Train by recipe `name`, whose lines go to `output` (None: the terminal); returns the exit code of its script."""
    python = Path(sys.executable).parent
    environment = os.environ | variables(name, out) | {"PATH": f"{python}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(EXAMPLES / RECIPES[name]), *overrides(name, out, seed, steps), *extra]
    return subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--out", type=Path, default=Path("recipes_out"), help="folder for everything written")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("overrides", nargs="*", help="further key=value overrides")
    options = parser.parse_intermixed_args()
    out = options.out.resolve()
    os.environ.setdefault("VERL_FILE_LOGGER_ROOT", str(out / "metrics"))
    PREPARE.get(options.recipe, prepare)(out, options.seed)
    return run(options.recipe, out, options.seed, options.steps, options.overrides)


if __name__ == "__main__":
    sys.exit(main())
