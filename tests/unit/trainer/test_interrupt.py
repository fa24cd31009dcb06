"""What a run says when a signal asks it to stop."""

import signal

import pytest

from verl.trainer.run.interrupt import Interrupt


class Loop:
    def __init__(self) -> None:
        self.stop_requested, self.said = 0, ""

    def note(self, line: str) -> None:
        self.said += line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_only_ctrl_c_is_told_to_be_pressed_again(number: signal.Signals):
    loop = Loop()
    with Interrupt(loop):
        signal.raise_signal(number)
    assert loop.stop_requested == number and "stopping after this step" in loop.said
    assert ("Ctrl-C again" in loop.said) == (number == signal.SIGINT)
