"""RunPod beyond the contract: the request to the letter, every native state, pods' ends, limits and mistakes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.diloco.serverless import ReplicaSpec, RunPodExecutor
from composer_replication.diloco.serverless.backends.runpod import DEADLINE, IN_POD
from composer_replication.diloco.serverless.executor import BackendUnavailable, QuotaExceeded
from composer_replication.diloco.serverless.jobs import container
from composer_replication.diloco.serverless.jobs.encoded import decoded
from composer_replication.diloco.serverless.jobs.marks import Mark, Marks
from composer_replication.errors import ExecutorError
from composer_replication.store import open_store
from tests.launchers.engine import Container, Engine
from tests.launchers.http import Refused
from tests.launchers.runpod import KEY, RunPod, make, served

pytest.importorskip("graphql")
pytestmark = pytest.mark.processes

AWKWARD = "quotes ' \" `, {braces}, $x, a\nnewline, a \\ and ünïcode"


@pytest.fixture
def pods(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunPod]:
    engine = Engine()
    try:
        with served(engine, monkeypatch) as made:
            yield made
            assert made.unknown == []
    finally:
        engine.close()


def spec(store: Path, *words: str, **more: Any) -> ReplicaSpec:
    return ReplicaSpec(0, 1, store.as_uri(), command=words or ("python", "-c", "pass"), **more)


def launched(pods: RunPod, executor: RunPodExecutor, asked: ReplicaSpec) -> tuple[Any, Container]:
    executor.poll_seconds = executor.log_pause_seconds = 0.02
    (handle,) = executor.launch_replicas([asked])
    assert handle.job_id, handle.reason
    return handle, pods.pods[handle.job_id.partition("@")[0]].container


WAITING = ("python", "-u", "-c", "print('ready'); import threading; threading.Event().wait()")


def test_the_request_is_what_the_settings_say(pods: RunPod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "s3cr3t-value")
    executor = make(
        pods,
        gpu_type="RTX 4090",
        gpu_count=2,
        cloud_type="COMMUNITY",
        bid_per_gpu=0.35,
        template="tpl1",
        data_center="EU-RO-1",
        container_disk_gb=80,
        network_volume="vol1",
        volume_path="/runs",
        env={"AWKWARD": AWKWARD},
        secrets=["STORE_PASSWORD"],
        time_limit_hours=1,
    )
    executor.clock = lambda: 1_800_000_000.5
    asked = spec(tmp_path, "python", "-c", "print(1)", AWKWARD)
    shown = executor.shown_payload(asked)
    words = shown.pop("dockerArgs").split()
    assert words[:3] == ["python", "-m", IN_POD] and decoded(words[3:]) == list(executor.job(asked).command[3:])
    assert decoded(words[3:])[-1] == AWKWARD
    name = executor.job(asked).name
    assert shown == {
        "name": name,
        "imageName": "registry/image:1",
        "templateId": "tpl1",
        "env": [
            {"key": "AWKWARD", "value": AWKWARD},
            {"key": "STORE_PASSWORD", "value": "***"},
            {"key": DEADLINE, "value": "1800003600"},
        ],
        "gpuTypeId": "NVIDIA GeForce RTX 4090",
        "gpuCount": 2,
        "cloudType": "COMMUNITY",
        "dataCenterId": "EU-RO-1",
        "containerDiskInGb": 80,
        "volumeInGb": 0,
        "networkVolumeId": "vol1",
        "volumeMountPath": "/runs",
        "startSsh": False,
        "terminateAfter": "2027-01-15T09:00:00Z",
        "bidPerGpu": 0.35,
    }
    job_id = executor.submit_job(executor.job(asked))
    assert job_id == "pod000@1800003600"  # which nobody could say once the pod is gone
    pod = pods.pods["pod000"]
    assert (
        pod.spot and pod.container.env["AWKWARD"] == AWKWARD and pod.container.env["STORE_PASSWORD"] == "s3cr3t-value"
    )
    assert {**pod.asked, "env": None, "dockerArgs": None} == {**shown, "env": None, "dockerArgs": None}
    assert executor.find_job(executor.job(asked)) == job_id


def test_on_demand_there_is_no_bid(pods: RunPod, tmp_path: Path) -> None:
    executor = make(pods)
    handle, _ = launched(pods, executor, spec(tmp_path))
    pod = pods.pods[handle.job_id.partition("@")[0]]
    assert not pod.spot and "bidPerGpu" not in pod.asked and pod.asked["gpuTypeId"] == "NVIDIA A100 80GB PCIe"
    assert executor.collect([handle], timeout=60)[0].status == "completed"


# desiredStatus, is the container there (runtime), the mark's exit code ("" without a mark) -> our state
STATES = [
    ("CREATED", False, "", "pending"),
    ("RESTARTING", False, "", "pending"),
    ("PAUSED", False, None, "pending"),
    ("RUNNING", False, "", "pending"),
    ("RUNNING", True, "", "running"),
    ("RUNNING", True, None, "running"),
    ("RUNNING", True, 0, "completed"),  # its container would be started again
    ("RUNNING", True, 1, "failed"),
    ("EXITED", False, 0, "completed"),
    ("EXITED", False, 1, "failed"),
    ("EXITED", False, 75, "failed"),  # which the code makes a preemption
    ("EXITED", False, None, "preempted"),
    ("EXITED", False, "", "preempted"),
    ("DEAD", False, None, "preempted"),
    ("TERMINATED", False, None, "preempted"),
    ("TERMINATED", False, 0, "completed"),
]


def test_every_state_of_the_service_has_one_of_ours(pods: RunPod, tmp_path: Path) -> None:
    executor = make(pods)
    states = pods._schema.type_map["PodStatus"].values
    assert {status for status, *_ in STATES} == set(states)
    job = executor.job(spec(tmp_path))
    for number, (status, there, code, expected) in enumerate(STATES):
        marks = executor.marks((tmp_path / str(number)).as_uri())
        if code != "":
            marks.mark(Mark(job.name, 0, exit_code=code))
        job_id = executor.submit_job(job)
        pod = pods.pods[job_id.partition("@")[0]]
        pod.shown = {"desiredStatus": status, "runtime": {"uptimeInSeconds": 5} if there else None}
        seen = executor.look(job_id)
        assert (seen.state, seen.native) == (expected, status), (status, there, code)
        assert pod.terminated == (expected not in ("pending", "running"))  # what has ended costs nothing more


def test_a_pod_that_is_gone_is_judged_by_its_mark(pods: RunPod, tmp_path: Path) -> None:
    executor = make(pods)
    handle, container_ = launched(pods, executor, spec(tmp_path, "python", "-c", "raise SystemExit(3)"))
    pods.engine.wait_for(lambda: container_.ended)
    assert pods.pods["pod000"].terminated  # by itself: no launcher had to look
    (handle,) = executor.poll([handle])
    assert (handle.state, handle.native, handle.exit_code) == ("failed", "gone", 3)
    assert executor.look("pod999@1").timed_out and executor.look(f"pod999@{2**40}").state == "preempted"


def test_a_pod_that_is_gone_is_running_as_long_as_its_replica_gives_signs_of_life(pods: RunPod, tmp_path: Path) -> None:
    """It may be another account's key that doesn't find it; a second pod would take its place."""
    executor = make(pods)
    handle, container_ = launched(pods, executor, spec(tmp_path, *WAITING))
    pods.engine.wait_for(lambda: "ready" in container_.lines)
    pods.pods["pod000"].terminated = True
    pods.refusals = [Refused(200, {"errors": [{"message": "pod not found"}]})]  # or null: both are seen to
    for _ in range(2):
        (handle,) = executor.poll([handle])
        assert (handle.state, handle.native, handle.ended) == ("running", "gone", False)
    pods.elapsed = 100.0
    (handle,) = executor.poll([handle])
    assert (handle.state, handle.native, handle.will_retry) == ("preempted", "gone", True)


def test_a_pod_that_cannot_end_itself_runs_its_job_once_and_is_deleted_by_a_launcher(
    pods: RunPod, tmp_path: Path
) -> None:
    pods.can_end_itself = False
    executor = make(pods)
    ran = tmp_path / "ran"
    script = f"open({str(ran)!r}, 'a').write('x'); raise SystemExit(1)"
    handle, first = launched(pods, executor, spec(tmp_path / "store", "python", "-c", script))
    pods.engine.wait_for(lambda: first.ended)
    assert "couldn't delete itself: RunPod: RUNPOD_API_KEY isn't set" in first.lines[-1]
    again = pods.engine.start(first.name, first.command, first.env)  # as the service does
    pods.engine.wait_for(lambda: again.ended)
    assert ran.read_text() == "x" and again.exit_code == 1
    assert any("it has ended before (an exception in its code); nothing is done" in line for line in again.lines)
    assert not pods.pods["pod000"].terminated
    (handle,) = executor.poll([handle])
    assert (handle.state, handle.native, handle.exit_code, handle.ended) == ("failed", "RUNNING", 1, True)
    assert pods.pods["pod000"].terminated


@pytest.fixture
def signals_kept() -> Iterator[None]:
    """What runs a container here takes the process's signals."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals_kept")
