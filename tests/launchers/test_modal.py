"""Modal beyond the contract: the request to the letter, every native state, limits and mistakes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication import __version__
from composer_replication.diloco.serverless import ModalExecutor, ReplicaSpec
from composer_replication.diloco.serverless.executor import BackendUnavailable
from composer_replication.diloco.serverless.jobs.job import Job
from composer_replication.errors import ExecutorError
from tests.launchers.engine import Engine
from tests.launchers.modal import Modal, served

pytest.importorskip("modal")
pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Modal]:
    engine = Engine()
    try:
        with served(engine, monkeypatch) as made:
            yield made
            assert made.unknown == []
    finally:
        engine.close()


def job(*command: str, **values: Any) -> Job:
    words = command or ("python", "-c", "pass")
    usual: dict[str, Any] = {"env": {"COLOUR": "red"}, "secrets": {"API_TOKEN": "s3cr3t"}, "time_limit_seconds": 3600}
    return Job("run-1-r0-0", "run-1", 0, 0, words, **{**usual, **values})


def test_the_request_is_what_the_settings_say(service: Modal, tmp_path: Path) -> None:
    executor = ModalExecutor(
        gpu="h100:8",
        image="registry/image:1",
        region=["us-east", "us-west"],
        cloud="aws",
        cpu=4.0,
        memory_mib=2048,
        volumes={"/runs": "my-runs", "/bucket": "s3://bucket/a/prefix"},
        app="trainings",
        environment="staging",
    )
    # It waits, as only what runs is listed.
    command = ("python", "-c", "print('it\\'s \"quoted\"')\nimport threading; threading.Event().wait()")
    job_id = executor.submit_job(job(*command))
    (request,) = service.created
    asked = request.definition
    assert tuple(asked.entrypoint_args) == command and asked.name == "run-1-r0-0"
    assert {tag.tag_name: tag.tag_value for tag in request.tags} == {
        "composer-replication-run": "run-1",
        "composer-replication-job": "run-1-r0-0",
    }
    assert (asked.resources.gpu_config.gpu_type, asked.resources.gpu_config.count) == ("H100", 8)
    assert (asked.resources.milli_cpu, asked.resources.memory_mb, asked.timeout_secs) == (4000, 2048, 3600)
    assert (list(asked.scheduler_placement.regions), asked.cloud_provider_str) == (["us-east", "us-west"], "aws")
    assert [(one.mount_path, one.volume_id) for one in asked.volume_mounts] == [("/runs", "vo-my-runs")]
    (bucket,) = asked.cloud_bucket_mounts
    assert (bucket.mount_path, bucket.bucket_name, bucket.key_prefix) == ("/bucket", "bucket", "a/prefix/")
    assert service.secrets[bucket.credentials_secret_id] == {"API_TOKEN": "s3cr3t"}
    assert sorted(map(str, (service.secrets[one] for one in asked.secret_ids))) == [
        "{'API_TOKEN': 's3cr3t'}",
        "{'COLOUR': 'red'}",
    ]
    assert service.apps == [("staging", "trainings")]
    assert "FROM registry/image:1" in "\n".join(service.images[0].dockerfile_commands)
    assert executor.find_job(job()) == job_id


def test_a_role_takes_the_place_of_keys_for_a_bucket(service: Modal) -> None:
    executor = ModalExecutor(image="im-1", volumes={"/b": "s3://bucket"}, bucket_role="arn:aws:iam::1:role/runs")
    executor.submit_job(job())
    (bucket,) = service.created[0].definition.cloud_bucket_mounts
    assert (bucket.oidc_auth_role_arn, bucket.key_prefix) == ("arn:aws:iam::1:role/runs", "")
    assert bucket.credentials_secret_id == "" and service.images == []  # an image by its id isn't built


def test_without_an_image_it_installs_this_package(service: Modal) -> None:
    executor = ModalExecutor(gpu="A100-40GB", region=None, preemptible=True)
    spec = ReplicaSpec(0, 1, "s3://bucket/run", model_id="Qwen/Qwen2.5-7B")
    executor.submit_job(executor.job(spec))
    built = "\n".join(line for image in service.images for line in image.dockerfile_commands)
    assert "FROM python:3.12" in built
    assert f"composer-replication[lightning,recipe,safetensors,s3]=={__version__}" in built and "transformers" in built
    composer = executor.payload(executor.job(ReplicaSpec(0, 1, "gs://bucket/run", trainer="composer")))
    assert composer["image"]["pip_install"][0].startswith("composer-replication[composer,recipe,safetensors,gcs]")
    other = executor.payload(executor.job(ReplicaSpec(0, 1, "s3a://bucket/run")))  # another name for s3
    assert other["image"]["pip_install"][0].startswith("composer-replication[lightning,recipe,safetensors,s3]")


def test_shown_with_secrets_masked(service: Modal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_PASSWORD", "s3cr3t-value")
    executor = ModalExecutor(secrets=["STORE_PASSWORD"], env={"COLOUR": "red"}, time_limit_hours=2)
    shown = executor.shown_payload(ReplicaSpec(0, 2, "s3://bucket/run", command=("python", "train.py")))
    assert shown["secrets"] == {"STORE_PASSWORD": "***"} and "s3cr3t" not in json.dumps(shown)
    name = shown["name"]
    assert shown == {
        "args": [
            *("python", "-m", "composer_replication.diloco.serverless.jobs.container", f"--job={name}"),
            *("--replica-id=0", "--num-replicas=2", "--rendezvous-uri=s3://bucket/run", "--", "python", "train.py"),
        ],
        "app": "composer-replication",
        "name": name,
        "tags": {"composer-replication-run": name.removesuffix("-r0-0"), "composer-replication-job": name},
        "image": {
            "debian_slim": "3.12",
            "pip_install": [f"composer-replication[lightning,recipe,safetensors,s3]=={__version__}", "transformers"],
        },
        "env": {"COLOUR": "red"},
        "secrets": {"STORE_PASSWORD": "***"},
        "timeout": 7200,
        "gpu": "A100-40GB",
    }
    assert service.created == []


# What the service says (status, exit code) -> our state, its words, the exit code, whether its time was over. The
# client tells apart time-outs, terminations and exit codes, no more; what it calls exit code 0 counts as completed only
# with the replica's own word.
STATES = [
    ("UNSPECIFIED", 0, ("running", "running", None, False)),
    ("SUCCESS", 0, ("completed", "exit code 0", None, False)),
    ("FAILURE", 3, ("failed", "exit code 3", 3, False)),
    ("FAILURE", 137, ("failed", "exit code 137", 137, False)),  # by itself: not what the service terminated
    ("FAILURE", 124, ("failed", "exit code 124", 124, False)),  # by itself: its time wasn't over
    ("TERMINATED", 0, ("preempted", "terminated", None, False)),
    ("TIMEOUT", 0, ("failed", "timeout", None, True)),
    ("INIT_FAILURE", 1, ("failed", "exit code 1", 1, False)),
    ("INTERNAL_FAILURE", 0, ("completed", "exit code 0", None, False)),
    ("IDLE_TIMEOUT", 0, ("completed", "exit code 0", None, False)),
    ("MEMORY_MANAGER_EVICTION", 137, ("failed", "exit code 137", 137, False)),
    ("MEMORY_THRASHING_EVICTION", 137, ("failed", "exit code 137", 137, False)),
    ("KERNEL_OOM_KILL", 137, ("failed", "exit code 137", 137, False)),
]


def test_every_state_of_the_service_has_one_of_ours(service: Modal) -> None:
    kinds = service.api.GenericResult
    assert {f"GENERIC_STATUS_{status}" for status, *_ in STATES} == set(kinds.GenericStatus.keys())
    executor = ModalExecutor(image="im-1")
    job_id = executor.submit_job(job())
    service.engine.wait_for(lambda: service.sandboxes[job_id][1].ended)
    for status, code, expected in STATES:
        service.results[job_id] = kinds(status=kinds.GenericStatus.Value(f"GENERIC_STATUS_{status}"), exitcode=code)
        seen = executor.look(job_id)
        assert (seen.state, seen.native, seen.exit_code, seen.timed_out) == expected, status


def test_what_the_service_lost_is_a_preemption_whatever_it_calls_it(service: Modal, tmp_path: Path) -> None:
    """A replica that had begun and left no last word isn't completed because the service says exit code 0."""
    executor = ModalExecutor(image="im-1", restarts=0)
    command = ("python", "-u", "-c", "print('ready'); import threading; threading.Event().wait()")
    (handle,) = executor.launch_replicas([ReplicaSpec(0, 1, tmp_path.as_uri(), command=command)])
    _, container = service.sandboxes[handle.job_id]
    service.engine.wait_for(lambda: "ready" in container.lines)
    service.engine.take_machine(container)
    service.engine.wait_for(lambda: container.ended)
    kinds = service.api.GenericResult
    service.results[handle.job_id] = kinds(status=kinds.GENERIC_STATUS_INTERNAL_FAILURE)
    (handle,) = executor.poll([handle])
    assert (handle.state, handle.native, handle.ended) == ("preempted", "exit code 0", True)


