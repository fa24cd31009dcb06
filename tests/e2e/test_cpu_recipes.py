"""20 steps of one recipe of each family, by its script: the score of a small task rises, and every loss is finite."""

import math

import pytest
from transformers import AutoConfig

from tests.conftest import ROOT
from tests.e2e import jobs
from tests.launched_scripts import LaunchedScripts
from tests.reward_models import save_reward_model
from verl.config import load_config
from verl.trainer.main_ppo import run_ppo
from verl.utils.external_code import load_module

cpu = load_module(str(ROOT / "examples" / "cpu" / "run.py"), "test")
STEPS = 20
FAMILIES = {  # family: recipe
    "a critic": "ppo",
    "a reward model": "reward_model",
    "a critic on normalised returns": "ppo critic.normalize_values=True",
    "group advantages": "dr_grpo",
    "parts of the reward": "gdpo",
    "a greedy baseline": "remax",
    "token baselines": "otb",
    "one ratio per sequence": "gspo",
    "clipped weights": "cispo",
    "chosen tokens": "kl_cov",
}
SIZES = {"TRAIN_BATCH_SIZE": "4", "PPO_MINI_BATCH_SIZE": "2", "ROLLOUT_N": "4", "MAX_RESPONSE_LENGTH": "8"}
FASTER = {"ACTOR_LR": "1e-2", "CRITIC_LR": "1e-2", "TEST_FREQ": "-1", "REWARD_KEYS": "score,format"}


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
def test_twenty_steps_of_a_recipe_raise_the_score(name, tmp_path, monkeypatch):
    name, *more = name.split()
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    (tmp_path / "warm").symlink_to(tmp_path / "model")
    if name == cpu.REWARD_MODEL:
        model = AutoConfig.from_pretrained(tmp_path / "model")
        save_reward_model(tmp_path / "reward_model", model, tmp_path / "model")
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    digits = sum(c.isdigit() for c in solution_str) / 8\n"
        "    return {'score': digits, 'format': float(len(solution_str) > 3)}\n"
    )
    own = [f"reward.custom_reward_function.path={tmp_path / 'reward.py'}", "trainer.logger=[file]", *more]
    added = [*cpu.overrides(name, tmp_path, 1, STEPS), *own, "trainer.val_before_train=False"]
    variables = cpu.variables(name, tmp_path) | SIZES | FASTER
    arguments, _ = LaunchedScripts(tmp_path)(f"examples/{cpu.RECIPES[name]}", *added, **variables)
    run_ppo(load_config(arguments))
    rows = jobs.metrics(tmp_path, name, project="recipes")
    assert set(range(1, STEPS + 1)) <= rows.keys()
    losses = [row[loss] for row in rows.values() for loss in row if loss.endswith("_loss")]
    assert losses and all(map(math.isfinite, losses))
    score = [rows[step]["critic/score/mean"] for step in range(1, STEPS + 1)]
    assert sum(score[-5:]) > sum(score[:5])
    if name == "ppo":
        explained = [rows[step]["critic/vf_explained_var"] for step in range(1, STEPS + 1)]
        assert sum(explained[-5:]) > sum(explained[:5])
