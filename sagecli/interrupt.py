"""Ctrl-C and SIGTERM as a request that the run answers at a safe moment."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LEFT_BEHIND = "a call that did not come back"
"""Name of a thread that may never end: the interpreter would abort while it waits for it or takes it down."""


class Interrupted(Exception):
    """The user or the system asked the run to end; exit_code is 130 for Ctrl-C, 143 for SIGTERM."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)  # so that it can be sent to another process
        self.exit_code = 128 + signum

    def __str__(self) -> str:
        return signal.Signals(self.exit_code - 128).name


class StopRequest:
    """The first signal is remembered for `check` to raise; a second one acts at once.

    Within two seconds it is taken for the same: schedulers signal every process, and a launcher passes it on.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._when = 0.0
        self._before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
        for signum in self._before:
            signal.signal(signum, self._remember)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._received is None:
            self._received, self._when = signum, now
        elif now - self._when > 2:
            self.close()
            os.kill(os.getpid(), signum)

    def close(self) -> None:
        """Give the signals back."""
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def check(self) -> None:
        """Raise Interrupted where a signal came."""
        if self._received is not None:
            raise Interrupted(self._received)


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Signals are requests within the block."""
    request = StopRequest()
    try:
        yield request
    finally:
        request.close()
