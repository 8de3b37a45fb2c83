"""Pauses: that grow, that differ between replicas, that don't stay silent, and that end when there is nobody left to
wait for.

Invariant: nothing here decides anything about a round.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

from composer_replication.collective.object_store.fleet import heartbeat
from composer_replication.errors import RoundTimeout
from composer_replication.store.base import ObjectStore

__all__ = ["backed_off", "duration", "seen", "telling", "watching"]

_log = logging.getLogger("composer_replication")


def telling(clock: Callable[[], float]) -> Callable[[Callable[[], str]], None]:
    """Call what this gives before each pause of a wait: after 10, 30 and 60 s, and then every minute, it logs the line
    that it is given. The wait begins with the first call."""
    began: float | None = None
    due = 10.0

    def tell(line: Callable[[], str]) -> None:
        nonlocal began, due
        now = clock()
        began = now if began is None else began
        if now - began < due:
            return
        while due <= now - began:  # one line, even after a pause that was longer than it should have been
            due = 30.0 if due < 30.0 else 60.0 if due < 60.0 else due + 60.0
        _log.warning("%s", line())

    return tell


def seen(store: ObjectStore, replicas: Sequence[int]) -> str:
    """Who is waited for, and whether they have ever shown themselves: "replica 1, not seen yet"."""
    here = [replica for replica in replicas if heartbeat(store, replica)]
    absent = [replica for replica in replicas if replica not in here]
    parts = [
        f"replica {', '.join(map(str, which))}{what}"
        for which, what in ((here, ""), (absent, ", not seen yet"))
        if which
    ]
    return " and for ".join(parts)


def duration(seconds: float) -> str:
    """890 -> "14 min 50 s"."""
    minutes, rest = divmod(max(round(seconds), 0), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def backed_off(
    least: float,
    most: float,
    jitter: random.Random,
    pause: Callable[[float], None],
    *,
    clock: Callable[[], float],
    timeout_seconds: float,
    waiting_for: str,
    line: Callable[[], str],
) -> Callable[[], None]:
    """Pauses that grow from `least` to `most`, each shortened at random so that replicas don't ask in step. After
    `timeout_seconds` from now the next one raises RoundTimeout, which says what was `waiting_for`. Long before, `line`
    is logged now and then."""
    seconds, give_up, tell = least, clock() + timeout_seconds, telling(clock)

    def next_pause() -> None:
        nonlocal seconds
        if clock() >= give_up:
            raise RoundTimeout(f"{waiting_for} (waited {timeout_seconds:g} s)")
        tell(lambda: f"{line()}; gives up in {duration(give_up - clock())}")
        pause(seconds * (0.5 + 0.5 * jitter.random()))
        seconds = min(seconds * 1.5, most)

    return next_pause


def watching(
    store: ObjectStore,
    round: int,
    others: tuple[int, ...],
    *,
    pause: Callable[[float], None],
    clock: Callable[[], float],
    heartbeat_seconds: float,
    timeout_seconds: float,
) -> Callable[[float], None]:
    """An onlooker's pause. It has no deadline, since the others may train for hours; but when none of their
    heartbeats has moved for `timeout_seconds`, it raises RoundTimeout."""
    marks: dict[int, object] = {}
    since = looked = clock()

    def watchful(seconds: float) -> None:
        nonlocal since, looked
        pause(seconds)
        now = clock()
        if now - looked < heartbeat_seconds:
            return
        looked = now
        for replica in others:
            beat = heartbeat(store, replica)
            mark = (beat.get("incarnation"), beat.get("counter"))
            if marks.get(replica) != mark:
                marks[replica], since = mark, now
        if now - since > timeout_seconds + 2 * heartbeat_seconds:
            raise RoundTimeout(
                f"round {round} of {store.uri} is open, and no heartbeat of replica "
                f"{', '.join(map(str, others))} has moved in {now - since:.0f} s"
            )

    return watchful
