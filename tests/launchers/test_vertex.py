"""Vertex AI beyond the contract: exact requests, states, Cloud Logging, credentials, bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.cloud.aiplatform_v1")

from composer_replication.diloco.serverless import ReplicaSpec
from composer_replication.diloco.serverless.backends.vertex import VertexExecutor
from composer_replication.diloco.serverless.backends.vertex_states import STATES, seen
from composer_replication.diloco.serverless.jobs.encoded import decoded
from composer_replication.diloco.serverless.jobs.job import Job
from composer_replication.errors import ExecutorError
from tests.launchers.engine import Engine
from tests.launchers.vertex import BEGAN, PARENT, Vertex, credentials

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class World:
    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.vertex = Vertex(engine)

    def make(self, **settings: Any) -> VertexExecutor:
        usual = {
            "project": "shop",
            "image": "registry/image:1",
            "credentials": credentials(),
            "endpoint": self.vertex.service.url,
            "logging_endpoint": self.vertex.service.url,
        }
        made = VertexExecutor(**{**usual, **settings})
        made.poll_seconds = made.log_pause_seconds = made.submit_backoff_seconds = 0.02
        return made

    def spec(self, script: str, **more: Any) -> ReplicaSpec:
        return ReplicaSpec(0, 1, (self.folder / "store").as_uri(), command=("python", "-u", "-c", script), **more)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    engine = Engine()
    made = World(engine, tmp_path)
    try:
        yield made
        assert made.vertex.service.unknown == []
    finally:
        made.vertex.service.close()
        engine.close()


JOB = Job(
    name="run-0123abcd-r1-0",
    run="run-0123abcd",
    replica=1,
    submission=0,
    command=("python", "-m", "container", "--job=run-0123abcd-r1-0", "--", "python", "train.py"),
    env={"PRICE": "5$"},
    time_limit_seconds=7200,
)
SETTINGS: dict[str, Any] = {
    "project": "shop",
    "image": "registry/image:1",
    "machine_type": "a3-highgpu-8g",
    "accelerator_type": "NVIDIA_H100_80GB",
    "accelerator_count": 8,
    "credentials": object(),
}


def test_the_exact_request() -> None:
    executor = VertexExecutor(
        **SETTINGS,
        spot=True,
        service_account="trainer@shop.iam.gserviceaccount.com",
        network="projects/12345/global/networks/training",
        disk_gb=500,
        restart_job_on_worker_restart=True,
    )
    assert executor.payload(JOB) == {
        "parent": PARENT,
        "custom_job": {
            "display_name": "run-0123abcd-r1-0",
            "labels": {
                "composer-replication-run": "run-0123abcd",
                "composer-replication-job": "run-0123abcd-r1-0",
            },
            "job_spec": {
                "worker_pool_specs": [
                    {
                        "machine_spec": {
                            "machine_type": "a3-highgpu-8g",
                            "accelerator_type": "NVIDIA_H100_80GB",
                            "accelerator_count": 8,
                        },
                        "replica_count": 1,
                        "disk_spec": {"boot_disk_type": "pd-ssd", "boot_disk_size_gb": 500},
                        "container_spec": {
                            "image_uri": "registry/image:1",
                            "command": ["python", "-m", "container"],
                            "args": ["--job=run-0123abcd-r1-0", "--", "python", "train.py"],
                            "env": [{"name": "PRICE", "value": "5$$"}],
                        },
                    }
                ],
                "scheduling": {
                    "timeout": {"seconds": 7200},
                    "strategy": "SPOT",
                    "restart_job_on_worker_restart": True,
                    "disable_retries": False,
                },
                "service_account": "trainer@shop.iam.gserviceaccount.com",
                "network": "projects/12345/global/networks/training",
            },
        },
    }


def test_what_goes_over_the_wire(world: World) -> None:
    world.make(**{**SETTINGS, "credentials": credentials()}, max_wait_hours=2.0, disable_retries=True).submit_job(JOB)
    (body,) = world.vertex.submitted
    machine = {"machineType": "a3-highgpu-8g", "acceleratorType": 13, "acceleratorCount": 8}
    scheduling = {"timeout": "7200s", "strategy": 6, "disableRetries": True, "maxWaitDuration": "7200s"}
    assert body["jobSpec"]["workerPoolSpecs"][0]["machineSpec"] == machine
    assert body["jobSpec"]["scheduling"] == scheduling and body["displayName"] == JOB.name


def test_a_machine_without_an_accelerator_and_words_with_dollars() -> None:
    executor = VertexExecutor(**{**SETTINGS, "accelerator_type": None})
    command = (*JOB.command[:5], "python", "-c", "print('$HOME')")
    (pool,) = executor.payload(replace(JOB, command=command))["custom_job"]["job_spec"]["worker_pool_specs"]
    assert pool["machine_spec"] == {"machine_type": "a3-highgpu-8g"}
    arguments = pool["container_spec"]["args"]
    assert not any("$" in word for word in arguments) and decoded(arguments) == list(command[3:])


def test_a_field_that_the_client_does_not_know_is_an_error() -> None:
    from google.cloud.aiplatform_v1.types import CustomJob

    values = VertexExecutor(**SETTINGS).payload(JOB)["custom_job"]
    CustomJob(values)
    values["job_spec"]["scheduling"]["time_out"] = values["job_spec"]["scheduling"].pop("timeout")
    with pytest.raises(ValueError, match="time_out"):
        CustomJob(values)


def job(state: str, code: int = 0, message: str = "", *, ran: int | None = None) -> Any:
    from google.cloud.aiplatform_v1.types import CustomJob, JobState

    made = CustomJob(name=f"{PARENT}/customJobs/17", state=JobState[state], error={"code": code, "message": message})
    made.job_spec.scheduling.timeout = timedelta(hours=1)
    if ran is not None:
        made.start_time, made.end_time = BEGAN, BEGAN + timedelta(seconds=ran)
    return made


@pytest.mark.parametrize(
    ("state", "ours"),
    [
        ("JOB_STATE_UNSPECIFIED", "pending"),
        ("JOB_STATE_QUEUED", "pending"),
        ("JOB_STATE_PENDING", "pending"),
        ("JOB_STATE_PAUSED", "pending"),
        ("JOB_STATE_RUNNING", "running"),
        ("JOB_STATE_UPDATING", "running"),
        ("JOB_STATE_CANCELLING", "running"),
        ("JOB_STATE_SUCCEEDED", "completed"),
        ("JOB_STATE_FAILED", "failed"),
        ("JOB_STATE_PARTIALLY_SUCCEEDED", "failed"),
        ("JOB_STATE_EXPIRED", "failed"),
        ("JOB_STATE_CANCELLED", "cancelled"),
    ],
)
def test_states(state: str, ours: str) -> None:
    found = seen(job(state))
    assert (found.state, found.native, found.timed_out, found.exit_code) == (ours, state, False, None)
    assert found.log_url is not None and found.log_url.endswith("/locations/us-central1/training/17?project=shop")


def test_all_states_of_the_client_are_known() -> None:
    from google.cloud.aiplatform_v1.types import JobState

    assert {one.name for one in JobState} == set(STATES)


@pytest.mark.parametrize(
    ("found", "state", "timed_out", "code"),
    [
        (("JOB_STATE_FAILED", 8, "Resources are insufficient in region"), "preempted", False, None),
        (("JOB_STATE_FAILED", 14, "try again"), "preempted", False, None),
        (("JOB_STATE_FAILED", 13, "The replica workerpool0-0 was preempted"), "preempted", False, None),
        (("JOB_STATE_FAILED", 3, "The replica exited with a non-zero status of 75."), "failed", False, 75),
        (("JOB_STATE_FAILED", 9, "exited with a non-zero status of 1. Unavailable: x"), "failed", False, 1),
        (
            ("JOB_STATE_FAILED", 3, "ran out-of-memory and exited with a non-zero status of 9(SIGKILL)"),
            "failed",
            False,
            137,
        ),
        (("JOB_STATE_FAILED", 4, "stopped"), "failed", True, None),
        (("JOB_STATE_FAILED", 13, "The job has timed out."), "failed", True, None),
        (("JOB_STATE_CANCELLED", 1, "cancelled: maximum running time"), "cancelled", True, None),
        (("JOB_STATE_EXPIRED", 4, "timeout"), "failed", False, None),
        (("JOB_STATE_FAILED", 3, "Image can't be pulled"), "failed", False, None),
    ],
)
def test_what_an_error_says(found: tuple[str, int, str], state: str, timed_out: bool, code: int | None) -> None:
    told = seen(job(*found))
    assert (told.state, told.timed_out, told.exit_code) == (state, timed_out, code) and told.reason == found[2]


def test_a_job_that_ran_for_as_long_as_it_may_has_timed_out() -> None:
    assert seen(job("JOB_STATE_CANCELLED", ran=3600)).timed_out
    assert seen(job("JOB_STATE_FAILED", 3, "non-zero status of 143", ran=3601)).timed_out
    assert not seen(job("JOB_STATE_CANCELLED", ran=3599)).timed_out
    assert not seen(job("JOB_STATE_SUCCEEDED", ran=3601)).timed_out


# -- against the service -----------------------------------------------------------------------------------------------


def test_a_job_is_found_by_name_and_labels(world: World) -> None:
    executor = world.make()
    assert executor.find_job(JOB) is None
    first = executor.submit_job(JOB)
    second = executor.submit_job(JOB)  # somebody's of the same name, and newer, but not ours
    world.vertex.jobs[second][0].labels.clear()
    world.vertex.jobs[second][0].create_time = BEGAN + timedelta(days=1)
    assert executor.find_job(JOB) == first


def test_cancelling_an_ended_job_is_harmless_and_an_unknown_one_is_told(world: World) -> None:
    executor = world.make()
    (handle,) = executor.launch_replicas([world.spec("pass")])
    executor.collect([handle], timeout=60)
    executor.stop_job(handle.job_id)
    with pytest.raises(ExecutorError, match="doesn't exist"):
        executor.look(f"{PARENT}/customJobs/1")


def test_what_vertex_would_replace_arrives_as_it_is(world: World) -> None:
    awkward = "$(COLOUR) $$ $$(COLOUR) $ $(NOT_SET)"
    script = f"import os; print(os.environ['AWKWARD'] == {awkward!r})"
    executor = world.make(env={"COLOUR": "red", "AWKWARD": awkward})
    (handle,) = executor.launch_replicas([world.spec(script)])
    assert "True" in list(executor.stream_logs(handle))


def test_what_is_secret_is_in_no_payload(world: World) -> None:
    executor, spec = world.make(), world.spec("pass", extra_env={"API_TOKEN": "s3cr3t"})
    assert "s3cr3t" not in json.dumps(executor.shown_payload(spec))
    with pytest.raises(ValueError, match="API_TOKEN can't be handed over"):
        executor.launch_replicas([spec])


def test_other_readers_of_the_logs_only_slow_it_down(world: World) -> None:
    executor = world.make()
    (handle,) = executor.launch_replicas([world.spec("print('one')\nprint('')\nprint('three')")])
    executor.collect([handle], timeout=60)
    world.vertex.busy_reads = 3
    lines = list(executor.follow(handle.job_id))
    assert lines[2:5] == ["one", "", "three"] and world.vertex.reads > 4


# -- credentials and settings ------------------------------------------------------------------------------------------


def without_credentials(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT", "APPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(folder / "gcloud"))
    monkeypatch.setenv("PATH", str(folder))  # no gcloud to ask for a project
    monkeypatch.setenv("NO_GCE_CHECK", "true")


def test_missing_credentials_are_told_before_anything_starts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    without_credentials(monkeypatch, world.folder)
    with pytest.raises(ExecutorError, match="no Google Cloud credentials .gcloud auth application-default login"):
        world.make(credentials=None).launch_replicas([world.spec("pass")])
    assert world.engine.containers == []


def test_the_default_credentials_are_taken_and_must_have_a_project(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_credentials(monkeypatch, world.folder)
    user = {"type": "authorized_user", "client_id": "i", "client_secret": "s", "refresh_token": "r"}
    (world.folder / "adc.json").write_text(json.dumps(user))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(world.folder / "adc.json"))
    assert world.make(credentials=None).identity[0].refresh_token == "r"
    with pytest.raises(ExecutorError, match="project isn't given"):
        _ = world.make(credentials=None, project=None).identity
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "from-the-environment")
    assert world.make(credentials=None, project=None).parent == "projects/from-the-environment/locations/us-central1"


def test_a_missing_client_names_the_extra(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.cloud.aiplatform_v1.types", None)
    with pytest.raises(ExecutorError, match=r"pip install 'composer-replication\[vertex\]'"):
        world.make().launch_replicas([world.spec("pass")])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accelerator_count": 0}, "accelerator_count must be at least 1"),
        ({"max_wait_hours": 0.0}, "max_wait_hours must be more than 0"),
        ({"disk_gb": 10}, "disk_gb must be at least 100"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VertexExecutor(**settings)