def test_output_goes_on_after_a_broken_connection(service: Modal) -> None:
    executor = ModalExecutor(image="im-1")
    service.breaks = [2, 4]
    job_id = executor.submit_job(job("python", "-c", "for i in range(6): print('line', i)"))
    assert list(executor.follow(job_id)) == [f"line {i}" for i in range(6)]
    assert service.breaks == []


def test_without_a_gpu_output_comes_through_the_store(service: Modal, tmp_path: Path) -> None:
    executor = ModalExecutor(image="im-1", gpu=None, preemptible=False, env={"COLOUR": "red"})
    executor.poll_seconds = executor.log_pause_seconds = 0.02
    command = ("python", "-c", "import os; print(os.environ['COLOUR'])")
    (handle,) = executor.launch_replicas([ReplicaSpec(0, 1, tmp_path.as_uri(), command=command)])
    assert "--ship-logs" in service.created[0].definition.entrypoint_args
    assert executor.find_job(executor.job(ReplicaSpec(0, 1, tmp_path.as_uri()))) in (handle.job_id, None)
    assert "red" in list(executor.stream_logs(handle))
    assert executor.collect([handle], timeout=60)[0].status == "completed"
    executor.stop_job(handle.job_id)  # harmless


def test_a_limit_beyond_the_services_means_several_sandboxes(service: Modal) -> None:
    executor = ModalExecutor(image="im-1", time_limit_hours=60, restarts=2)
    assert executor.job(ReplicaSpec(0, 1, "s3://bucket/run")).time_limit_seconds == 24 * 3600
    assert executor.budgets.restarts == 2 + 2
    with pytest.raises(ExecutorError, match="isn't 1 to 86400"):  # the service wouldn't have taken it
        executor.submit_job(job(time_limit_seconds=200_000))


