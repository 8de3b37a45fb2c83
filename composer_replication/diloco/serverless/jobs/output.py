"""A replica's output, through all of its jobs: connections that break are made again, shipped parts put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from functools import partial

from composer_replication.diloco.serverless.executor import BackendUnavailable, QuotaExceeded
from composer_replication.diloco.serverless.handle import ReplicaHandle
from composer_replication.errors import ReplicationError

__all__ = ["replica_output", "shipped_output"]

logger = logging.getLogger(__name__)

_MOST_BROKEN = 5  # connections one after another, for the output of a job that has ended


def replica_output(
    handle: ReplicaHandle,
    after: int,
    *,
    lines: Callable[[ReplicaHandle], Iterator[str]],
    poll: Callable[[ReplicaHandle], ReplicaHandle],
    newest: Callable[[ReplicaHandle], ReplicaHandle],
    pause: Callable[[], None],
) -> Iterator[str]:
    """The lines from this handle's job on, until the replica has ended; `after` of the first job's are passed over.

    Args:
        lines: a job's output from its first line, until the job or the connection ends.
        poll: the handle as it is now.
        newest: that of the replica's newest job.
        pause: before the same job is asked again.
    """
    broken_at_end = 0
    while handle.job_id:
        told, broken = yield from _told(partial(lines, handle), after, handle.replica_id)
        present, newer = poll(handle), newest(handle)
        broken_at_end = broken_at_end + 1 if broken and present.ended else 0
        if newer.submission > handle.submission:
            handle, after = newer, 0
        elif present.ended and broken_at_end in (0, _MOST_BROKEN):
            return
        else:
            pause()
            after, handle = told, present


def _told(lines: Callable[[], Iterator[str]], after: int, replica: int) -> Generator[str, None, tuple[int, bool]]:
    """Returns (how many lines of this job were told so far, whether the connection broke)."""
    told = after
    try:
        for number, line in enumerate(lines()):
            if number >= after:
                told = number + 1
                yield line
    except Exception as error:
        if isinstance(error, ReplicationError) and not isinstance(error, (BackendUnavailable, QuotaExceeded)):
            raise
        logger.warning("replica %d's log: %s; connecting again", replica, error)
        return told, True
    return told, False


def shipped_output(
    part: Callable[[int], str | None], *, ended: Callable[[], bool], pause: Callable[[], None]
) -> Iterator[str]:
    """The lines of a job's parts 0, 1, … as they come into the store, until the job has ended and no part is left."""
    number, partial = 0, ""
    while True:
        over = ended()  # looked at before reading: what comes after that is read in the next turn
        while (text := part(number)) is not None:
            number += 1
            *lines, partial = (partial + text).split("\n")
            yield from lines
        if over:
            if partial:
                yield partial
            return
        pause()
