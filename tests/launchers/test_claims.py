"""Two launchers of one run at the same moment: one of them submits, the other finds what it has submitted."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from composer_replication.diloco.serverless.jobs.marks import CLAIM_SECONDS, Marks
from composer_replication.store import MemoryStore
from tests.launchers.backend import Backend
from tests.launchers.test_contract import make, specs

pytestmark = pytest.mark.processes


def test_a_claim_is_one_launchers_until_it_gives_up_or_goes_stale() -> None:
    store = MemoryStore()
    marks = Marks(store)
    first = marks.claim("run-0-r0-0", 1000.0)
    assert first is not None and marks.claim("run-0-r0-0", 1000.0) is None
    assert marks.claim("run-0-r0-1", 1000.0) is not None, "another job"
    second = marks.claim("run-0-r0-0", 1000.0 + CLAIM_SECONDS)
    assert second is not None
    marks.give_up(first)  # too late to say
    assert marks.claim("run-0-r0-0", 1001.0 + CLAIM_SECONDS) is None
    marks.give_up(second)
    third = marks.claim("run-0-r0-0", 1001.0 + CLAIM_SECONDS)
    assert third is not None
    store.put(third, b"\xff damaged")
    assert marks.claim("run-0-r0-0", 1001.0 + CLAIM_SECONDS) is not None


@pytest.mark.parametrize("backend", ["hf_jobs", "runpod"], indirect=True)
def test_what_one_is_submitting_the_other_waits_for(backend: Backend, tmp_path: Path) -> None:
    fleet = specs(tmp_path, "pass")
    first, second = make(backend), make(backend)
    submit, begun, waited = first.submit_job, threading.Event(), threading.Event()

    def slowly(job: Any) -> str:
        begun.set()
        assert waited.wait(60)
        return submit(job)

    first.submit_job = slowly  # type: ignore[method-assign]
    with ThreadPoolExecutor() as pool:
        launched = pool.submit(first.launch_replicas, fleet)

        def wait(seconds: float) -> None:
            waited.set()
            launched.result(timeout=60)

        second.sleep = wait  # type: ignore[assignment]
        try:
            assert begun.wait(60)
            handles = second.launch_replicas(fleet)
        finally:
            waited.set()
        assert handles[0].job_id == launched.result(timeout=60)[0].job_id
    assert len(backend.engine.containers) == 1


@pytest.mark.parametrize("backend", ["hf_jobs"], indirect=True)
def test_nobody_waits_for_a_submission_that_was_refused(backend: Backend, tmp_path: Path) -> None:
    fleet = specs(tmp_path, "pass")
    first, second = make(backend), make(backend)
    first.submit_attempts = 1
    backend.engine.refuse("outage")
    assert first.launch_replicas(fleet)[0].job_id == ""
    second.sleep = lambda seconds: pytest.fail("nothing to wait for")  # type: ignore[assignment]
    assert second.launch_replicas(fleet)[0].job_id


@pytest.mark.parametrize("backend", ["hf_jobs"], indirect=True)
def test_who_waits_in_vain_says_for_what(backend: Backend, tmp_path: Path) -> None:
    (spec,) = specs(tmp_path, "pass")
    executor, pauses = make(backend), []
    executor.submit_attempts, executor.sleep = 1, pauses.append  # type: ignore[assignment]
    executor.clock = lambda: 1000.0  # type: ignore[assignment]
    executor.marks(spec.rendezvous_uri).claim(executor.job(spec).name, 1000.0)
    (refused,) = executor.launch_replicas([spec])
    assert (refused.job_id, refused.reason) == ("", f"another launcher is submitting {executor.job(spec).name}")
    assert sum(pauses) >= CLAIM_SECONDS and backend.engine.containers == []