def test_a_replica_goes_on_in_another_sandbox_when_the_services_time_is_over(service: Modal, tmp_path: Path) -> None:
    executor = ModalExecutor(image="im-1", time_limit_hours=48, restarts=0, backoff_seconds=0.0)
    executor.poll_seconds = executor.log_pause_seconds = 0.02
    seen = tmp_path / "seen"
    script = (
        f"import pathlib, threading\nseen = pathlib.Path({str(seen)!r})\n"
        "if not seen.exists():\n    seen.touch(); print('ready', flush=True); threading.Event().wait()\nprint('second')"
    )
    spec = ReplicaSpec(0, 1, (tmp_path / "store").as_uri(), command=("python", "-c", script))
    (handle,) = executor.launch_replicas([spec])
    _, container = service.sandboxes[handle.job_id]
    service.engine.wait_for(lambda: "ready" in container.lines)
    service.engine.let_time_run_out(container)
    (result,) = executor.collect([handle], timeout=60)
    assert (result.status, result.metrics["attempts"]) == ("completed", 2)
    assert [one.definition.name[-2:] for one in service.created] == ["-0", "-1"]


def test_a_name_that_another_launcher_took_first_is_its_sandbox(service: Modal) -> None:
    executor = ModalExecutor(image="im-1")
    waiting = job("python", "-c", "import threading; threading.Event().wait()")
    assert executor.submit_job(waiting) == executor.submit_job(waiting)
    assert len(service.created) == 1


def test_mistakes_are_told_before_anything_starts(service: Modal, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="one clustered function, which take all GPUs"):
        ModalExecutor(gpu="H100:8", use_clustered_rdma=True)
    for settings in ({"gpu": "T4"}, {"gpu": None, "region": "us-east"}, {"gpu": None, "cloud": "aws"}):
        with pytest.raises(ValueError, match="preemptible=False: Modal may take the machine"):
            ModalExecutor(preemptible=False, **settings)
    specs = [ReplicaSpec(0, 1, "s3://bucket/run")]
    with pytest.raises(ValueError, match="gpu 'RTX-PRO-600' isn't known. Did you mean 'RTX-PRO-6000'"):
        ModalExecutor(gpu="rtx-pro-600").check_specs(specs)
    monkeypatch.setenv("MODAL_TOKEN_ID", "ak-expired")
    with pytest.raises(ExecutorError, match="Modal: Token ID is malformed"):
        ModalExecutor().check_specs(specs)
    assert service.created == []


def test_without_a_token_one_error_says_how_to_get_it(service: Modal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MODAL_TOKEN_ID")
    monkeypatch.delenv("MODAL_TOKEN_SECRET")
    with pytest.raises(ExecutorError, match="Modal: Token missing.*modal token new"):
        ModalExecutor().launch_replicas([ReplicaSpec(0, 1, "s3://bucket/run")])
    assert service.created == []


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(ExecutorError, match=r"pip install 'composer-replication\[modal\]'"):
        ModalExecutor().check_specs([ReplicaSpec(0, 1, "s3://bucket/run")])


def test_an_unknown_sandbox_is_an_error_and_a_lost_connection_worth_another_try(service: Modal) -> None:
    executor = ModalExecutor(image="im-1")
    with pytest.raises(ExecutorError, match="no sandbox sb-"):
        executor.look(f"sb-{9:022d}")
    service.engine.refuse("outage")
    with pytest.raises(BackendUnavailable, match="no route"):
        executor.submit_job(job())
