"""The thin loop that carries a round's actions out: a real store, a real clock, and what came of each action.

Invariant: decides nothing. `advance` decides; this reads, writes, sleeps and reports.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from composer_replication.collective.object_store.events import (
    Action,
    Create,
    Done,
    Event,
    Fail,
    Fetch,
    Found,
    Job,
    Missing,
    Read,
    Reduce,
    Sleep,
    Started,
    Upload,
    Woke,
    Written,
)
from composer_replication.collective.object_store.round import State, advance, begin
from composer_replication.collective.object_store.shards import ShardWork, Trace
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES
from composer_replication.errors import ObjectExists, ObjectMissing
from composer_replication.store.base import ObjectStore

__all__ = ["drive"]


def drive(
    job: Job,
    work: ShardWork,
    store: ObjectStore,
    *,
    clock: Callable[[], float],
    pause: Callable[[float], None],
    trace: Trace,
    jitter: random.Random,
    waits: Callable[[State], None],
) -> Done | Fail:
    """Run one round to its end. `pause` waits for `work`, and raises when this process is to stop waiting; `waits` is
    called before each pause. No thread of `work` is left afterwards."""
    try:
        state, action = advance(begin(job), Started(), clock())
        while not isinstance(action, Done | Fail):
            if isinstance(action, Sleep):
                waits(state)
            event = _act(action, work, store, pause, trace, jitter)
            state, action = advance(state, event, clock())
        return action
    except BaseException:
        work.give_up()
        raise
    finally:
        work.settle()


def _act(
    action: Action,
    work: ShardWork,
    store: ObjectStore,
    pause: Callable[[float], None],
    trace: Trace,
    jitter: random.Random,
) -> Event:
    match action:
        case Read(key):
            try:
                return Found(store.get(key, max_bytes=MAX_POINTER_BYTES))
            except ObjectMissing:
                return Missing()
        case Create(key, data, step):
            trace(f"before:{step}")
            try:
                store.put_if_absent(key, data)
            except ObjectExists:
                pass  # someone was first, or our own first try was: what is there is read next
            trace(f"after:{step}")
            return Written()
        case Upload(attempt):
            return work.upload(attempt)
        case Reduce():
            return work.reduce(action)
        case Fetch():
            return work.fetch(action)
        case Sleep(seconds):
            # Jitter only ever shortens, so that a deadline isn't slept past; replicas stop asking in step.
            pause(seconds * (0.5 + 0.5 * jitter.random()))
            return Woke()
        case Done() | Fail():
            raise AssertionError("the round is over")
