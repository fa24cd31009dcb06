"""GRPO on the score of a reward model: in one rank, on several, and on ranks of its own it is the same score."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.conftest import ROOT
from tests.e2e import jobs
from tests.reward_models import save_reward_model
from verl.commands.quickstart.addition_task import CHARACTERS, Problem, Split, write_split
from verl.commands.quickstart.small_model import make_model
from verl.rewards import call_retries
from verl.runtime.rank_observation import family
from verl.workers.reward_model import RewardModel

KEY = "reward.reward_model"
PLACES = {
    "shared": [],
    "two": ["trainer.n_gpus_per_node=2", f"{KEY}.forward_micro_batch_size_per_gpu=1"],
    "split": ["trainer.n_gpus_per_node=2", f"{KEY}.ulysses_sequence_parallel_size=2"],
    "own": [f"{KEY}.enable_resource_pool=True", f"{KEY}.nnodes=1", f"{KEY}.n_gpus_per_node=1"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    save_reward_model(tmp_path / "rm", AutoConfig.from_pretrained(tmp_path / "model"), tmp_path / "model")
    return tmp_path


def train(folder: Path, run: str, *keys: str) -> dict:
    model = [f"{KEY}.enable=True", f"{KEY}.model_path={folder / 'rm'}", "trainer.device=cpu"]
    model += ["reward.weights.rm=2.0"] if run != "judge" else []
    jobs.train(folder, run, *model, "trainer.total_training_steps=2", "trainer.save_freq=-1", *keys)
    return jobs.metrics(folder, run)


def test_the_score_is_the_same_wherever_the_reward_model_is(folder: Path, capsys: pytest.CaptureFixture[str]):
    rows = {place: train(folder, place, *keys) for place, keys in PLACES.items()}
    shared = rows["shared"]
    for step in (0, 1):
        name = "val-aux/quickstart/addition/rm/mean@1" if step == 0 else "reward/rm/mean"
        for place in PLACES:
            assert rows[place][step][name] == pytest.approx(shared[step][name], abs=1e-5)
    first = shared[1]
    assert first["critic/score/mean"] == pytest.approx(2 * first["reward/rm/mean"])  # the function counts nothing
    assert first["reward/rm/max"] > first["reward/rm/min"] and "reward/acc/mean" in first
    assert (first["reward_model/sequences"], first["reward_model/passes"]) == (16, 1)  # all at once
    said = capsys.readouterr().out
    assert "reward model Qwen3ForSequenceClassification" in said and "in the trainer's ranks on devices of its" in said


def test_groups_whose_scores_are_known_only_later_are_replaced_and_baselines_scored(folder: Path):
    filtering = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=seq_reward"]
    assert train(folder, "filter", *filtering)[2]["reward/std"] > 0
    assert "reward_model/tokens_per_s" in train(folder, "remax", "algorithm.adv_estimator=remax")[2]


def test_a_pass_over_the_ranks_that_fails_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(call_retries, "FIRST_WAIT_S", 0.0)
    calls, scores = [], RewardModel.scores

    def failing(self, sequences):
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError("no room")
        return scores(self, sequences)

    monkeypatch.setattr(RewardModel, "scores", failing)
    rows = train(folder, "again", "reward.retries=1", "trainer.val_before_train=False", "trainer.test_freq=-1")
    assert [rows[step]["reward/retries"] for step in (1, 2)] == [16, 0] and rows[1]["reward/errors"] == 0


def test_a_function_asks_a_judge_that_the_run_serves(folder: Path, capsys: pytest.CaptureFixture[str]):
    (folder / "reward.py").write_text(
        "import asyncio, json, urllib.request\n"
        "async def compute_score(*, solution_str, reward_router_address, reward_model_tokenizer, **more):\n"
        "    question = reward_model_tokenizer.decode(reward_model_tokenizer.encode('1+1='))\n"
        "    body = {'messages': [{'role': 'user', 'content': question}], 'max_tokens': 3, 'temperature': 0}\n"
        "    request = urllib.request.Request(f'http://{reward_router_address}/v1/chat/completions',\n"
        "        json.dumps(body).encode(), {'Content-Type': 'application/json'})\n"
        "    answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request, timeout=60)))\n"
        "    said = answer['choices'][0]['message']['content']\n"
        "    return {'score': len(solution_str) / 8, 'said': float(len(said))}\n"
    )
    judge = [f"{KEY}.model_path={folder / 'model'}"]
    judge += [f"{KEY}.rollout.prompt_length=16", f"{KEY}.rollout.response_length=8"]
    rows = train(folder, "judge", *judge)
    assert rows[1]["reward/said/mean"] > 0 and rows[1]["reward/errors"] == 0
    assert "judge        Qwen3ForCausalLM" in capsys.readouterr().out
    commands = [
        Path(f"/proc/{process}/cmdline").read_text() for process in family({os.getpid()}).keys() - {os.getpid()}
    ]
    assert not [command for command in commands if "verl.commands.serve" in command]  # it has ended with the run


def test_the_example_trains_a_reward_model_from_pairs_and_a_policy_on_it(tmp_path: Path):
    """At its smallest, without the warm-up; `make soak PART=reward_model` runs it whole and asks that rewards rise."""
    out = tmp_path / "out"
    for name in ("warm", "teacher"):
        make_model(out / name, CHARACTERS, 0, hidden=32, layers=1)
    problems = [Problem(a, b) for a in range(10, 18) for b in range(10, 20)]
    write_split(Split(problems[:64], problems[64:], problems[:4]), out / "data")
    command = ["examples/reward_model/on_sums.py", "--out", str(out), "--pairs", "64", "--steps", "2"]
    environment = os.environ | {"VERL_FILE_LOGGER_ROOT": str(tmp_path / "metrics")}
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT, env=environment, capture_output=True)
    found = json.loads((out / "result.json").read_text())
    assert 0 <= found["pairs right"] <= 1 and {"reward first", "reward last", "right first", "right last"} < {*found}
    pairs = [json.loads(line) for line in (out / "data" / "test_pairs.jsonl").read_text().splitlines()]
    assert len(pairs) > 150 and all(row["chosen"] != row["rejected"] for row in pairs)
