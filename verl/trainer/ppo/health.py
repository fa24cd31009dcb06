"""The health lines of a run: what each step's metrics say is wrong, once, with what to do."""

from collections import Counter, deque
from collections.abc import Mapping
from statistics import median

from verl.observe.signs import LOGGED, STEPS, Step

HISTORY = 20  # gradient norms to compare with


class HealthCheck:
    """Reads the metrics of each step. `look` returns the lines that are new.

    `loss_agg_mode` also aggregates actor/kl_loss and actor/entropy: where it sums over tokens, they grow with the
    answers' length and have no fixed limit.
    """

    def __init__(self, loss_agg_mode: str = "token-mean") -> None:
        self.per_token = "sum" not in loss_agg_mode
        self.norms: deque[float] = deque(maxlen=HISTORY)
        self.first_entropy: float | None = None
        self.in_a_row: Counter[str] = Counter()
        self.said: set[str] = set()

    def look(self, metrics: Mapping[str, float]) -> list[str]:
        """Sentences for the log about signs that this step completes; each sign is reported once."""
        if self.first_entropy is None:
            self.first_entropy = metrics.get("actor/entropy")
        usual = median(self.norms) if len(self.norms) >= STEPS else 0.0
        step, lines = Step(metrics, usual, self.first_entropy or 0.0, self.per_token), []
        for sign in LOGGED:
            self.in_a_row[sign.name] = self.in_a_row[sign.name] + 1 if sign.is_shown(step) else 0
            if self.in_a_row[sign.name] >= sign.steps and sign.name not in self.said:
                self.said.add(sign.name)
                number = sign.number(step)
                lines.append(sign.sentence.format(value=number, limit=sign.limit, steps=sign.steps, step=step))
        if (norm := metrics.get("actor/grad_norm")) is not None:
            self.norms.append(norm)
        return lines


def setup_lines(adv_estimator: str, samples_per_prompt: int) -> list[str]:
    """Lines about what is wrong before the first step."""
    if adv_estimator == "grpo" and samples_per_prompt == 1:
        return [
            "actor_rollout_ref.rollout.n=1 with algorithm.adv_estimator=grpo: a group of one has no other answer to "
            "compare with; its raw reward is the advantage. Set rollout.n to 4 or more"
        ]
    return []
