"""LocalProcessExecutor with real processes: logs, restarts, cancelling, collecting."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from composer_replication.diloco import serverless
from composer_replication.diloco.serverless import (
    CollectTimeout,
    LocalProcessExecutor,
    ReplicaSpec,
    ServerlessExecutor,
)
from composer_replication.diloco.serverless.exit_codes import Exit, describe, killed
from composer_replication.diloco.serverless.spec import entrypoint_arguments
from composer_replication.errors import ExecutorError

pytestmark = pytest.mark.processes


class ScriptExecutor(LocalProcessExecutor):
    """Runs a few lines of Python in place of a replica; `FOLDER` is the replica's folder."""

    def __init__(self, script: str, **settings):
        super().__init__(**{"backoff_seconds": 0.0, "grace_seconds": 5.0, **settings})
        self.script = script

    def command(self, spec: ReplicaSpec, folder: Path) -> list[str]:
        head = (
            f"import os, signal, sys, time, pathlib; FOLDER = pathlib.Path({str(folder)!r}); ID = {spec.replica_id}\n"
        )
        return [sys.executable, "-c", head + self.script]


def specs(count: int, **more) -> list[ReplicaSpec]:
    return [ReplicaSpec(i, count, "file:///nowhere", **more) for i in range(count)]


def wait_for(condition, seconds: float = 20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_it_is_an_executor_with_the_promised_verbs(tmp_path):
    executor = LocalProcessExecutor(output=tmp_path)
    assert isinstance(executor, ServerlessExecutor)
    assert executor.backend_name == "local" and executor.supports_inter_replica_network is False


def test_public_names_resolve_and_are_listed():
    # The names that torchft's users and Kubernetes' look for.
    other = {"MockManager": "ObjectStoreManager", "K8sExecutor": "VolcanoExecutor"}
    for name in serverless.__all__:
        assert getattr(serverless, name).__name__ == other.get(name, name)
    assert set(serverless.__all__) <= set(dir(serverless))


def test_completed_replicas_give_results_and_logs(tmp_path):
    script = "print('hello from', ID, os.environ['COLOUR']); (FOLDER/'result.json').write_text('{\"loss\": 1.5}')"
    executor = ScriptExecutor(script, output=tmp_path, env={"COLOUR": "red"})
    handles = executor.launch_replicas(specs(2))
    results = executor.collect(handles, timeout=30)
    assert [(r.replica_id, r.status, r.metrics["loss"], r.metrics["exit_code"]) for r in results] == [
        (0, "completed", 1.5, 0),
        (1, "completed", 1.5, 0),
    ]
    assert list(executor.stream_logs(handles[1])) == ["hello from 1 red"]
    assert handles[1].log_url == (tmp_path / "replica-1" / "log.txt").as_uri()


def test_log_lines_come_while_the_replica_runs(tmp_path):
    script = "print('one', flush=True)\nwhile not (FOLDER/'go').exists(): time.sleep(0.01)\nprint('two', end='')"
    executor = ScriptExecutor(script, output=tmp_path)
    (handle,) = executor.launch_replicas(specs(1))
    lines = executor.stream_logs(handle)
    assert next(lines) == "one"
    assert executor.poll([handle])[0].state == "running"
    (tmp_path / "replica-0" / "go").touch()
    assert list(lines) == ["two"]


def test_a_killed_replica_is_started_again_and_its_log_goes_on(tmp_path):
    script = (
        "first = not (FOLDER/'seen').exists(); (FOLDER/'seen').touch()\n"
        "print('first' if first else 'second', flush=True)\n"
        "if first: time.sleep(60)"
    )
    executor = ScriptExecutor(script, output=tmp_path)
    (handle,) = executor.launch_replicas(specs(1))
    lines = executor.stream_logs(handle)
    assert next(lines) == "first"
    os.kill(executor.process_id(handle), signal.SIGKILL)
    (result,) = executor.collect([handle], timeout=30)
    assert result.status == "completed" and result.metrics["restarts"] == 1
    rest = list(lines)
    assert rest[-1] == "second" and "killed by signal 9; starting it again in 0 s (1 of 3)" in rest[0]


def test_the_budget_of_restarts_is_kept(tmp_path):
    script = "(FOLDER/f'start-{time.time_ns()}').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    executor = ScriptExecutor(script, output=tmp_path, restarts=2)
    (result,) = executor.collect(executor.launch_replicas(specs(1)), timeout=30)
    assert result.status == "failed" and result.metrics["error"] == "killed by signal 9"
    assert len(list((tmp_path / "replica-0").glob("start-*"))) == 3


@pytest.mark.parametrize("code", [Exit.ERROR, Exit.SETTINGS, Exit.FENCED, Exit.ABORTED, Exit.DIVERGED, Exit.TAKEN])
def test_a_replica_that_ends_by_its_own_decision_is_not_started_again(tmp_path, code):
    executor = ScriptExecutor(f"sys.exit({int(code)})", output=tmp_path)
    (result,) = executor.collect(executor.launch_replicas(specs(1)), timeout=30)
    assert (result.status, result.metrics["restarts"], result.metrics["exit_code"]) == ("failed", 0, code)


@pytest.mark.parametrize(("code", "status"), [(Exit.STORE, "failed"), (Exit.PREEMPTED, "preempted")])
def test_a_failed_store_and_a_preemption_are_worth_another_try(tmp_path, code, status):
    executor = ScriptExecutor(f"sys.exit({int(code)})", output=tmp_path, restarts=1)
    (result,) = executor.collect(executor.launch_replicas(specs(1)), timeout=30)
    assert (result.status, result.metrics["restarts"]) == (status, 1)


def test_errors_are_started_again_when_asked_for(tmp_path):
    executor = ScriptExecutor("sys.exit(1)", output=tmp_path, restarts=0, error_restarts=2)
    (result,) = executor.collect(executor.launch_replicas(specs(1)), timeout=30)
    assert result.metrics["restarts"] == 2


def test_cancel_lets_a_replica_end_in_order(tmp_path):
    script = (
        "signal.signal(signal.SIGTERM, lambda *_: (print('saving', flush=True), sys.exit(75)))\n"
        "print('ready', flush=True)\ntime.sleep(60)"
    )
    executor = ScriptExecutor(script, output=tmp_path)
    handles = executor.launch_replicas(specs(2))
    for handle in handles:
        assert next(executor.stream_logs(handle)) == "ready"
    executor.cancel(handles)
    assert [h.state for h in executor.poll(handles)] == ["cancelled", "cancelled"]
    assert list(executor.stream_logs(handles[0])) == ["ready", "saving"]
    executor.cancel(handles)  # harmless


def test_cancel_kills_what_does_not_listen_and_its_children(tmp_path):
    script = (
        "import subprocess; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    executor = ScriptExecutor(script, output=tmp_path, grace_seconds=0.2)
    (handle,) = executor.launch_replicas(specs(1))
    child = int(next(executor.stream_logs(handle)))
    executor.cancel([handle])
    (result,) = executor.collect([handle], timeout=30)
    assert result.status == "cancelled" and result.metrics["exit_code"] == -signal.SIGKILL
    wait_for(lambda: not _alive(child))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_cancel_during_the_pause_before_a_restart(tmp_path):
    executor = ScriptExecutor("os.kill(os.getpid(), 9)", output=tmp_path, backoff_seconds=60.0)
    (handle,) = executor.launch_replicas(specs(1))
    wait_for(lambda: executor.poll([handle])[0].will_retry)
    executor.cancel([handle])
    assert executor.poll([handle])[0].state == "cancelled"


def test_collect_says_who_is_still_running_and_leaves_them_running(tmp_path):
    script = "\nif ID == 1:\n  while not (FOLDER/'go').exists(): time.sleep(0.01)"
    executor = ScriptExecutor(script, output=tmp_path)
    handles = executor.launch_replicas(specs(2))
    executor.collect(handles[:1], timeout=30)
    with pytest.raises(CollectTimeout, match=r"\[1\]") as caught:
        executor.collect(handles, timeout=0.05)
    assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, ExecutorError)
    (tmp_path / "replica-1" / "go").touch()
    assert [r.status for r in executor.collect(handles, timeout=30)] == ["completed", "completed"]


def test_a_job_that_is_not_taken_comes_back_without_an_id(tmp_path, caplog):
    class Half(ScriptExecutor):
        def command(self, spec, folder):
            return ["/no/such/program"] if spec.replica_id == 1 else super().command(spec, folder)

    executor = Half("pass", output=tmp_path)
    with caplog.at_level(logging.WARNING):
        handles = executor.launch_replicas(specs(2))
    assert [bool(h.job_id) for h in handles] == [True, False]
    assert "did not take replica 1" in caplog.text
    assert [r.status for r in executor.collect(handles, timeout=30)] == ["completed", "failed"]
    executor.cancel(handles)


def test_replicas_end_with_the_program_that_started_them(tmp_path):
    # The entry point's own watch on its standard input; here the launcher is a process that is killed.
    launcher = (
        "import sys, time\n"
        "from composer_replication.diloco.serverless.replica_entrypoint import stop_with_launcher\n"
        "stop_with_launcher(); print('up', flush=True); time.sleep(60)"
    )
    import subprocess

    with subprocess.Popen([sys.executable, "-c", launcher], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=20) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"replica_id": 0}, "replica_id 0 is given twice"),
        ({"num_replicas": 3}, "num_replicas"),
        ({"rendezvous_uri": "file:///other"}, "rendezvous_uri"),
    ],
)
def test_specs_that_are_not_one_fleet_are_refused_before_anything_starts(tmp_path, change, word):
    values = {"replica_id": 1, "num_replicas": 2, "rendezvous_uri": "file:///nowhere", **change}
    with pytest.raises(ValueError, match=word):
        ScriptExecutor("pass", output=tmp_path).launch_replicas([specs(2)[0], ReplicaSpec(**values)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "bad", [{"replica_id": 2}, {"replica_id": -1}, {"num_replicas": 0}, {"rendezvous_uri": ""}, {"sync_every": 0}]
)
def test_a_spec_checks_itself(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        ReplicaSpec(**{"replica_id": 0, "num_replicas": 2, "rendezvous_uri": "file:///x", **bad})


def test_a_spec_has_the_documented_fields_in_the_documented_order():
    spec = ReplicaSpec(
        1, 4, "s3://b/run", "org/model", {"name": "AdamW", "lr": 4e-4}, 250, 0.6, 0.8, 7, {"A": "secret"}
    )
    assert (spec.sync_every, spec.outer_lr, spec.outer_momentum, spec.outer_rounds) == (250, 0.6, 0.8, 7)
    assert "secret" not in repr(spec)
    defaults = ReplicaSpec(0, 1, "s3://b/run", "org/model", {})
    assert (defaults.sync_every, defaults.outer_lr, defaults.outer_momentum, defaults.outer_rounds) == (
        500,
        0.7,
        0.9,
        100,
    )
    assert '--inner-optimizer={"name": "AdamW", "lr": 0.0004}' in entrypoint_arguments(spec)


def test_exit_codes_in_words():
    assert killed(-9) == 9 and killed(137) == 9 and killed(1) is None and killed(255) is None
    assert killed(256 - 9) == 9 and killed(256 - 15) == 15 and killed(128 + 64) == 64
    assert describe(-15) == "killed by signal 15" and describe(4) == "a newer process has taken its place"
    assert describe(99) == "exit code 99"
