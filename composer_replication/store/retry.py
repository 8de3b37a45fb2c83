"""Trying again: pauses that grow, with jitter, inside a time limit.

Invariant: nothing is begun after the limit, and two callers that fail together don't come back together. A thread that
obeys an event begins nothing again once it is set.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["Retry", "obey"]

_thread = threading.local()


def obey(stop: threading.Event) -> None:
    """From now on, operations of this thread aren't tried again once `stop` is set, and pauses end with it."""
    _thread.stop = stop


def _pause(seconds: float) -> None:
    stop: threading.Event | None = getattr(_thread, "stop", None)
    if stop is None:
        time.sleep(seconds)
    else:
        stop.wait(seconds)


def _stopped() -> bool:
    stop: threading.Event | None = getattr(_thread, "stop", None)
    return stop is not None and stop.is_set()


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How long an operation that failed in a passing way is tried again, and with which pauses.

    `seconds` counts from the operation's start; 0 means one try. The pause after the n-th failure is between half and
    all of `first_pause_seconds` · 2ⁿ, at most `max_pause_seconds`. Clock, sleep and jitter are for tests.
    """

    seconds: float = 30.0
    first_pause_seconds: float = 0.1
    max_pause_seconds: float = 5.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = _pause
    jitter: Callable[[], float] = random.random  # in [0, 1)

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise ValueError(f"retry_seconds must not be negative, got {self.seconds}")
        for name in ("first_pause_seconds", "max_pause_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be greater than 0, got {getattr(self, name)}")

    def pauses(self) -> Iterator[None]:
        """Yields before each try: at once, then after a pause; ends when the next try would begin after the limit,
        or when this thread is to stop (`obey`)."""
        give_up = self.clock() + self.seconds
        longest = self.first_pause_seconds
        while True:
            yield
            pause = longest * (0.5 + 0.5 * self.jitter())
            if _stopped() or self.clock() + pause > give_up:
                return
            self.sleep(pause)
            if _stopped():
                return
            longest = min(2 * longest, self.max_pause_seconds)
