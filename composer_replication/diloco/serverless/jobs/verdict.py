"""How a job stands, from what its service says and what the replica itself has left in the store.

Invariant: pure. The replica's word goes over the service's: services lose exit codes, count a preemption as a failure,
or call a job that never began completed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from composer_replication.diloco.serverless.exit_codes import Exit, again, describe
from composer_replication.diloco.serverless.handle import ENDED, ReplicaHandle
from composer_replication.diloco.serverless.jobs.job import Seen
from composer_replication.diloco.serverless.jobs.marks import Mark

__all__ = ["Budgets", "judge", "next_job"]

SILENT_SECONDS = 300.0


@dataclass(frozen=True)
class Budgets:
    """How often a replica may be started again, by what ended it, whoever runs it."""

    restarts: int = 3  # its machine was taken, it was killed, its store had failed, the service's time was over
    error_restarts: int = 0  # an exception in its own code
    backoff_seconds: float = 10.0  # before the first of them; doubles with each, to ten minutes

    def __post_init__(self) -> None:
        for name in ("restarts", "error_restarts", "backoff_seconds"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")

    @property
    def all(self) -> int:
        return self.restarts + self.error_restarts

    def allow(self, kind: str, *, preemptions: int, errors: int) -> bool:
        """Another start after an end of this kind (`exit_codes.again`), when there were so many starts after each?"""
        used = {"preemption": (preemptions, self.restarts), "error": (errors, self.error_restarts)}
        done, allowed = used.get(kind, (0, 0))
        return done < allowed

    def pause_seconds(self, done: int) -> float:
        """Before the start that comes after so many others."""
        return min(600.0, self.backoff_seconds * 2.0**done)


def judge(handle: ReplicaHandle, seen: Seen, mark: Mark | None, *, asked_to_stop: bool, now: float) -> ReplicaHandle:
    """The handle with its present state. `will_retry` is the service's own; ours is `next_job`'s."""
    code = mark.exit_code if mark is not None and mark.exit_code is not None else seen.exit_code
    attempt = handle.submission + max(seen.attempt, mark.starts if mark is not None else 1)
    state, reason = seen.state, seen.reason
    if state in ENDED and not seen.will_retry:
        state, reason = _ended(seen, mark, code, asked_to_stop)
    elif state == "running":
        if mark is None:
            state, reason = "pending", reason or "its container hasn't begun yet"
        elif mark.state == "running" and now - mark.seen > SILENT_SECONDS:
            reason = f"no sign of life for {now - mark.seen:.0f} s"
        code = None
    return replace(
        handle,
        state=state,
        reason=reason,
        native=seen.native,
        exit_code=code,
        attempt=attempt,
        will_retry=seen.will_retry,
        log_url=seen.log_url or handle.log_url,
    )


def _ended(seen: Seen, mark: Mark | None, code: int | None, asked_to_stop: bool) -> tuple[str, str]:
    if code == Exit.COMPLETED and mark is not None:
        return "completed", seen.reason
    if asked_to_stop:
        return "cancelled", seen.reason or "it was asked to stop"
    if mark is None:
        if seen.state == "completed":
            return "failed", seen.reason or "the job ended without a word from the replica: did its container start?"
        return seen.state, seen.reason
    if seen.timed_out:  # whatever the replica made of being asked to stop
        return seen.state, seen.reason
    if code is None:  # it had begun and left no word on its end: killed, with its machine or by the service
        ended = "cancelled" if seen.state == "cancelled" else "preempted"
        return ended, seen.reason or "it ended without a last word: its machine was taken, or it was killed"
    if seen.state == "preempted" or again(code) == "preemption":
        return "preempted", seen.reason or describe(code)
    return ("failed" if seen.state == "completed" else seen.state), seen.reason or describe(code)


def next_job(handle: ReplicaHandle, budgets: Budgets, now: float) -> ReplicaHandle:
    """An ended handle, with `will_retry` and `retry_at` if another job is due for its replica."""
    if handle.state == "preempted":
        kind = "preemption"
    elif handle.state == "failed" and handle.exit_code is not None:
        kind = again(handle.exit_code)
    else:
        kind = ""
    if not budgets.allow(kind, preemptions=handle.preemptions, errors=handle.errors):
        return replace(handle, will_retry=False, retry_at=None)
    retry_at = handle.retry_at
    if retry_at is None:
        retry_at = now + budgets.pause_seconds(handle.preemptions + handle.errors)
    return replace(handle, will_retry=True, retry_at=retry_at)
