"""What a rank says that ends because another one is lost."""

import os
import signal
from pathlib import Path

import pytest

from verl.trainer.run.interrupt import BeforeFirstStep
from verl.trainer.sft import lost_ranks
from verl.utils.errors import Interrupted


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the launcher; the process goes on, with the exit code in a SystemExit."""

    def exit_now(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(lost_ranks, "exit_now", exit_now)
    monkeypatch.setenv(lost_ranks.REPORTS, str(tmp_path))
    return tmp_path


def test_a_rank_that_is_told_to_end_while_it_ends_for_a_lost_one_says_so(reports: Path):
    with pytest.raises(Interrupted) as stopped, BeforeFirstStep():
        try:
            raise RuntimeError("[gloo] Connection closed by peer")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # from the launcher, which has seen that the other is gone
    with pytest.raises(SystemExit, match="1"):
        lost_ranks.end_if_rank_lost(stopped.value, 0, reports)
    report = (reports / "rank_0.txt").read_text()
    assert report.endswith("RuntimeError: [gloo] Connection closed by peer\n") and "KeyboardInterrupt" not in report


def test_a_rank_that_is_only_told_to_end_goes_on_to_say_that(reports: Path):
    with pytest.raises(Interrupted) as stopped, BeforeFirstStep():
        os.kill(os.getpid(), signal.SIGTERM)
    lost_ranks.end_if_rank_lost(stopped.value, 0, reports)
    assert not list(reports.iterdir())
