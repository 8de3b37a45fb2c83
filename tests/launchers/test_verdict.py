"""How a job stands, by what its service says, what the replica's own word is, and whether somebody asked it to stop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from composer_replication.diloco.serverless.exit_codes import Exit
from composer_replication.diloco.serverless.handle import ReplicaHandle
from composer_replication.diloco.serverless.jobs.job import Seen
from composer_replication.diloco.serverless.jobs.marks import Mark
from composer_replication.diloco.serverless.jobs.verdict import SILENT_SECONDS, Budgets, judge, next_job

HANDLE = ReplicaHandle(0, "modal", "id", name="run-r0-0")
NOW = 1000.0


def word(code: int | None = None, *, seen: float = NOW, starts: int = 1) -> Mark:
    return Mark("run-r0-0", 0, state="running" if code is None else "ended", exit_code=code, seen=seen, starts=starts)


def verdict(said: Seen, mark: Mark | None, *, asked: bool = False) -> ReplicaHandle:
    return judge(HANDLE, said, mark, asked_to_stop=asked, now=NOW)


def ended(state: str, **more: object) -> Seen:
    return Seen(state, state.upper(), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("said", "mark", "asked", "state", "code"),
    [
        # The replica's word goes over the service's.
        (ended("failed", exit_code=137), word(0), False, "completed", 0),
        (ended("preempted"), word(0), True, "completed", 0),
        (ended("completed"), word(1), False, "failed", 1),
        (ended("completed"), word(Exit.PREEMPTED), False, "preempted", 75),
        (ended("failed", exit_code=1), word(-9), False, "preempted", -9),
        # Without a word, a service that calls it completed isn't believed, and else is.
        (ended("completed"), None, False, "failed", None),
        (ended("completed", exit_code=0), None, False, "failed", 0),
        (ended("failed", exit_code=1), None, False, "failed", 1),
        (ended("preempted"), None, False, "preempted", None),
        # It had begun, and left no last word.
        (ended("completed"), word(), False, "preempted", None),
        (ended("failed"), word(), False, "preempted", None),
        (ended("cancelled"), word(), False, "cancelled", None),
        # Somebody asked for it, or its time was over.
        (ended("failed"), word(Exit.PREEMPTED), True, "cancelled", 75),
        (ended("completed"), None, True, "cancelled", None),
        (ended("failed", timed_out=True), word(Exit.PREEMPTED), False, "failed", 75),
    ],
)
def test_an_ended_job(said: Seen, mark: Mark | None, asked: bool, state: str, code: int | None) -> None:
    found = verdict(said, mark, asked=asked)
    assert (found.state, found.exit_code, found.native) == (state, code, said.native)
    assert found.reason or state == "completed" or mark is None or said.timed_out  # which has words of its own


def test_a_job_that_runs() -> None:
    running = Seen("running", "RUNNING", attempt=2)
    assert verdict(running, None).state == "pending" and "hasn't begun" in verdict(running, None).reason
    alive, silent = (verdict(running, word(seen=NOW - seconds)) for seconds in (SILENT_SECONDS, SILENT_SECONDS + 1))
    assert (alive.state, alive.reason, silent.state) == ("running", "", "running")
    assert silent.reason == "no sign of life for 301 s"
    # Starts count by whoever has seen more of them, on top of the jobs before this one.
    assert [verdict(running, word(starts=n)).attempt for n in (1, 4)] == [2, 4]
    assert judge(replace(HANDLE, submission=3), running, word(), asked_to_stop=False, now=NOW).attempt == 5


@pytest.mark.parametrize(
    ("handle", "again"),
    [
        (replace(HANDLE, state="preempted", preemptions=1), True),
        (replace(HANDLE, state="preempted", preemptions=2), False),
        (replace(HANDLE, state="failed", exit_code=Exit.STORE, preemptions=1, errors=9), True),
        (replace(HANDLE, state="failed", exit_code=Exit.ERROR, preemptions=9), True),
        (replace(HANDLE, state="failed", exit_code=Exit.ERROR, errors=1), False),
        (replace(HANDLE, state="failed", exit_code=Exit.SETTINGS), False),
        (replace(HANDLE, state="failed", exit_code=Exit.FENCED), False),
        (replace(HANDLE, state="failed", exit_code=None), False),
        (replace(HANDLE, state="completed", exit_code=0), False),
        (replace(HANDLE, state="cancelled", exit_code=Exit.PREEMPTED), False),
    ],
)
def test_whether_another_job_is_due(handle: ReplicaHandle, again: bool) -> None:
    found = next_job(handle, Budgets(restarts=2, error_restarts=1), NOW)
    assert (found.will_retry, found.retry_at is not None) == (again, again)


def test_the_pause_before_it_doubles_to_ten_minutes_and_is_set_once() -> None:
    budgets = Budgets(restarts=20, backoff_seconds=10.0)
    starts = [next_job(replace(HANDLE, state="preempted", preemptions=n), budgets, NOW).retry_at for n in range(8)]
    assert starts == [NOW + seconds for seconds in (10, 20, 40, 80, 160, 320, 600, 600)]
    waiting = next_job(replace(HANDLE, state="preempted"), budgets, NOW)
    assert next_job(waiting, budgets, NOW + 5.0) == waiting
