"""How many answers of a run may stay without a score."""

from verl.utils.errors import RewardError


class ErrorBudget:
    """`reward.max_errors` answers; None is any number."""

    def __init__(self, max_errors: int | None):
        self._left = max_errors

    def spend(self, message: str) -> None:
        """One answer has no score, because of `message`; RewardError where as many as are allowed had none before."""
        if self._left is None:
            return
        self._left -= 1
        if self._left < 0:
            raise RewardError(
                f"more answers than reward.max_errors allows got no score since the run started; the last:\n{message}\n"
                "Repair the reward, or raise reward.max_errors"
            )
