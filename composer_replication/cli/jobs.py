"""`logs` and `cancel`: the jobs of a run, from any machine that can read its store and has the back ends' credentials.

Invariant: starts nothing.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from composer_replication.cli.status import place_of
from composer_replication.diloco.serverless.attach import attach
from composer_replication.diloco.serverless.handle import ReplicaHandle

__all__ = ["cancel", "logs"]

_FIRST_SECONDS = 20.0  # until the first line: services take a while to find a log
_QUIET_SECONDS = 2.0  # after a line: no more for now


def logs(uri: str, *, replica: int | None, after: int, follow: bool) -> int:
    if after < 0:
        raise ValueError(f"--after must be 0 or more, not {after}")
    if after and replica is None:
        raise ValueError("--after counts the lines of one replica: give --replica, too")
    executor, handles = attach(place_of(uri))
    chosen = _chosen(handles, replica)
    several = len(chosen) > 1
    for group in [chosen] if follow else [[handle] for handle in chosen]:
        count = after
        for number, line in _lines(executor, group, after, follow):
            count += 1
            print(f"{number} | {line}" if several else line, flush=True)
        (handle,) = group if len(group) == 1 else (None,)
        if handle is not None and not follow and not handle.ended:
            more = f"--replica {handle.replica_id} --after {count}"
            print(f"replica {handle.replica_id}: {count} lines so far; the next: {more}", file=sys.stderr)
    return 0


def _chosen(handles: Sequence[ReplicaHandle], replica: int | None) -> list[ReplicaHandle]:
    chosen = [handle for handle in handles if replica in (None, handle.replica_id)]
    if not chosen:
        there = ", ".join(str(handle.replica_id) for handle in handles)
        raise ValueError(f"--replica {replica}: there is no job of it; there are jobs of replicas {there}")
    return chosen


def _lines(executor: Any, handles: list[ReplicaHandle], after: int, follow: bool) -> Iterator[tuple[int, str]]:
    """(replica, line) as they come; without `follow` until there are no more for now."""
    arrived: queue.Queue[tuple[int, str | BaseException | None]] = queue.Queue()

    def read(handle: ReplicaHandle) -> None:
        try:
            for line in executor.stream_logs(handle, after=after):
                arrived.put((handle.replica_id, line))
            arrived.put((handle.replica_id, None))
        except Exception as error:  # told where the lines are read
            arrived.put((handle.replica_id, error))

    for handle in handles:
        threading.Thread(target=read, args=(handle,), daemon=True).start()
    left, patience = len(handles), _FIRST_SECONDS
    while left:
        try:
            replica, line = arrived.get(timeout=None if follow else patience)
        except queue.Empty:
            return
        if isinstance(line, BaseException):
            raise line
        if line is None:
            left -= 1
        else:
            patience = _QUIET_SECONDS
            yield replica, line


def cancel(uri: str, *, replica: int | None) -> int:
    executor, handles = attach(place_of(uri))
    present = executor.poll(_chosen(handles, replica))
    running = [handle for handle in present if handle.job_id and not handle.ended]
    for handle in present:
        if handle not in running:
            print(f"replica {handle.replica_id}: {handle.state} already")
    if running:
        executor.cancel(running)
        for handle in running:
            print(f"replica {handle.replica_id}: asked {handle.backend} to stop job {handle.job_id}")
        print("each writes a checkpoint if the service gives it the time, and is not started again")
    return 0
