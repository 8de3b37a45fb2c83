"""What lies in the store is damaged, or the service's answers are: nothing is lost, and nothing falls with it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.diloco.serverless import ReplicaHandle
from composer_replication.diloco.serverless.jobs.job_executor import JobExecutor
from composer_replication.diloco.serverless.jobs.marks import Mark, Marks
from composer_replication.errors import ExecutorError
from composer_replication.store import open_store
from tests.launchers.backend import Backend
from tests.launchers.http import Refused, Request, Service
from tests.launchers.test_contract import WAITING, make, specs, started

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

NAME = "run-0-r0-0"


@contextlib.contextmanager
def answering(backend: Backend, store: Path, answer: Callable[[Request], Any]) -> Iterator[JobExecutor]:
    """An executor that has reached its service before; now this is all that it hears."""
    service = Service([(method, ".*", answer) for method in ("GET", "POST", "PUT", "DELETE")])
    executor = make(backend, endpoint=service.url)
    executor.submit_attempts = 1
    executor.check = lambda job: None  # type: ignore[method-assign]
    vars(executor).update(namespace="team", gpu_types={})
    executor.attach(store.as_uri())
    try:
        yield executor
    finally:
        service.close()


@pytest.mark.parametrize("body", [b"<html>sign in</html>", None, [], 3, {}, {"data": None}, {"errors": "no"}])
@pytest.mark.parametrize("backend", ["hf_jobs", "runpod"], indirect=True)
def test_an_answer_that_cannot_be_read_is_no_answer(backend: Backend, tmp_path: Path, body: Any) -> None:
    handle = ReplicaHandle(0, backend.make().backend_name, "job-0", name=NAME)
    with answering(backend, tmp_path, lambda request: body) as executor:
        (present,) = executor.poll([handle])
        assert present.state == "running" and "doesn't answer" in present.reason
        (refused,) = executor.launch_replicas(specs(tmp_path / "another", "pass"))
        # An empty list is an answer to whether there is such a job.
        assert (refused.job_id, refused.state) == ("", "failed") and refused.reason


@pytest.mark.parametrize("backend", ["hf_jobs"], indirect=True)
@pytest.mark.parametrize(
    ("silent", "code", "cancelled", "state"),
    [
        (None, None, False, "running"),  # it may not have begun, or be another account's
        (30.0, None, False, "running"),
        (600.0, None, False, "preempted"),
        (600.0, 0, False, "completed"),
        (600.0, 1, False, "failed"),
        (None, None, True, "cancelled"),
    ],
)
def test_of_a_job_that_the_service_does_not_know_its_replica_has_the_word(
    backend: Backend, tmp_path: Path, silent: float | None, code: int | None, cancelled: bool, state: str
) -> None:
    def nothing(request: Request) -> Any:
        raise Refused(404, {"error": "Job not found"})

    if silent is not None:
        Marks(open_store(tmp_path.as_uri())).mark(Mark(NAME, 0, exit_code=code, seen=time.time() - silent))
    with answering(backend, tmp_path, nothing) as executor:
        handle = ReplicaHandle(0, "hf_jobs", "job-0", name=NAME)
        if cancelled:
            executor.cancel([handle])
        (present,) = executor.poll([handle])
        assert present.state == state and (present.reason or state == "completed")


@pytest.mark.parametrize("backend", ["hf_jobs", "modal"], indirect=True)
def test_a_job_whose_handle_is_lost_or_damaged_is_found_by_its_name(backend: Backend, tmp_path: Path) -> None:
    fleet = specs(tmp_path, WAITING, 2)
    handles = make(backend).launch_replicas(fleet)
    for handle in handles:
        started(backend, handle, "ready")
    lost, damaged = (tmp_path / "launch" / "handles" / f"{replica}.json" for replica in (0, 1))
    lost.unlink()
    damaged.write_bytes(damaged.read_bytes()[:40])
    looker = make(backend)
    found = looker.attach(tmp_path.as_uri())
    assert [one.job_id for one in found] == [one.job_id for one in handles]
    damaged.write_text('{"replica_id": 1, "backend": "elsewhere", "job_id": null}')
    assert [one.job_id for one in make(backend).launch_replicas(fleet)] == [one.job_id for one in handles]
    assert len(backend.engine.containers) == 2
    for handle in handles:  # and what they last said can't be read, either
        (tmp_path / "launch" / "replicas" / str(handle.replica_id) / f"{handle.name}.json").write_text("{}")
    looker.cancel(found)
    assert [one.status for one in looker.collect(found, timeout=60)] == ["cancelled", "cancelled"]


@pytest.mark.parametrize("backend", ["hf_jobs"], indirect=True)
def test_a_service_that_cannot_say_whether_a_lost_job_runs_keeps_the_others_reachable(
    backend: Backend, tmp_path: Path
) -> None:
    marks = Marks(open_store(tmp_path.as_uri()))
    for replica in (0, 1):
        marks.mark(Mark(f"run-0-r{replica}-0", replica))
    marks.save(ReplicaHandle(0, "hf_jobs", "job-0", name=NAME))

    def refused(request: Request) -> Any:
        raise Refused(403)

    with answering(backend, tmp_path, refused) as executor:
        assert [one.replica_id for one in executor.attach(tmp_path.as_uri())] == [0]
        with pytest.raises(ExecutorError, match="could not be asked to stop replica 0: "):
            executor.cancel(executor.attach(tmp_path.as_uri()))


@pytest.mark.parametrize("backend", ["runpod"], indirect=True)
def test_a_key_that_no_request_can_carry_is_not_shown(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "rpa_a-key-of-the-tests"
    monkeypatch.setenv("RUNPOD_API_KEY", f"{key}\r\n")  # as a file holds it
    assert "A100 PCIe" in backend.make().gpu_types  # type: ignore[attr-defined]
    monkeypatch.setenv("RUNPOD_API_KEY", f"{key}\n{key}")
    with pytest.raises(ExecutorError, match="RUNPOD_API_KEY holds characters") as caught:
        make(backend).launch_replicas(specs(tmp_path, "pass"))
    assert key not in str(caught.value)
