"""Health lines: each sign is reported once, after as many steps as it takes, and a healthy run hears nothing."""

import re

import pytest
import torch

from verl.config import RunConfig
from verl.config.foreign_keys import classify
from verl.data.batch import Batch
from verl.data.trajectory import Trajectory
from verl.observe.metric_names import find_metric
from verl.observe.signs import LOGGED, SIGNS, STEPS
from verl.trainer.ppo.batch_metrics import reward_metrics
from verl.trainer.ppo.health import HISTORY, HealthCheck, setup_lines

HEALTHY = {
    "critic/score/min": 0.0,
    "critic/score/max": 1.0,
    "reward/groups_without_spread": 0.25,
    "actor/ppo_kl": 0.01,
    "actor/kl_loss": 0.05,
    "actor/grad_norm": 1.0,
    "response_length/clip_ratio": 0.1,
    "actor/entropy": 1.5,
    "actor/lr": 1e-6,
}


@pytest.mark.parametrize(
    ("sick", "steps", "words"),
    [
        ({"critic/score/max": 0.0}, STEPS, "every reward was 0"),
        ({"critic/score/min": 1.0, "reward/groups_without_spread": 1.0}, STEPS, "no group had two different rewards"),
        ({"actor/ppo_kl": -0.7}, 1, "-0.7 nats"),
        ({"actor/kl_loss": 4.0}, STEPS, "4 now"),
        ({"actor/reward_kl_penalty": 1.1}, STEPS, "left its reference"),
        ({"actor/grad_norm": 51.0}, 1, "gradient norm was 51"),
        ({"response_length/clip_ratio": 0.5}, STEPS, "data.max_response_length"),
        ({"actor/entropy": 0.02}, STEPS, "below 2 %"),
        ({"actor/entropy": 3.1}, STEPS, "from 1.5 to 3.1 nats"),
        ({"actor/lr": 0.0}, STEPS, "learning rate was 0"),
    ],
)
def test_a_sign_is_reported_once_when_it_has_lasted(sick: dict[str, float], steps: int, words: str) -> None:
    check = HealthCheck()
    before = [check.look(HEALTHY) for _ in range(HISTORY)]
    after = [check.look({**HEALTHY, **sick}) for _ in range(2 * STEPS)]
    assert not any(before) and not any(after[: steps - 1])
    assert len(after[steps - 1]) == 1 and words in after[steps - 1][0] and not any(after[steps:])


def test_a_sign_that_goes_away_starts_anew() -> None:
    check = HealthCheck()
    for _ in range(3):
        found = [check.look({**HEALTHY, "critic/score/max": 0.0}) for _ in range(STEPS - 1)] + [check.look(HEALTHY)]
        assert not any(found)


def test_an_entropy_that_doubles_below_the_floor_is_no_sign() -> None:
    check = HealthCheck()
    assert not any(check.look({**HEALTHY, "actor/entropy": value}) for value in (0.1, *[0.4] * 2 * STEPS))


def test_sums_over_tokens_have_no_fixed_limit() -> None:
    check = HealthCheck("seq-mean-token-sum")
    sums = [{**HEALTHY, "actor/kl_loss": 4.0, "actor/entropy": 1.5 * length} for length in range(1, 3 * STEPS)]
    assert not any(map(check.look, sums))


def test_metrics_that_a_run_lacks_are_no_sign() -> None:
    check = HealthCheck()
    assert not any(check.look({"train/loss": 1.0}) for _ in range(3 * STEPS))


def test_a_gradient_after_steps_that_had_none_is_no_sign() -> None:
    check = HealthCheck()
    for norm in (*[0.0] * STEPS, 0.1, 0.0):
        assert not check.look({**HEALTHY, "actor/grad_norm": norm})


def test_keys_that_health_lines_name_are_read() -> None:
    sentences = " ".join(sign.sentence for sign in LOGGED)
    keys = re.findall(r"\b(?:actor_rollout_ref|data|algorithm)\.[a-z_.]*[a-z]", sentences)
    assert len(keys) > 3
    assert {key: classify(key, RunConfig).kind for key in keys} == dict.fromkeys(keys, "read")


def test_a_metric_of_a_sign_is_in_the_table_of_metrics() -> None:
    assert [sign.metric for sign in SIGNS if sign.metric and find_metric(sign.metric) is None] == []


def test_grpo_with_one_answer_per_prompt_is_named_before_the_run() -> None:
    assert "rollout.n=1" in setup_lines("grpo", 1)[0]
    assert setup_lines("grpo", 2) == setup_lines("gae", 1) == []


def test_spread_of_rewards_over_the_batch_and_inside_groups() -> None:
    rewards = {0: (1.0, 1.0), 1: (0.0, 1.0), 2: (0.0, 0.0), 3: (0.5, 0.5)}
    batch = Batch.pack(
        [
            Trajectory.from_completion([1], [2], [-1.0], group_id=group, reward=reward)
            for group, values in rewards.items()
            for reward in values
        ]
    )
    found = reward_metrics(batch)
    flat = torch.tensor([r for values in rewards.values() for r in values], dtype=torch.float64)
    assert found["reward/std"] == pytest.approx(float(((flat - flat.mean()) ** 2).mean().sqrt()))
    assert found["reward/groups_without_spread"] == 0.75


def outputs_of_two(*rewards: tuple[int, float]) -> Batch:
    """Outputs (conversation, reward) of one prompt."""
    fields = [{"conversation": conversation, "reward": reward} for conversation, reward in rewards]
    return Batch.pack([Trajectory.from_completion([1], [2], [-1.0], group_id=0, **one) for one in fields])


def test_several_outputs_of_a_conversation_count_once_in_the_spread_of_rewards() -> None:
    found = reward_metrics(outputs_of_two((0, 1.0), (0, 1.0), (0, 1.0), (1, 0.0)))
    assert found == {"reward/std": 0.5, "reward/groups_without_spread": 0.0, "reward/unequal_outputs": 0.0}
    assert HealthCheck().look(found) == []


def test_outputs_of_one_conversation_with_different_rewards_are_said() -> None:
    found = reward_metrics(outputs_of_two((0, 1.0), (0, 0.0), (1, 0.5)))
    assert found == {"reward/std": 0.0, "reward/groups_without_spread": 1.0, "reward/unequal_outputs": 0.5}
    [line] = HealthCheck().look(found)
    assert "the reward of the conversation is their mean" in line
