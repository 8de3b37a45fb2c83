"""Pauses: that grow, that differ between replicas, and that end when there is nobody left to wait for.

Invariant: nothing here decides anything about a round.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from composer_replication.collective.object_store.fleet import heartbeat
from composer_replication.errors import RoundTimeout
from composer_replication.store.base import ObjectStore

__all__ = ["backed_off", "watching"]


def backed_off(
    least: float,
    most: float,
    jitter: random.Random,
    pause: Callable[[float], None],
    *,
    clock: Callable[[], float],
    timeout_seconds: float,
    waiting_for: str,
) -> Callable[[], None]:
    """Pauses that grow from `least` to `most`, each shortened at random so that replicas don't ask in step. After
    `timeout_seconds` from now the next one raises RoundTimeout, which says what was `waiting_for`."""
    seconds, give_up = least, clock() + timeout_seconds

    def next_pause() -> None:
        nonlocal seconds
        if clock() >= give_up:
            raise RoundTimeout(f"{waiting_for} (waited {timeout_seconds:g} s)")
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
    seen: dict[int, object] = {}
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
            if seen.get(replica) != mark:
                seen[replica], since = mark, now
        if now - since > timeout_seconds + 2 * heartbeat_seconds:
            raise RoundTimeout(
                f"round {round} of {store.uri} is open, and no heartbeat of replica "
                f"{', '.join(map(str, others))} has moved in {now - since:.0f} s"
            )

    return watchful
