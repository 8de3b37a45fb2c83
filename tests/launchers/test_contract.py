"""What every back end must do, over its real client: one suite for all of them."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_replication.diloco.serverless import CollectTimeout, ReplicaHandle, ReplicaSpec, ServerlessExecutor
from composer_replication.diloco.serverless.executor import BackendUnavailable
from composer_replication.diloco.serverless.jobs.job_executor import JobExecutor
from composer_replication.errors import ExecutorError
from tests.launchers.backend import Backend
from tests.launchers.engine import Container

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

AWKWARD = "quotes ' \" `, $HOME, a\nnewline, a \\ and ünïcode"


def specs(store: Path, script: str, count: int = 1, **more: Any) -> list[ReplicaSpec]:
    command = ("python", "-u", "-c", script)
    return [ReplicaSpec(i, count, store.as_uri(), command=command, **more) for i in range(count)]


def make(backend: Backend, **settings: Any) -> JobExecutor:
    executor = backend.make(**{"backoff_seconds": 0.0, **settings})
    executor.poll_seconds = executor.log_pause_seconds = executor.submit_backoff_seconds = 0.02
    return executor


def until(executor: JobExecutor, handle: ReplicaHandle, state: str, seconds: float = 60.0) -> ReplicaHandle:
    deadline = time.monotonic() + seconds
    while handle.state != state:
        assert time.monotonic() < deadline, handle
        executor.wait([handle], 0.02)
        (handle,) = executor.poll([handle])
    return handle


def started(backend: Backend, handle: ReplicaHandle, line: str) -> Container:
    container = backend.container(handle.job_id)
    backend.engine.wait_for(lambda: any(line in one for one in container.lines) or container.ended)
    assert not container.ended, container.lines
    return container


WAITING = "import sys; print('ready'); sys.stdout.flush(); import threading; threading.Event().wait()"


def test_it_offers_the_verbs(backend: Backend) -> None:
    executor = make(backend)
    assert isinstance(executor, ServerlessExecutor) and executor.backend_name in type(executor).__module__
    assert executor.default_scheme in ("s3", "gs", "az", "hf", "file")


def test_replicas_run_to_their_end_with_logs_and_results(backend: Backend, tmp_path: Path) -> None:
    script = (
        "import os, json; print('replica', os.environ['COMPOSER_REPLICATION_REPLICA'], 'of',"
        " os.environ['COMPOSER_REPLICATION_REPLICAS'], os.environ['COLOUR']); print(repr(os.environ['AWKWARD']))"
    )
    executor = make(backend, env={"COLOUR": "red", "AWKWARD": AWKWARD})
    handles = executor.launch_replicas(specs(tmp_path, script, 2))
    assert all(handle.job_id and handle.backend == executor.backend_name for handle in handles)
    lines = [list(executor.stream_logs(handle)) for handle in handles]
    results = executor.collect(handles, timeout=60)
    ends = [(r.replica_id, r.status, r.metrics["exit_code"]) for r in results]
    assert ends == [(0, "completed", 0), (1, "completed", 0)]
    assert results[0].metrics["preemption_rate"] == 0
    for replica in (0, 1):
        assert f"replica {replica} of 2 red" in lines[replica] and repr(AWKWARD) in lines[replica]
        if executor.backend_name != "local":  # a container first says what it is, and tries the store
            assert lines[replica][0].startswith(f"job {handles[replica].name}: replica {replica} of 2 on ")
            assert any(line.startswith("store file://") and line.endswith(": ok") for line in lines[replica])


def test_an_awkward_command_arrives_as_it_is(backend: Backend, tmp_path: Path) -> None:
    command = ("python", "-c", "import sys\nprint(repr(sys.argv[1:]))", AWKWARD, "--flag=$(date)", "")
    executor = make(backend)
    (handle,) = executor.launch_replicas([ReplicaSpec(0, 1, tmp_path.as_uri(), command=command)])
    assert repr(list(command[3:])) in list(executor.stream_logs(handle))


def test_logs_come_while_it_runs_and_go_on_after_a_cursor(backend: Backend, tmp_path: Path) -> None:
    script = (
        f"import os, pathlib, time\nprint('one')\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists():"
        " time.sleep(0.01)\nprint('two')"
    )
    executor = make(backend)
    (handle,) = executor.launch_replicas(specs(tmp_path, script))
    lines, seen = executor.stream_logs(handle), 0
    for line in lines:
        seen += 1
        if line == "one":
            break
    lines.close()  # type: ignore[attr-defined]
    assert until(executor, handle, "running").state == "running"
    again = executor.stream_logs(handle, after=seen)
    (tmp_path / "go").touch()
    rest = list(again)
    assert rest[0] == "two" and "one" not in rest


def test_an_exit_code_is_kept_and_an_error_of_its_own_is_final(backend: Backend, tmp_path: Path) -> None:
    executor = make(backend)
    (result,) = executor.collect(
        executor.launch_replicas(specs(tmp_path, "print('oh'); raise SystemExit(1)")), timeout=60
    )
    assert (result.status, result.metrics["exit_code"], result.metrics["attempts"]) == ("failed", 1, 1)
    assert result.metrics["error"]


def test_errors_and_preemptions_have_budgets_of_their_own(backend: Backend, tmp_path: Path) -> None:
    executor = make(backend, restarts=0, error_restarts=1)
    (result,) = executor.collect(executor.launch_replicas(specs(tmp_path, "raise SystemExit(1)")), timeout=90)
    assert (result.status, result.metrics["attempts"], result.metrics["preemptions"]) == ("failed", 2, 0)


def test_cancel_stops_it_in_order(backend: Backend, tmp_path: Path) -> None:
    script = (
        "import signal, sys, threading\n"
        "def stop(*_):\n    print('saving'); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, stop)\nprint('ready')\nthreading.Event().wait()"
    )
    executor = make(backend)
    (handle,) = executor.launch_replicas(specs(tmp_path, script))
    container = started(backend, handle, "ready")
    executor.cancel([handle])
    handle = until(executor, handle, "cancelled")
    assert handle.ended and "saving" in container.lines
    executor.cancel([handle])  # harmless
    assert executor.collect([handle], timeout=60)[0].status == "cancelled"


def test_a_machine_that_goes_is_a_preemption_and_the_replica_comes_back(backend: Backend, tmp_path: Path) -> None:
    script = (
        f"import pathlib, threading\nseen = pathlib.Path({str(tmp_path / 'seen')!r})\n"
        "if not seen.exists():\n    seen.touch(); print('ready'); threading.Event().wait()\nprint('second')"
    )
    executor = make(backend)
    (handle,) = executor.launch_replicas(specs(tmp_path / "store", script))
    container = started(backend, handle, "ready")
    backend.engine.take_machine(container, retried=backend.retries_itself)
    (result,) = executor.collect([handle], timeout=90)
    assert (result.status, result.metrics["attempts"]) == ("completed", 2)
    if not backend.retries_itself:
        assert (result.metrics["preemptions"], result.metrics["preemption_rate"]) == (1, 0.5)


def test_preemptions_beyond_the_budget_are_final(backend: Backend, tmp_path: Path) -> None:
    executor = make(backend, restarts=0)
    (handle,) = executor.launch_replicas(specs(tmp_path, WAITING))
    backend.engine.take_machine(started(backend, handle, "ready"))
    (result,) = executor.collect([handle], timeout=60)
    assert result.status == "preempted" and result.metrics["attempts"] == 1


def test_a_partial_launch_gives_all_handles_and_can_be_cancelled(backend: Backend, tmp_path: Path, caplog: Any) -> None:
    executor = make(backend, max_concurrent_launches=1)
    executor.submit_attempts = 1
    backend.engine.refuse("", "quota")
    with caplog.at_level(logging.WARNING):
        handles = executor.launch_replicas(specs(tmp_path, WAITING, 3))
    assert [bool(handle.job_id) for handle in handles] == [True, False, True]
    assert handles[1].state == "failed" and handles[1].reason and "did not take replica 1" in caplog.text
    executor.cancel(handles)
    assert [r.status for r in executor.collect(handles, timeout=60)] == ["cancelled", "failed", "cancelled"]


def test_a_full_service_is_asked_again(backend: Backend, tmp_path: Path) -> None:
    executor = make(backend)
    backend.engine.refuse("quota", "outage", "quota")
    pauses: list[float] = []
    executor.sleep = pauses.append  # type: ignore[assignment]
    (handle,) = executor.launch_replicas(specs(tmp_path, "pass"))
    assert handle.job_id and len(pauses) == 3
    del executor.sleep
    assert executor.collect([handle], timeout=60)[0].status == "completed"


def test_launching_twice_starts_nothing_twice(backend: Backend, tmp_path: Path) -> None:
    fleet = specs(tmp_path, WAITING, 2)
    first = make(backend)
    handles = first.launch_replicas(fleet)
    again = make(backend).launch_replicas(fleet)
    assert [one.job_id for one in again] == [one.job_id for one in handles]
    # Even if the first launcher died before it could write down what it had started.
    (tmp_path / "launch" / "handles" / "1.json").unlink()
    assert [one.job_id for one in make(backend).launch_replicas(fleet)] == [one.job_id for one in handles]
    assert len(backend.engine.containers) == 2
    first.cancel(handles)
    first.collect(handles, timeout=60)


def test_another_launcher_takes_over(backend: Backend, tmp_path: Path) -> None:
    script = (
        f"import pathlib, threading\nseen = pathlib.Path({str(tmp_path / 'seen')!r})\n"
        "if not seen.exists():\n    seen.touch(); print('ready'); threading.Event().wait()\nprint('second')"
    )
    fleet = specs(tmp_path / "store", script)
    (handle,) = make(backend).launch_replicas(fleet)  # and this launcher is gone
    container = started(backend, handle, "ready")
    looker = make(backend)  # on another machine, without the specs: looks, reads, stops
    (found,) = looker.attach(fleet[0].rendezvous_uri)
    assert found == ReplicaHandle.from_dict(json.loads(json.dumps(found.to_dict()))) and found.job_id == handle.job_id
    assert until(looker, found, "running").name == handle.name
    backend.engine.take_machine(container, retried=backend.retries_itself)
    second = make(backend)
    handles = second.launch_replicas(fleet)
    (result,) = second.collect(handles, timeout=90)
    assert result.status == "completed" and result.metrics["attempts"] == 2
    (last,) = looker.poll(looker.attach(fleet[0].rendezvous_uri))
    assert last.ended and last.state == "completed"
    # What is completed isn't started again, by whoever launches it.
    count = len(backend.engine.containers)
    (again,) = make(backend).launch_replicas(fleet)
    assert (again.job_id, again.state, len(backend.engine.containers)) == (last.job_id, "completed", count)


def test_a_service_that_does_not_answer_leaves_the_state_as_it_was(backend: Backend, tmp_path: Path) -> None:
    executor = make(backend)
    (handle,) = executor.launch_replicas(specs(tmp_path, WAITING))
    handle = until(executor, handle, "running")

    def down(job_id: str) -> Any:
        raise BackendUnavailable("no route")

    executor.look = down  # type: ignore[method-assign]
    (present,) = executor.poll([handle])
    assert present.state == "running" and "doesn't answer" in present.reason
    del executor.look  # type: ignore[method-assign]
    with pytest.raises(CollectTimeout):
        executor.collect([present], timeout=0.05)
    executor.cancel([present])
    executor.collect([present], timeout=60)


def test_its_time_runs_out(backend: Backend, tmp_path: Path) -> None:
    executor = make(backend, time_limit_hours=1.0, restarts=3)
    (handle,) = executor.launch_replicas(specs(tmp_path, WAITING))
    backend.engine.let_time_run_out(started(backend, handle, "ready"))
    (result,) = executor.collect([handle], timeout=60)
    assert result.status == "failed" and "time limit of 1 hours" in result.metrics["error"]
    assert result.metrics["attempts"] == 1


def test_secrets_arrive_and_are_seen_nowhere(backend: Backend, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "s3cr3t-value")
    script = "import os; print(len(os.environ['STORE_PASSWORD']), len(os.environ['API_TOKEN']))"
    fleet = specs(tmp_path, script, extra_env={"API_TOKEN": "an0ther-s3cr3t"})
    executor = make(backend, secrets=["STORE_PASSWORD"])
    if not backend.has_vault:
        with pytest.raises(ValueError, match="API_TOKEN, STORE_PASSWORD can't be handed over"):
            executor.launch_replicas(fleet)
        assert backend.engine.containers == []
        return
    with caplog.at_level(logging.DEBUG, logger="composer_replication"):
        (handle,) = executor.launch_replicas(fleet)
        lines = list(executor.stream_logs(handle))
        executor.collect([handle], timeout=60)
    assert "12 14" in lines
    shown = json.dumps(executor.shown_payload(fleet[0]), default=str) + repr(fleet) + repr(handle) + caplog.text
    shown += repr(executor.job(fleet[0])) + "".join(backend.container(handle.job_id).command)
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for secret in ("s3cr3t-value", "an0ther-s3cr3t"):
        assert secret not in shown and secret.encode() not in stored
    assert "***" in shown

    def quoting(job: Any) -> Any:
        raise ExecutorError(f"no room for {dict(job.secrets)}")

    executor.submit_job = quoting  # type: ignore[method-assign]
    (refused,) = executor.launch_replicas(
        specs(tmp_path / "another", script, extra_env={"API_TOKEN": "an0ther-s3cr3t"})
    )
    assert "no room for" in refused.reason and "s3cr3t" not in refused.reason + caplog.text


def test_what_cannot_work_is_said_before_anything_starts(backend: Backend, tmp_path: Path, monkeypatch: Any) -> None:
    for settings, message in backend.bad_settings:
        with pytest.raises((ValueError, ExecutorError), match=message):
            make(backend, **settings).launch_replicas(specs(tmp_path, "pass"))
    with pytest.raises(ValueError, match="secrets: NOT_SET isn't set"):
        make(backend, secrets=["NOT_SET"]).launch_replicas(specs(tmp_path, "pass"))
    with pytest.raises(ValueError, match="can't be the name of an environment variable"):
        make(backend, env={"A-B": "1"}).launch_replicas(specs(tmp_path, "pass"))
    for bad in ({"requirements": ["git+https://me:s3cr3t@host/repository"]}, {}):
        (one,) = specs(tmp_path, "pass", overrides=() if bad else ("data.args.uri=https://me:s3cr3t@host/text",))
        with pytest.raises(ValueError, match="name a variable in secrets") as caught:
            make(backend, **bad).launch_replicas([one])
        assert "s3cr3t" not in str(caught.value)
    executor, asked = make(backend), []
    executor.check = asked.append  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match="credentials don't belong into a URI"):
        executor.launch_replicas([ReplicaSpec(0, 1, "s3://me:s3cr3t@bucket/run", command=("true",))])
    assert asked == []  # no service has seen it
    first, second = specs(tmp_path, "pass", 2)
    with pytest.raises(ValueError, match="can't be the name of an environment variable"):
        make(backend).launch_replicas([first, replace(second, extra_env={"A-B": "1"})])
    assert backend.engine.containers == []
