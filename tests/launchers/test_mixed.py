"""One fleet in several places: processes of this machine and a service's jobs, and two accounts of one service."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.diloco.serverless import (
    CollectTimeout,
    LocalProcessExecutor,
    ReplicaHandle,
    ReplicaSpec,
    ServerlessExecutor,
)
from composer_replication.diloco.serverless.executor import BackendUnavailable
from composer_replication.diloco.serverless.jobs.marks import Marks
from composer_replication.diloco.serverless.mixed import MixedExecutor
from composer_replication.errors import ExecutorError, StoreUnavailable
from tests.launchers import hf_jobs
from tests.launchers.backend import Backend
from tests.launchers.engine import Engine

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

WAITING = "import sys; print('ready'); sys.stdout.flush(); import threading; threading.Event().wait()"


class Plain(LocalProcessExecutor):
    """Runs the spec's command as it is."""

    def command(self, spec: ReplicaSpec, folder: Path) -> list[str]:
        import sys

        return [sys.executable, *spec.command[1:]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    engine = Engine()
    with contextlib.closing(engine), hf_jobs.backend(engine, monkeypatch) as made:
        yield made
        assert made.unknown == []


def specs(store: Path, *scripts: str) -> list[ReplicaSpec]:
    return [
        ReplicaSpec(i, len(scripts), store.as_uri(), command=("python", "-u", "-c", script))
        for i, script in enumerate(scripts)
    ]


def quick(executor: Any) -> Any:
    executor.poll_seconds = executor.log_pause_seconds = executor.submit_backoff_seconds = 0.02
    return executor


def mixed(hub: Backend, folder: Path, *counts: int, **settings: Any) -> MixedExecutor:
    here = Plain(output=folder / "here", grace_seconds=10)
    there = quick(hub.make(backoff_seconds=0.0, **settings))
    executor = MixedExecutor([(here, counts[0]), (there, counts[1])])
    executor.poll_seconds = 0.02
    return executor


def test_it_offers_the_verbs_and_says_whose_a_replica_is(hub: Backend, tmp_path: Path) -> None:
    executor = mixed(hub, tmp_path, 2, 1)
    assert isinstance(executor, ServerlessExecutor) and executor.backend_names == ("local", "hf_jobs")
    assert [executor.executor_of(i).backend_name for i in range(3)] == ["local", "local", "hf_jobs"]
    with pytest.raises(ValueError, match="replica 3 belongs to no group: they have replicas 0 to 2"):
        executor.executor_of(3)
    with pytest.raises(ValueError, match="at least 1 replica, got 0 of local"):
        mixed(hub, tmp_path, 0, 1)
    with pytest.raises(ValueError, match="groups is empty"):
        MixedExecutor([])


def test_all_of_it_runs_to_its_end_with_logs_and_results(hub: Backend, tmp_path: Path) -> None:
    executor = mixed(hub, tmp_path, 1, 2)
    fleet = specs(tmp_path / "store", "print('here')", "print('there')", "print('oh'); raise SystemExit(1)")
    handles = executor.launch_replicas(list(reversed(fleet)))  # in whatever order they come
    assert [(h.replica_id, h.backend) for h in handles] == [(2, "hf_jobs"), (1, "hf_jobs"), (0, "local")]
    lines = [list(executor.stream_logs(handle)) for handle in handles]
    results = executor.collect(handles, timeout=60)
    assert [(r.replica_id, r.status) for r in results] == [(2, "failed"), (1, "completed"), (0, "completed")]
    assert results[0].metrics["exit_code"] == 1
    assert "there" in lines[1] and lines[2] == ["here"]
    handles = executor.poll(handles)
    assert executor.last_lines(handles[2], 1) == ["here"]
    assert "oh" in executor.last_lines(handles[0], 3)
    assert list(executor.stream_logs(handles[2], after=0)) == ["here"]


def test_a_wrong_setting_of_the_last_group_starts_nothing(hub: Backend, tmp_path: Path) -> None:
    executor = mixed(hub, tmp_path, 1, 1, flavor="a10g-smal")
    fleet = specs(tmp_path / "store", f"open({str(tmp_path / 'ran')!r}, 'w')", "pass")
    for launch in (executor.check_specs, executor.launch_replicas):
        with pytest.raises(ValueError, match="Did you mean 'a10g-small'"):
            launch(fleet)
    assert hub.engine.containers == [] and not (tmp_path / "here").exists()
    with pytest.raises(ValueError, match="replica 2 belongs to no group"):
        executor.launch_replicas(specs(tmp_path / "store", "pass", "pass", "pass"))


@pytest.mark.parametrize("when", ["check", "launch"])
def test_a_place_that_does_not_answer_fails_its_own_replicas_only(
    hub: Backend, tmp_path: Path, caplog: Any, when: str
) -> None:
    executor = mixed(hub, tmp_path, 1, 2)
    there = executor.groups[1][0]

    def down(*_: Any) -> Any:
        raise BackendUnavailable("no route to it")

    setattr(there, "check" if when == "check" else "launch_replicas", down)
    fleet = specs(tmp_path / "store", "print('here')", "pass", "pass")
    with caplog.at_level(logging.WARNING):
        handles = executor.launch_replicas(fleet)
    assert [(h.state, bool(h.job_id), h.reason) for h in handles[1:]] == [("failed", False, "no route to it")] * 2
    results = executor.collect(handles, timeout=60)
    assert [r.status for r in results] == ["completed", "failed", "failed"]
    assert results[1].metrics == {"error": "no route to it"} and "hf_jobs did not start" in caplog.text
    if when == "check":
        with pytest.raises(BackendUnavailable):
            executor.check_specs(fleet)  # `plan` tells of it


def test_an_outage_later_leaves_the_states_as_they_were(hub: Backend, tmp_path: Path) -> None:
    executor = mixed(hub, tmp_path, 1, 1)
    handles = executor.launch_replicas(specs(tmp_path / "store", "pass", WAITING))
    while not handles[0].ended:
        executor.wait(handles, 0.02)
        handles = executor.poll(handles)
    there = executor.groups[1][0]
    healthy = there.poll

    def down(*_: Any) -> Any:
        raise BackendUnavailable("no route to it")

    there.poll = there.cancel = down  # type: ignore[method-assign]
    present = executor.poll(handles)
    assert present[0].state == "completed" and not present[1].ended and "doesn't answer" in present[1].reason
    with pytest.raises(CollectTimeout, match=r"replicas \[1\]"):
        executor.collect(present, timeout=0.05)
    with pytest.raises(ExecutorError, match="no route to it"):
        executor.cancel(present)
    there.poll = healthy  # type: ignore[method-assign]
    del there.cancel  # type: ignore[attr-defined]
    executor.cancel(present)
    assert [r.status for r in executor.collect(present, timeout=60)] == ["completed", "cancelled"]


def test_cancel_stops_all_places_at_once(hub: Backend, tmp_path: Path) -> None:
    executor = mixed(hub, tmp_path, 1, 1)
    handles = executor.launch_replicas(specs(tmp_path / "store", WAITING, WAITING))
    container = hub.container(handles[1].job_id)
    hub.engine.wait_for(lambda: "ready" in container.lines)
    waiting = threading.Thread(target=executor.cancel, args=(handles,))  # here it waits for the process's end
    waiting.start()
    hub.engine.wait_for(lambda: container.ended != "")
    waiting.join(60)
    assert [r.status for r in executor.collect(handles, timeout=60)] == ["cancelled", "cancelled"]


def test_two_groups_of_one_service_are_told_apart_and_found_again(hub: Backend, tmp_path: Path) -> None:
    def two(*counts: int) -> MixedExecutor:
        groups = [(quick(hub.make(flavor=f, backoff_seconds=0.0)), n) for f, n in zip(FLAVORS, counts, strict=True)]
        made = MixedExecutor(groups)
        made.poll_seconds = 0.02
        return made

    fleet = specs(tmp_path, WAITING, WAITING, WAITING)
    executor = two(2, 1)
    assert executor.poll_seconds == 0.02
    handles = executor.launch_replicas(fleet)
    again = two(2, 1)
    assert [h.job_id for h in again.launch_replicas(fleet)] == [h.job_id for h in handles]  # started once
    assert len(hub.engine.containers) == 3
    other = two(1, 2)  # on another machine, with groups of another size
    found = other.attach(tmp_path.as_uri())
    assert [h.job_id for h in found] == [h.job_id for h in handles]
    other.cancel(found)
    assert [r.status for r in executor.collect(handles, timeout=60)] == ["cancelled"] * 3


FLAVORS = ("cpu-basic", "a10g-small")


def test_a_handle_that_is_nobodys_is_told_so(hub: Backend, tmp_path: Path) -> None:
    executor = mixed(hub, tmp_path, 1, 1)
    with pytest.raises(ExecutorError, match=r"replica 7 \(elsewhere\) belongs to no group"):
        executor.poll([ReplicaHandle(7, "elsewhere", "x")])


def test_what_is_cancelled_between_two_of_its_jobs_is_not_started_again(hub: Backend, tmp_path: Path) -> None:
    """Whoever cancels it, and whoever would have started it."""
    launcher = quick(hub.make(backoff_seconds=600.0))
    (handle,) = launcher.launch_replicas(specs(tmp_path, WAITING))
    container = hub.container(handle.job_id)
    hub.engine.wait_for(lambda: "ready" in container.lines)
    hub.engine.take_machine(container)
    while not handle.will_retry:
        launcher.wait([handle], 0.02)
        (handle,) = launcher.poll([handle])
    assert handle.state == "preempted" and not handle.ended
    other = quick(hub.make())
    other.cancel(other.attach(tmp_path.as_uri()))
    (handle,) = launcher.poll([handle])
    assert handle.ended and handle.state == "cancelled"
    launcher.clock = lambda: 1e12  # long after it was due
    assert launcher.poll([handle]) == [handle] and len(hub.engine.containers) == 1


def test_what_is_cancelled_while_its_next_job_is_submitted_is_stopped(hub: Backend, tmp_path: Path) -> None:
    launcher, other = quick(hub.make(backoff_seconds=0.0)), quick(hub.make())
    (handle,) = launcher.launch_replicas(specs(tmp_path, WAITING))
    container = hub.container(handle.job_id)
    hub.engine.wait_for(lambda: "ready" in container.lines)
    submit = launcher.submit_job

    def cancelled_meanwhile(job: Any) -> str:
        job_id = submit(job)
        other.cancel(other.attach(tmp_path.as_uri()))
        return job_id

    launcher.submit_job = cancelled_meanwhile
    hub.engine.take_machine(container)
    hub.engine.wait_for(lambda: container.ended != "")
    (handle,) = launcher.poll([handle])
    assert handle.submission == 1
    hub.engine.wait_for(lambda: hub.container(handle.job_id).ended != "")
    (handle,) = launcher.poll([handle])
    assert handle.ended and handle.state == "cancelled" and len(hub.engine.containers) == 2


def test_a_store_that_fails_in_the_middle_of_a_launch_still_gives_all_handles(
    hub: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    launcher, fleet = quick(hub.make()), specs(tmp_path, WAITING, WAITING, WAITING)
    save, read = Marks.save, Marks.handle

    def unsaved(self: Marks, handle: ReplicaHandle) -> None:
        if handle.replica_id == 1:
            raise StoreUnavailable("no route to it")
        save(self, handle)

    def unread(self: Marks, replica: int) -> ReplicaHandle | None:
        if replica == 2:
            raise StoreUnavailable("no route to it")
        return read(self, replica)

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Marks, "save", unsaved)
        patch.setattr(Marks, "handle", unread)
        handles = launcher.launch_replicas(fleet)
    # The second runs, though its handle isn't in the store; the third was never sent.
    assert [(bool(h.job_id), h.reason) for h in handles] == [(True, ""), (True, ""), (False, "no route to it")]
    assert "replica 1: its handle isn't in the store yet" in caplog.text and len(hub.engine.containers) == 2
    hub.engine.wait_for(lambda: all("ready" in one.lines for one in hub.engine.containers))
    launcher.cancel(handles)
    assert [r.status for r in launcher.collect(handles, timeout=60)] == ["cancelled", "cancelled", "failed"]


def test_so_many_submissions_are_under_way_at_once_and_no_more(hub: Backend, tmp_path: Path) -> None:
    launcher = quick(hub.make(max_concurrent_launches=2))
    submit, changed, under_way, counts = launcher.submit_job, threading.Condition(), [], []

    def slow(job: Any) -> str:
        with changed:
            under_way.append(job.replica)
            counts.append(len(under_way))
            changed.notify_all()
            changed.wait_for(lambda: len(under_way) > 2, timeout=0.2)  # time for a third, if it could
        try:
            return submit(job)
        finally:
            with changed:
                under_way.remove(job.replica)

    launcher.submit_job = slow
    launcher.collect(launcher.launch_replicas(specs(tmp_path, *["pass"] * 5)), timeout=60)
    assert len(counts) == 5 and max(counts) == 2


def test_the_job_of_a_run_whose_store_was_cleared_since_is_not_taken_for_this_ones(
    hub: Backend, tmp_path: Path
) -> None:
    fleet = specs(tmp_path / "store", "pass")
    before = quick(hub.make())
    before.collect(before.launch_replicas(fleet), timeout=60)
    shutil.rmtree(tmp_path / "store")
    launcher = quick(hub.make())
    handles = launcher.launch_replicas(fleet)
    assert handles[0].submission == 1 and len(hub.engine.containers) == 2
    assert [r.status for r in launcher.collect(handles, timeout=60)] == ["completed"]


def test_the_handles_of_a_launch_reach_the_job_that_took_its_place(hub: Backend, tmp_path: Path) -> None:
    launcher = quick(hub.make(backoff_seconds=0.0))
    (first,) = launcher.launch_replicas(specs(tmp_path, WAITING))
    hub.engine.wait_for(lambda: "ready" in hub.container(first.job_id).lines)
    hub.engine.take_machine(hub.container(first.job_id))
    handle = first
    while handle.submission == 0:
        launcher.wait([handle], 0.02)
        (handle,) = launcher.poll([handle])
    second = hub.container(handle.job_id)
    hub.engine.wait_for(lambda: "ready" in second.lines)
    looker = quick(hub.make())
    looker.attach(tmp_path.as_uri())
    (seen,) = looker.poll([first])
    assert (seen.job_id, seen.state, seen.preemptions) == (handle.job_id, "running", 1)
    looker.cancel([first])  # as a program does that kept what the launch gave it
    hub.engine.wait_for(lambda: second.ended == "stopped")
    (handle,) = launcher.poll([first])
    assert handle.ended and handle.state == "cancelled" and len(hub.engine.containers) == 2
