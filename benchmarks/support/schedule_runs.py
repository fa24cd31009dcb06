"""Settings of `schedule.py`: runs of a small model whose answers have the lengths of a log-normal distribution."""

import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl.commands.quickstart.addition_task import CHARACTERS
from verl.commands.quickstart.small_model import make_tokenizer, small_qwen3
from verl.runtime.rank_observation import family

ARR = "actor_rollout_ref"
EPOCH = 5  # steps: the data has no more prompts, so that a few steps have seen every length
# Steps take half a second and more: what a prediction leaves out (the driver, collectives) is small beside that.
COLOCATED, ONE_STEP_OFF, FULLY_ASYNC = "colocate_async", "one_step_off", "fully_async"
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(character.isdigit() for character in solution_str) / max(len(solution_str), 1)
"""
LEARNED = 80  # steps after which little is left to learn: before, an age of a version shows in the reward
LOOPS = "- name: fixed_lengths\n  _target_: support.fixed_lengths.FixedLengths\n"


@dataclass(frozen=True)
class Setting:
    """A synchronous run, and the schedule that is compared with it on the same cores."""

    name: str
    schedule: str
    devices: int  # processes, each on a core of its own; two are split 1+1 by the schedule
    helps: bool  # what the plan has to say
    median: float  # tokens of an answer
    sigma: float  # of their logarithm; 0: all are equal
    most: int
    prompts: int = 8
    n: int = 4
    staleness: float = 1.0
    max_lag: int = 8
    steps: int = 26  # of training
    hidden: int = 256
    layers: int = 4
    lr: float = 1e-4
    more: tuple[str, ...] = field(default=())  # overrides of both arms

    def lengths(self) -> list[list[int]]:
        """Tokens of each answer, by prompt."""
        draws = random.Random(self.name)
        return [[self._draw(draws) for _ in range(self.n)] for _ in range(self.prompts * EPOCH)]

    def _draw(self, draws: random.Random) -> int:
        return max(1, min(self.most, round(draws.lognormvariate(math.log(self.median), self.sigma))))

    def sync(self) -> list[str]:
        return [f"trainer.n_gpus_per_node={self.devices}"]

    def asynchronous(self) -> list[str]:
        ages = self.ages()
        if self.schedule == COLOCATED:
            return [*self.sync(), *ages, "trainer.v1.trainer_mode=colocate_async"]
        apart = ["trainer.v1.trainer_mode=separate_async", f"{ARR}.hybrid_engine=False", "trainer.n_gpus_per_node=1"]
        return [*apart, *ages, f"{ARR}.rollout.n_gpus_per_node=1"]

    def ages(self) -> list[str]:
        """K and M, which the plan is given, too."""
        return [
            f"async_training.staleness_threshold={self.staleness:g}",
            f"trainer.v1.sampler.max_off_policy_threshold={self.max_lag}",
        ]


BATCH_AT_ONCE = (f"{ARR}.rollout.max_num_seqs=16",)  # a larger share of the prompts decodes no more answers at once
KEEP_GATHERED = (f"{ARR}.actor.fsdp_config.reshard_after_forward=False",)  # collectives of gloo are not overlapped
FOUR_EPOCHS = (f"{ARR}.actor.ppo_epochs=4",)
PARTS = (*KEEP_GATHERED, f"{ARR}.actor.ppo_mini_batch_size=4")
SETTINGS = (
    Setting("colocated, long tail", COLOCATED, 1, True, 25, 1.2, 300, prompts=4, n=2, steps=LEARNED),
    Setting("colocated, mild tail", COLOCATED, 1, True, 50, 0.8, 250, 4, 2, 0.5, steps=LEARNED, hidden=512, layers=2),
    Setting("one step off, tail", ONE_STEP_OFF, 2, True, 25, 1.2, 400, max_lag=2, steps=LEARNED, more=KEEP_GATHERED),
    Setting("fully asynchronous, long tail", FULLY_ASYNC, 2, True, 25, 1.2, 400, steps=LEARNED, more=PARTS),
    Setting("updates take the time", COLOCATED, 1, False, 40, 0.3, 80, 4, more=FOUR_EPOCHS, hidden=512, layers=2),
    Setting("no tail", COLOCATED, 1, False, 100, 0.0, 100, 4, more=BATCH_AT_ONCE, hidden=512, layers=2),
)


def prepare(folder: Path, setting: Setting) -> None:
    """Model, data, reward and agent loop under `folder`."""
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(CHARACTERS)
    small_qwen3(tokenizer, 0, setting.hidden, setting.layers, setting.most + 8).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    prepare_data(folder, setting)


def prepare_data(folder: Path, setting: Setting, reward: str = REWARD) -> None:
    """Data, reward and agent loop under `folder`."""
    rows = [
        {
            "data_source": "benchmark",
            "prompt": [{"role": "user", "content": f"{10 + number}+{10 + number}="}],
            "reward_model": {"ground_truth": ""},
            "extra_info": {"lengths": lengths},
        }
        for number, lengths in enumerate(setting.lengths())
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(reward)
    (folder / "loops.yaml").write_text(LOOPS)


def overrides(folder: Path, setting: Setting, run: str, seed: int, mode: Sequence[str]) -> list[str]:
    """One run on what `prepare` made, in `folder/run`."""
    return [
        f"{ARR}.model.path={folder / 'model'}",
        f"{ARR}.model.enable_gradient_checkpointing=False",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.train_batch_size={setting.prompts}",
        f"data.seed={seed}",
        "data.max_prompt_length=8",
        f"data.max_response_length={setting.most}",
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.bypass_mode=True",
        f"{ARR}.rollout.n={setting.n}",
        f"{ARR}.rollout.seed={seed}",
        f"{ARR}.rollout.dtype=float32",
        f"{ARR}.rollout.ignore_eos=True",
        f"{ARR}.rollout.agent.default_agent_loop=fixed_lengths",
        f"{ARR}.rollout.agent.agent_loop_config_path={folder / 'loops.yaml'}",
        f"{ARR}.actor.ppo_mini_batch_size={setting.prompts}",
        f"{ARR}.actor.use_dynamic_bsz=True",
        f"{ARR}.actor.optim.lr={setting.lr}",
        f"{ARR}.actor.fsdp_config.dtype=float32",
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        f"trainer.total_training_steps={setting.steps}",
        "trainer.device=cpu",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[file]",
        "trainer.project_name=schedule",
        f"trainer.experiment_name={run}",
        f"trainer.default_local_dir={folder / run}",
        *setting.more,
        *mode,
    ]


def train(folder: Path, words: Sequence[str], cores: Sequence[int], log: Path) -> None:
    """One run with one thread a process, each on a core of its own. SystemExit with its last lines where it fails."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment["VERL_FILE_LOGGER_ROOT"] = str(folder / "metrics")
    command = ["taskset", "-c", str(cores[0]), sys.executable, "-m", "verl.trainer.main_ppo", *words]
    with log.open("w") as output:
        run = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        try:
            while run.poll() is None:
                pin_children(run.pid, cores)
                time.sleep(2.0)
        finally:
            run.kill()
    if run.returncode:
        raise SystemExit(f"a run failed: {' '.join(words)}\n{log.read_text()[-3000:]}")


def pin_children(pid: int, cores: Sequence[int]) -> None:
    """Give each process of a run its core: rank i core i; the replica of a trainer that has no ranks the second."""
    ranks = 0
    for child in sorted(family({pid})):
        command = command_line(child)
        if "engine_server" in command:
            pin(child, cores[1 % len(cores)])
        elif "spawn_main" in command:
            pin(child, cores[ranks % len(cores)])
            ranks += 1


def command_line(pid: int) -> str:
    """Its words; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def pin(pid: int, core: int) -> None:
    """Keep all threads of a process on a core."""
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        try:
            os.sched_setaffinity(int(thread.name), {core})
        except (ProcessLookupError, ValueError):  # it has ended
            continue


def moments(run: Path) -> list[float]:
    """Seconds at which the steps of a run were complete: when the ledger wrote them."""
    files = sorted((run / "ledger").glob("step_*.parquet"))
    return [file.stat().st_mtime_ns / 1e9 for file in files]
