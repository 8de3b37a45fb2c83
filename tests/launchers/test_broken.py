"""What lies in the store is damaged, or the service's answers are: nothing is lost, and nothing falls with it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.diloco.serverless import ReplicaHandle
from composer_replication.diloco.serverless.backends.runpod import ask
from composer_replication.diloco.serverless.executor import BackendUnavailable, JobGone, QuotaExceeded
from composer_replication.diloco.serverless.jobs.job_executor import JobExecutor
from composer_replication.diloco.serverless.jobs.marks import Mark, Marks
from composer_replication.errors import ExecutorError
from composer_replication.store import open_store
from tests.launchers.backend import Backend
from tests.launchers.conftest import BACKENDS
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
        (600.0, None, True, "cancelled"),
        (5.0, 1, True, "cancelled"),
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


@pytest.mark.parametrize("backend", ["hf_jobs"], indirect=True)
def test_a_service_that_does_not_know_a_living_job_has_stopped_nothing(backend: Backend, tmp_path: Path) -> None:
    (handle,) = make(backend).launch_replicas(specs(tmp_path, WAITING))
    container = started(backend, handle, "ready")
    executor = make(backend)
    executor.attach(tmp_path.as_uri())

    def gone(job_id: str) -> Any:
        raise JobGone("there is no such job")

    vars(executor).update(look=gone, stop_job=gone)  # as if with the credentials of another account
    with pytest.raises(ExecutorError, match="no such job; but its replica was alive .* s ago: another account's"):
        executor.cancel([handle])
    (present,) = executor.poll([handle])
    assert present.state == handle.state and "no such job" in present.reason and not container.ended
    executor = make(backend)
    executor.attach(tmp_path.as_uri())
    executor.cancel([present])
    assert executor.collect([present], timeout=60)[0].status == "cancelled"


@pytest.mark.parametrize("backend", ["hf_jobs", "runpod", "azure_ml"], indirect=True)
def test_a_job_that_ended_in_vain_and_that_the_service_has_forgotten_is_not_begun_under_its_name(
    backend: Backend, tmp_path: Path
) -> None:
    executor = make(backend)
    name = executor.job(specs(tmp_path, "pass")[0], 3).name
    Marks(open_store(tmp_path.as_uri())).mark(Mark(name, 0, "failed", exit_code=1, seen=time.time()))
    (handle,) = executor.launch_replicas(specs(tmp_path, "print('anew')"))
    assert handle.submission == 4 and executor.collect([handle], timeout=60)[0].status == "completed"
    assert "anew" in backend.container(handle.job_id).lines


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "local"], indirect=True)
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


@pytest.mark.parametrize(
    ("backend", "settings", "words"),
    [
        ("sagemaker", {"region": None}, "region: none is given"),
        ("vertex", {"project": None}, "project isn't given"),
    ],
    indirect=["backend"],
)
def test_what_is_missing_here_is_no_answer_of_the_service(
    backend: Backend, tmp_path: Path, settings: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    Marks(open_store(tmp_path.as_uri())).mark(Mark(NAME, 0))
    assert make(backend, **settings).attach(tmp_path.as_uri()) == []
    assert words in caplog.text and "can't read" not in caplog.text


@pytest.mark.parametrize("backend", ["hf_jobs"], indirect=True)
def test_a_refusal_on_the_way_to_an_answer_is_told_as_it_is(backend: Backend, tmp_path: Path) -> None:
    def no_credit(request: Request) -> Any:
        raise Refused(402)

    with answering(backend, tmp_path, no_credit) as executor:
        del vars(executor)["namespace"]
        job = executor.job(specs(tmp_path, "pass")[0])
        for asking in (executor.find_job, lambda _: list(executor.follow("job-0"))):
            with pytest.raises(QuotaExceeded, match=r"^Hugging Face Jobs: (?!.*Hugging Face Jobs)"):
                asking(job)


def test_an_answer_is_cut_only_after_what_is_secret_was_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", "rpa_key")
    service = Service([("POST", ".*", lambda request: ["x" * 190 + "s3cr3t-value"])])
    try:
        with pytest.raises(BackendUnavailable, match="isn't GraphQL") as caught:
            ask("query", {}, service.url, hidden=["s3cr3t-value"])
    finally:
        service.close()
    assert "x" * 190 in str(caught.value) and "s3" not in str(caught.value)
