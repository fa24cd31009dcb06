"""What is said of a reward call that lets no other thread of the process run."""

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Iterator

HELD_S = 10.0  # beyond the limit of a call, in which no other thread has had a turn
POLL_S = 0.25


class HeldInterpreterTimer:
    """While calls run, prints the stacks of all threads when one lets no other run, as a regular expression can.

    Then neither a limit nor a thread of ours gets a turn; faulthandler's timer does. To set it costs more than a short
    call, so that a thread does it, once per poll, until no call has run at a poll.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_runs = 0
        self._timeout_s = 0.0  # the longest of the runs since the timer was set first
        self._is_set = False
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()

    @contextlib.contextmanager
    def while_running(self, timeout_s: float | None) -> Iterator[None]:
        if timeout_s is None:
            yield
            return
        with self._lock:
            self._num_runs += 1
            if not self._is_set or timeout_s > self._timeout_s:
                self._timeout_s = max(self._timeout_s, timeout_s)
                self._set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._keep_set, name="reward timer", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._num_runs -= 1

    def _set(self) -> None:
        self._is_set = True
        self._wanted.set()
        with contextlib.suppress(ValueError, OSError, AttributeError, RuntimeError):  # a stderr without a file
            faulthandler.dump_traceback_later(self._timeout_s + HELD_S, repeat=True, file=sys.__stderr__ or sys.stderr)

    def _keep_set(self) -> None:
        while True:
            self._wanted.wait()
            time.sleep(POLL_S)
            with self._lock:
                if self._num_runs:
                    self._set()  # anew: this thread has had a turn
                else:
                    faulthandler.cancel_dump_traceback_later()
                    self._is_set, self._timeout_s = False, 0.0
                    self._wanted.clear()


held_interpreter = HeldInterpreterTimer()  # faulthandler has one timer per process
