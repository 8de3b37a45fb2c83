"""The SageMaker back end beyond the contract: what it asks for, what it makes of each state, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3")

from composer_replication.diloco.serverless import ReplicaHandle, ReplicaSpec, SageMakerExecutor
from composer_replication.diloco.serverless.backends.sagemaker import CHECKPOINTS
from composer_replication.diloco.serverless.executor import BackendUnavailable, JobGone, QuotaExceeded
from composer_replication.diloco.serverless.jobs.encoded import decoded, encoded
from composer_replication.errors import ExecutorError
from tests.launchers.engine import Engine
from tests.launchers.sagemaker import AWS, ROLE, served

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PLAIN = {"command": ("python", "-c", "pass")}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AWS, Any]]:
    engine = Engine()
    try:
        with served(engine, monkeypatch) as (aws, backend):
            yield aws, backend
            assert aws.service.unknown == []
    finally:
        engine.close()


def quick(backend: Any, **settings: Any) -> SageMakerExecutor:
    executor = backend.make(backoff_seconds=0.0, **settings)
    executor.poll_seconds = executor.log_pause_seconds = executor.submit_backoff_seconds = 0.02
    return executor


def test_the_request_is_this_one(place: Any) -> None:
    _, backend = place
    executor = quick(
        backend,
        max_wait_hours=30.0,
        checkpoint_uri="s3://bucket/checkpoints/",
        subnets=["subnet-1"],
        security_groups=["sg-1"],
        tags={"team": "replicas"},
        env={"COLOUR": "red", "TWO": "a\nb"},
        volume_gb=200,
    )
    spec = ReplicaSpec(1, 2, "s3://bucket/run", command=("python", "train.py"))
    name = "run-03236a01-r1-0"
    assert executor.shown_payload(spec) == {
        "TrainingJobName": name,
        "RoleArn": ROLE,
        "AlgorithmSpecification": {
            "TrainingImage": "123456789012.dkr.ecr.us-east-1.amazonaws.com/replica:1",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["python", "-m", "composer_replication.diloco.serverless.jobs.container"],
            "ContainerArguments": [
                f"--job={name}",
                "--replica-id=1",
                "--num-replicas=2",
                "--rendezvous-uri=s3://bucket/run",
                f"--output={CHECKPOINTS}",
                "--",
                "python",
                "train.py",
            ],
        },
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/out"},
        "ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 1, "VolumeSizeInGB": 200},
        "StoppingCondition": {"MaxRuntimeInSeconds": 86400, "MaxWaitTimeInSeconds": 108000},
        "EnableManagedSpotTraining": True,
        "Environment": {"COLOUR": "red", "TWO": "a\nb"},
        "Tags": [
            {"Key": "team", "Value": "replicas"},
            {"Key": "composer-replication-run", "Value": "run-03236a01"},
            {"Key": "composer-replication-job", "Value": name},
        ],
        "CheckpointConfig": {"S3Uri": "s3://bucket/checkpoints/run-03236a01/replica-1", "LocalPath": CHECKPOINTS},
        "VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
    }
    executor.check(executor.job(spec))
    assert executor.supports_inter_replica_network


@pytest.mark.parametrize(
    ("status", "detail", "reason", "state", "more"),
    [
        ("InProgress", "Starting", "", "pending", {}),
        ("InProgress", "Pending", "", "pending", {}),
        ("InProgress", "LaunchingMLInstances", "", "pending", {}),
        ("InProgress", "PreparingTrainingStack", "", "pending", {}),
        ("InProgress", "Downloading", "", "pending", {}),
        ("InProgress", "DownloadingTrainingImage", "", "pending", {}),
        ("InProgress", "Training", "", "running", {}),
        ("InProgress", "Uploading", "", "running", {}),
        ("InProgress", "Updating", "", "running", {}),
        ("InProgress", "Interrupted", "", "preempted", {"will_retry": True}),
        ("InProgress", "Restarting", "", "preempted", {"will_retry": True}),
        ("Stopping", "Stopping", "", "running", {}),
        ("Completed", "Completed", "", "completed", {}),
        ("Failed", "Failed", "AlgorithmError: , exit code: 3", "failed", {"exit_code": 3}),
        ("Failed", "Failed", "ClientError: no such image", "failed", {}),
        ("Failed", "Failed", "CapacityError: Unable to provision requested ML capacity", "preempted", {}),
        ("Failed", "Failed", "InternalServerError: We encountered an internal error", "preempted", {}),
        ("Stopped", "Stopped", "", "cancelled", {}),
        ("Stopped", "MaxRuntimeExceeded", "", "cancelled", {"timed_out": True}),
        ("Stopped", "MaxWaitTimeExceeded", "", "preempted", {}),
        ("Deleting", "Stopped", "", "cancelled", {}),
    ],
)
def test_each_state_in_our_words(
    place: Any, tmp_path: Path, status: str, detail: str, reason: str, state: str, more: dict[str, Any]
) -> None:
    aws, backend = place
    executor = quick(backend)
    (handle,) = executor.launch_replicas([ReplicaSpec(0, 1, tmp_path.as_uri(), **PLAIN)])
    aws.jobs[handle.job_id].force = (status, detail, reason)
    seen = executor.look(handle.job_id)
    assert (seen.state, seen.native) == (state, f"{status}/{detail}")
    expected = {"will_retry": False, "timed_out": False, "exit_code": None, **more}
    assert {name: getattr(seen, name) for name in expected} == expected
    assert reason in seen.reason and handle.job_id in (seen.log_url or "")


def test_starts_are_counted_by_their_trainings(place: Any) -> None:
    from composer_replication.diloco.serverless.backends.sagemaker import _starts

    words = "Starting Pending Downloading Training Interrupted Starting Training Restarting Training Uploading"
    assert _starts([{"Status": word} for word in words.split()]) == 3
    assert _starts([{"Status": "Starting"}]) == 1


def test_without_spot_a_lost_machine_is_submitted_again(place: Any, tmp_path: Path) -> None:
    aws, backend = place
    script = (
        f"import pathlib, threading\nseen = pathlib.Path({str(tmp_path / 'seen')!r})\n"
        "if not seen.exists():\n    seen.touch(); print('ready'); threading.Event().wait()\nprint('second')"
    )
    executor = quick(backend, spot=False, keep_alive_minutes=10)
    command = ("python", "-u", "-c", script)
    (handle,) = executor.launch_replicas([ReplicaSpec(0, 1, (tmp_path / "store").as_uri(), command=command)])
    container = backend.container(handle.job_id)
    backend.engine.wait_for(lambda: "ready" in container.lines)
    backend.engine.take_machine(container)
    (result,) = executor.collect([handle], timeout=60)
    assert (result.status, result.metrics["attempts"], result.metrics["preemptions"]) == ("completed", 2, 1)
    assert [body["TrainingJobName"][-2:] for body in aws.submitted] == ["-0", "-1"]
    assert aws.submitted[0]["ResourceConfig"]["KeepAlivePeriodInSeconds"] == 600


def test_the_output_of_both_starts_is_read_in_order(place: Any, tmp_path: Path) -> None:
    aws, backend = place
    script = (
        f"import pathlib, threading\nseen = pathlib.Path({str(tmp_path / 'seen')!r})\n"
        "if not seen.exists():\n    seen.touch(); print('ready'); threading.Event().wait()\nprint('second')"
    )
    executor = quick(backend)
    command = ("python", "-u", "-c", script)
    (handle,) = executor.launch_replicas([ReplicaSpec(0, 1, (tmp_path / "store").as_uri(), command=command)])
    container = backend.container(handle.job_id)
    backend.engine.wait_for(lambda: "ready" in container.lines)
    backend.engine.take_machine(container, retried=True)
    executor.collect([handle], timeout=60)
    aws.throttled = 2  # the log is asked again, from the start of what isn't told yet
    lines = list(executor.stream_logs(handle))
    assert lines == container.lines and lines.index("ready") < lines.index("second")


def test_long_commands_and_variables_arrive(place: Any, tmp_path: Path) -> None:
    aws, backend = place
    long = "x" * 3000 + "\n'\"ü"
    script = "import os, sys; print(len(sys.argv[1]), len(os.environ['LONG']), os.environ['LONG'][-3:])"
    executor = quick(backend, env={"LONG": long, "SHORT": "1"})
    command = ("python", "-c", script, "y" * 5000)
    (handle,) = executor.launch_replicas([ReplicaSpec(0, 1, tmp_path.as_uri(), command=command)])
    assert "5000 3004 '\"ü" in list(executor.stream_logs(handle))
    body = aws.submitted[0]
    assert body["Environment"] == {"SHORT": "1"}
    arguments = body["AlgorithmSpecification"]["ContainerArguments"]
    assert all(len(one) <= 256 for one in arguments) and decoded(arguments)[0] == f"--variable=LONG={long}"


def test_encoding_gives_back_what_it_was_given() -> None:
    words = ["--a=b", "", "a\nb", "'\"$(x) ü ${{inputs.x}}", "z" * 1000]
    for longest in (11, 256, 100_000):
        parts = encoded(words, longest)
        assert decoded(parts) == words and all(len(one) <= longest for one in parts)
    assert decoded(words) == words and decoded([]) == []
    with pytest.raises(ValueError, match="isn't a whole command"):
        decoded(encoded(words, 256)[:-1] or ["--encoded=x"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_alive_minutes": 10}, "no spot machine warm"),
        ({"max_wait_hours": 2.0}, "max_wait_hours=2 must be at least the time limit, 24 hours"),
        ({"spot": False, "max_wait_hours": 30.0}, "max_wait_hours is for spot"),
        ({"subnets": ["subnet-1"]}, "subnets and security_groups go together"),
        ({"spot": False, "keep_alive_minutes": 600}, "KeepAlivePeriodInSeconds has 36000, allowed are 0 to 21600"),
        ({"env": {f"V{i}": "1" for i in range(101)}}, "Environment has 101 entries, allowed are 0 to 100"),
        ({"env": {"FARBTÖNE": "1"}}, "the name 'FARBTÖNE' in Environment"),
        ({"output_path": "bucket/out"}, "OutputDataConfig.S3OutputPath 'bucket/out' isn't of the form"),
        ({"image": "i" * 256}, "TrainingImage has 256 characters"),
        ({"subnets": ["a b"], "security_groups": ["sg-1"]}, r"VpcConfig.Subnets\[0\] 'a b' isn't of the form"),
        ({"instance_type": "H100"}, "instance_type 'H100' isn't known"),
        ({"run_name": "Äpfel", "profile": "nobody"}, "nobody"),
    ],
)
def test_what_it_refuses_before_anything_starts(place: Any, settings: dict[str, Any], message: str) -> None:
    aws, backend = place
    spec = ReplicaSpec(0, 1, "memory://refused", **PLAIN)
    with pytest.raises((ValueError, ExecutorError), match=message):
        quick(backend, **settings).launch_replicas([spec])
    assert aws.submitted == []


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (None, "no usable credentials"),
        ("AKIAWRONG", "refuses the credentials, which are wrong or have expired: .*InvalidClientTokenId"),
        ("ASIAEXPIRED", "refuses the credentials, which are wrong or have expired: .*ExpiredToken"),
    ],
)
def test_credentials_are_found_out_first(place: Any, monkeypatch: Any, key: str | None, message: str) -> None:
    aws, backend = place
    if key is None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    else:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    with pytest.raises(ExecutorError, match=message) as told:
        quick(backend).launch_replicas([ReplicaSpec(0, 1, "memory://credentials", **PLAIN)])
    assert "a-key-of-the-tests" not in str(told.value) and aws.calls == []


def test_what_the_service_is_short_of_is_said(place: Any, tmp_path: Path, monkeypatch: Any) -> None:
    _, backend = place
    executor = quick(backend)
    spec = ReplicaSpec(0, 1, tmp_path.as_uri(), **PLAIN)
    backend.engine.refuse("quota", "outage")
    with pytest.raises(QuotaExceeded, match="ResourceLimitExceeded.*service limit is 1 Instances"):
        executor.submit_job(executor.job(spec))
    with pytest.raises(BackendUnavailable, match="ServiceUnavailable"):
        executor.submit_job(executor.job(spec))
    monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", "http://127.0.0.1:9")  # nobody is there
    with pytest.raises(BackendUnavailable, match="Could not connect"):
        quick(backend).look("some-job")


def test_a_submission_whose_answer_was_lost_counts(place: Any, tmp_path: Path) -> None:
    aws, backend = place
    executor = quick(backend)
    job = executor.job(ReplicaSpec(0, 1, tmp_path.as_uri(), **PLAIN))
    assert executor.find_job(job) is None
    assert executor.submit_job(job) == executor.submit_job(job) == executor.find_job(job) == job.name
    assert len(aws.jobs) == 1
    with pytest.raises(ExecutorError, match="sagemaker has no job 'another'"):
        executor.look("another")
    with pytest.raises(JobGone):  # whether it runs all the same is for its replica to say
        executor.stop_job("another")


def test_secrets_are_in_no_request(place: Any, monkeypatch: Any) -> None:
    aws, backend = place
    monkeypatch.setenv("STORE_PASSWORD", "s3cr3t-value")
    executor = quick(backend, secrets=["STORE_PASSWORD"], env={"NOTE": "open with s3cr3t-value"})
    spec = ReplicaSpec(0, 1, "memory://secrets", extra_env={"API_TOKEN": "an0ther"}, **PLAIN)
    shown = json.dumps(executor.shown_payload(spec))
    assert "s3cr3t-value" not in shown and "an0ther" not in shown and "open with ***" in shown
    with pytest.raises(ValueError, match="API_TOKEN, STORE_PASSWORD can't be handed over"):
        executor.launch_replicas([spec])
    assert aws.submitted == []


def test_a_kept_checkpoint_is_where_the_service_has_put_it(place: Any, tmp_path: Path) -> None:
    from composer_replication.diloco.serverless.jobs.marks import Mark

    _, backend = place
    executor = quick(backend, checkpoint_uri="s3://bucket/kept")
    marks = executor.marks(tmp_path.as_uri())
    name = "run-12345678-r0-0"
    result = {"final_checkpoint_uri": f"file://{CHECKPOINTS}/final.pt"}
    marks.mark(Mark(name, 0, state="completed", exit_code=0, result=result))
    handle = ReplicaHandle(0, "sagemaker", name, name=name, state="completed", exit_code=0)
    (found,) = executor.collect([handle])
    assert found.final_checkpoint_uri == "s3://bucket/kept/run-12345678/replica-0/final.pt"