def test_what_is_completed_is_not_run_again_on_any_service(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ran = tmp_path / "ran"
    words = ["--job=run-1-r0-0", "--replica-id=0", "--num-replicas=1", f"--rendezvous-uri={tmp_path.as_uri()}", "--"]

    def run(script: str) -> int:
        return container.main([*words, "python", "-c", f"open({str(ran)!r}, 'a').write('x'); {script}"])

    assert run("raise SystemExit(1)") == 1 and run("pass") == 0  # what failed may be started again by the service
    assert run("raise SystemExit(1)") == 0 and ran.read_text() == "xx"
    assert "it has ended before (completed); nothing is done" in capfd.readouterr().out
    mark = Marks(open_store(tmp_path.as_uri())).read(0, "run-1-r0-0")
    assert mark is not None and (mark.starts, mark.state) == (2, "completed")


def test_a_time_limit_is_seen_and_kept_by_whoever_looks(pods: RunPod, tmp_path: Path) -> None:
    """The service deletes a pod in time; if it didn't, a launcher would."""
    executor = make(pods, time_limit_hours=1, restarts=3)
    handle, container_ = launched(pods, executor, spec(tmp_path, *WAITING))
    pods.engine.wait_for(lambda: "ready" in container_.lines)
    assert executor.poll([handle])[0].state == "running"
    pods.elapsed = 3700.0
    other = make(pods, time_limit_hours=1)
    (found,) = other.attach(tmp_path.as_uri())
    (found,) = other.poll([found])
    assert (found.state, found.ended) == ("failed", True) and "time limit of 1 hours" in found.reason
    assert pods.pods["pod000"].terminated
    (handle,) = executor.poll([handle])  # the pod is gone by now
    assert (handle.state, handle.native, handle.ended) == ("failed", "gone", True)


def test_a_pod_with_a_network_volume_is_deleted_as_it_cannot_be_stopped(pods: RunPod, tmp_path: Path) -> None:
    executor = make(pods, network_volume="vol1", output="/workspace/run")
    handle, _ = launched(pods, executor, spec(tmp_path, *WAITING))
    executor.cancel([handle])
    assert pods.pods["pod000"].terminated
    executor.cancel([handle])  # harmless
    assert executor.collect([handle], timeout=60)[0].status == "cancelled"


def test_a_key_that_is_missing_or_refused_is_told_first(
    pods: RunPod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNPOD_API_KEY", KEY + "-expired")
    with pytest.raises(ExecutorError, match="RunPod refuses the key in RUNPOD_API_KEY"):
        make(pods).launch_replicas([spec(tmp_path)])
    monkeypatch.delenv("RUNPOD_API_KEY")
    with pytest.raises(ExecutorError, match="RUNPOD_API_KEY isn't set"):
        make(pods).launch_replicas([spec(tmp_path)])
    assert pods.pods == {}


def test_refusals_are_told_apart(pods: RunPod, tmp_path: Path) -> None:
    executor = make(pods)
    job = executor.job(spec(tmp_path))
    for refused, kind in {
        Refused(429, {"message": "Too Many Requests"}): QuotaExceeded,
        Refused(200, {"errors": [{"message": "There are no instances currently available"}]}): QuotaExceeded,
        Refused(502, {"message": "Bad Gateway"}): BackendUnavailable,
        Refused(400, {"errors": [{"message": "gpuCount must be positive"}]}): ExecutorError,
    }.items():
        pods.refusals = [refused]
        with pytest.raises(ExecutorError) as caught:
            executor.find_job(job)
        assert type(caught.value) is kind
    with pytest.raises(BackendUnavailable, match="refused"):
        RunPodExecutor(image="i", endpoint="http://127.0.0.1:9").find_job(job)


def test_a_refusal_that_quotes_the_request_shows_no_secret(pods: RunPod, tmp_path: Path, caplog: Any) -> None:
    """As GraphQL servers do that don't take a value."""
    executor = make(pods)
    fleet = [spec(tmp_path, extra_env={"API_TOKEN": "s3cr3t-value"})]
    executor.check_specs(fleet)
    words = f'Variable "$input" got invalid value {{ env: [{{ value: "s3cr3t-value" }}] }}; {"x" * 420} s3cr3t-value'
    for status in (200, 400):

        def refuse(asked: dict[str, Any], spot: bool, status: int = status) -> Any:
            raise Refused(status, {"errors": [{"message": words}]})

        pods.deploy = refuse  # type: ignore[method-assign]
        (handle,) = executor.launch_replicas(fleet)
        assert handle.job_id == "" and "got invalid value" in handle.reason and "***" in handle.reason
        assert "s3cr" not in handle.reason + caplog.text


def test_a_field_that_the_service_does_not_know_fails(pods: RunPod) -> None:
    """The stand-in is worth something: it refuses what the schema doesn't have."""
    executor = make(pods)
    with pytest.raises(ExecutorError, match="dockerArg"):
        executor._ask(
            "mutation D($input: PodFindAndDeployOnDemandInput!) { podFindAndDeployOnDemand(input: $input) { id } }",
            input={"dockerArg": "x"},
        )
    with pytest.raises(ExecutorError, match="Cannot query field 'exitCode'"):
        executor._ask("query { myself { pods { exitCode } } }")
    assert len(pods.unknown) == 2
    pods.unknown.clear()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu_count": 0}, "gpu_count must be at least 1"),
        ({"container_disk_gb": 0}, "container_disk_gb must be at least 1"),
        ({"bid_per_gpu": 0.0}, "bid_per_gpu must be more than 0"),
        ({"time_limit_hours": 721}, "runs a job for 720 hours at most"),
    ],
)
def test_settings_are_checked_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunPodExecutor(**settings)
