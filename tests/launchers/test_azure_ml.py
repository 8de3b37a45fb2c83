"""The Azure ML back end beyond the contract: what it asks for, what it makes of each state, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("azure.ai.ml")

from composer_replication.diloco.serverless import AzureMLExecutor, ReplicaSpec
from composer_replication.diloco.serverless.backends.azure_ml import _shell
from composer_replication.diloco.serverless.executor import BackendUnavailable, JobGone, QuotaExceeded
from composer_replication.diloco.serverless.jobs.encoded import decoded
from composer_replication.errors import ExecutorError
from tests.launchers.azure_ml import PLACE, Azure, Credential, served
from tests.launchers.azure_models import faults
from tests.launchers.engine import Engine

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

WAITING = {"command": ("python", "-u", "-c", "import threading; print('ready'); threading.Event().wait()")}
PLAIN = {"command": ("python", "-c", "pass")}
WHO = "22222222-0000-0000-0000-000000000000"
MODULE = "composer_replication.diloco.serverless.jobs.container"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Azure, Any]]:
    engine = Engine()
    try:
        with served(engine, monkeypatch) as (azure, backend):
            yield azure, backend
            assert azure.service.unknown == []
    finally:
        engine.close()


def quick(backend: Any, **settings: Any) -> AzureMLExecutor:
    executor = backend.make(backoff_seconds=0.0, **settings)
    executor.poll_seconds = executor.log_pause_seconds = executor.submit_backoff_seconds = 0.02
    return executor


def test_the_requests_are_these(place: Any, tmp_path: Path) -> None:
    azure, backend = place
    executor = quick(
        backend,
        identity=WHO,
        tags={"team": "replicas"},
        env={"COLOUR": "red", "TWO": "a\nb"},
        time_limit_hours=2.5,
        shm_size="8g",
    )
    uri = tmp_path.as_uri()
    (handle,) = executor.launch_replicas([ReplicaSpec(0, 1, uri, command=("python", "-V"))])
    run = handle.name.removesuffix("-r0-0")
    (environment,) = azure.environments
    assert azure.environments[environment]["properties"]["image"] == "registry.azurecr.io/replica:1"
    (body,) = azure.submitted
    # "properties" is where the client has found a git repository.
    assert {name: value for name, value in body["properties"].items() if name != "properties"} == {
        "jobType": "Command",
        "displayName": handle.name,
        "experimentName": run,
        "command": f"python -m {MODULE} --job={handle.name} --replica-id=0 --num-replicas=1 --rendezvous-uri={uri} --"
        " python -V",
        "environmentId": environment,
        "environmentVariables": {"COLOUR": "red", "TWO": "a\nb", "AZURE_CLIENT_ID": WHO},
        "identity": {"identityType": "Managed", "clientId": WHO},
        "inputs": {},
        "outputs": {},
        "isArchived": False,
        "limits": {"jobLimitsType": "Command", "timeout": "PT2H30M"},
        "queueSettings": {"jobTier": "Spot"},
        "resources": {
            "instanceCount": 1,
            "instanceType": "Standard_NC24ads_A100_v4",
            "properties": {},
            "shmSize": "8g",
        },
        "tags": {"team": "replicas", "composer-replication-run": run, "composer-replication-job": handle.name},
    }
    executor.collect([handle], timeout=60)


def test_a_cluster_and_a_registered_environment_go_by_their_ids(place: Any, tmp_path: Path) -> None:
    azure, backend = place
    settings = {"instance_type": None, "tier": None, "compute": "gpus", "image": None, "environment": "torch:3"}
    executor = quick(backend, **settings, identity="system")
    (handle,) = executor.launch_replicas([ReplicaSpec(0, 1, tmp_path.as_uri(), **PLAIN)])
    properties = azure.submitted[0]["properties"]
    assert properties["computeId"] == f"{PLACE}/computes/gpus"
    assert properties["environmentId"] == f"{PLACE}/environments/torch/versions/3"
    assert properties["identity"] == {"identityType": "Managed"} and "queueSettings" not in properties
    assert "AZURE_CLIENT_ID" not in properties["environmentVariables"] and azure.environments == {}
    executor.collect([handle], timeout=60)


def test_the_stand_in_refuses_what_the_models_do_not_know(place: Any) -> None:
    azure, _ = place
    good = {"properties": {"jobType": "Command", "command": "x", "environmentId": "e", "limits": {"timeout": "PT1H"}}}

    def told(**changes: Any) -> list[str]:
        body = {"properties": {**good["properties"], **changes}}
        return list(faults(body, azure._models.JobBase, azure._models))

    assert told() == []
    assert told(envrionmentVariables={}) == ["body.properties.envrionmentVariables isn't a field of CommandJob"]
    assert told(command=["x"]) and told(environmentVariables={"A": 1}) and told(resources={"instanceCnt": 1})
    assert told(queueSettings={"jobTier": "Sport"}) and told(identity={"identityType": "Managed", "client_id": "x"})


@pytest.mark.parametrize(
    ("native", "error", "state", "more"),
    [
        ("NotStarted", None, "pending", {}),
        ("Preparing", None, "pending", {}),
        ("Provisioning", None, "pending", {}),
        ("Starting", None, "pending", {}),
        ("Paused", None, "pending", {}),
        ("Running", None, "running", {}),
        ("Finalizing", None, "running", {}),
        ("CancelRequested", None, "running", {}),
        ("NotResponding", None, "running", {"reason": "no heartbeat for 0 s"}),
        ("Completed", None, "completed", {}),
        ("Canceled", None, "cancelled", {}),
        ("Failed", {"code": "UserError", "message": "Process exited with code 3 and"}, "failed", {"exit_code": 3}),
        ("Failed", {"code": "UserError", "message": "No such image"}, "failed", {"reason": "No such image"}),
        ("Failed", {"code": "ServiceError", "message": "The node was lost."}, "preempted", {}),
        ("Failed", {"code": "SystemError", "message": "Internal"}, "preempted", {}),
        ("Queued", None, "preempted", {"will_retry": True}),  # it has run before
    ],
)
def test_each_state_in_our_words(
    place: Any, tmp_path: Path, native: str, error: dict[str, str] | None, state: str, more: dict[str, Any]
) -> None:
    azure, backend = place
    executor = quick(backend)
    (handle,) = executor.launch_replicas([ReplicaSpec(0, 1, tmp_path.as_uri(), **PLAIN)])
    job = azure.jobs[handle.job_id]
    backend.engine.wait_for(lambda: job.container.ended)
    assert not executor.look(handle.job_id).will_retry  # queued for the first time
    while executor.look(handle.job_id).state != "running":
        pass
    job.force, job.error = native, error
    executor.clock = lambda: 1000.0  # type: ignore[method-assign]
    seen = executor.look(handle.job_id)
    assert (seen.state, seen.native, seen.log_url) == (state, native, f"https://ml.azure.com/runs/{handle.job_id}")
    expected = {"will_retry": False, "timed_out": False, "exit_code": None, **more}
    assert {name: getattr(seen, name) for name in expected} == expected


def test_a_job_without_a_heartbeat_is_given_up_in_the_end(place: Any, tmp_path: Path) -> None:
    azure, backend = place
    executor = quick(backend)
    (handle,) = executor.launch_replicas([ReplicaSpec(0, 1, tmp_path.as_uri(), **WAITING)])
    job = azure.jobs[handle.job_id]
    now = [1000.0]
    executor.clock = lambda: now[0]  # type: ignore[method-assign]
    job.force = "NotResponding"
    assert executor.look(handle.job_id).state == "running"
    now[0] += 1799
    assert executor.look(handle.job_id).state == "running"
    job.force = "Running"  # it comes back: another silence begins anew
    executor.look(handle.job_id)
    job.force = "NotResponding"
    now[0] += 10
    assert executor.look(handle.job_id).state == "running"
    now[0] += 1800
    seen = executor.look(handle.job_id)
    assert seen.state == "preempted" and "no heartbeat for 1800 s" in seen.reason
    backend.engine.wait_for(lambda: job.container.ended == "stopped")  # so that its successor is alone


def test_the_output_goes_on_after_a_restart_and_a_refusal(place: Any, tmp_path: Path) -> None:
    azure, backend = place
    script = (
        f"import pathlib, threading\nseen = pathlib.Path({str(tmp_path / 'seen')!r})\n"
        "if not seen.exists():\n    seen.touch(); print('ready'); threading.Event().wait()\nprint('ünd', 'x' * 90)"
    )
    executor = quick(backend)
    command = ("python", "-u", "-c", script)
    (handle,) = executor.launch_replicas([ReplicaSpec(0, 1, (tmp_path / "store").as_uri(), command=command)])
    output = executor.history.output(handle.job_id)
    container = backend.container(handle.job_id)
    backend.engine.wait_for(lambda: "ready" in container.lines)
    assert list(output.new_lines()) == []  # the service says nothing of files before it runs
    while executor.look(handle.job_id).state != "running":
        pass
    assert list(output.new_lines()) == container.lines
    backend.engine.take_machine(container, retried=True)
    backend.engine.wait_for(lambda: container.ended)
    while executor.look(handle.job_id).state != "completed":
        pass
    azure.throttled = 1
    with pytest.raises(QuotaExceeded):
        list(output.new_lines())
    assert list(output.new_lines()) == container.lines[container.begins[1] :] and list(output.rest()) == []
    azure.throttled = 1
    assert list(executor.stream_logs(handle)) == container.lines[container.begins[1] :]


def test_the_last_line_of_a_killed_job_needs_no_newline(place: Any, tmp_path: Path) -> None:
    _, backend = place
    executor = quick(backend, restarts=0)
    (handle,) = executor.launch_replicas([ReplicaSpec(0, 1, tmp_path.as_uri(), **WAITING)])
    container = backend.container(handle.job_id)
    backend.engine.wait_for(lambda: "ready" in container.lines)
    backend.engine.take_machine(container)
    assert list(executor.stream_logs(handle)) == container.lines and container.lines[-1] == "ready"


@pytest.mark.parametrize("words", [["a b", "c'd"], ["$HOME", "`x`"], ["${{inputs.x}}"], ["new\nline"], [""], ["ünï"]])
def test_what_means_something_to_a_shell_is_encoded(words: list[str]) -> None:
    text = _shell(("python", "-m", MODULE, *words))
    parts = text.split(" ")
    assert parts[:3] == ["python", "-m", MODULE] and decoded(parts[3:]) == words
    assert _shell(("python", "-m", MODULE, "--a=b", "c")) == f"python -m {MODULE} --a=b c"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compute": "gpus"}, "one of compute .* and instance_type"),
        ({"instance_type": None, "compute": "gpus"}, "tier='spot' is for serverless compute"),
        ({"subscription_id": ""}, "subscription_id is empty"),
        ({"workspace": "another"}, "The Resource 'another' was not found"),
        ({"instance_type": "H100"}, "instance_type 'H100' isn't known"),
    ],
)
def test_what_it_refuses_before_anything_starts(place: Any, settings: dict[str, Any], message: str) -> None:
    azure, backend = place
    with pytest.raises((ValueError, ExecutorError), match=message):
        quick(backend, **settings).launch_replicas([ReplicaSpec(0, 1, "memory://refused", **PLAIN)])
    assert azure.submitted == [] and azure.environments == {}


def test_credentials_are_found_out_first(place: Any, monkeypatch: Any) -> None:
    from azure.core.exceptions import ClientAuthenticationError
    from azure.identity import CredentialUnavailableError

    azure, backend = place
    spec = ReplicaSpec(0, 1, "memory://credentials", **PLAIN)
    missing = CredentialUnavailableError("DefaultAzureCredential failed to retrieve a token.\nAttempted: ...")
    expired = ClientAuthenticationError("AADSTS700082: The refresh token has expired.\nTrace ID: ...")
    for problem, words in ((missing, "failed to retrieve a token"), (expired, "refresh token has expired")):
        with pytest.raises(ExecutorError, match=f"refuses the credentials, or there are none.*{words}") as told:
            quick(backend, credential=Credential(problem)).launch_replicas([spec])
        assert "\n" not in str(told.value)
    monkeypatch.setattr("tests.launchers.azure_ml.TOKEN", "another-token")  # which the service takes for invalid

    class Stale(Credential):
        def get_token(self, *scopes: str, **options: Any) -> Any:
            return super().get_token(*scopes, **options)._replace(token="a-token-of-the-tests")

    with pytest.raises(ExecutorError, match="refuses the credentials.*access token is invalid"):
        quick(backend, credential=Stale()).launch_replicas([spec])
    assert azure.submitted == []


def test_what_the_service_is_short_of_is_said(place: Any, tmp_path: Path) -> None:
    _, backend = place
    executor = quick(backend)
    job = executor.job(ReplicaSpec(0, 1, tmp_path.as_uri(), **PLAIN))
    backend.engine.refuse("quota", "outage")
    with pytest.raises(QuotaExceeded, match="refused for the test: quota"):
        executor.submit_job(job)
    with pytest.raises(BackendUnavailable, match="refused for the test: outage"):
        executor.submit_job(job)


def test_a_submission_whose_answer_was_lost_counts(place: Any, tmp_path: Path) -> None:
    azure, backend = place
    executor = quick(backend)
    job = executor.job(ReplicaSpec(0, 1, tmp_path.as_uri(), **PLAIN))
    assert executor.find_job(job) is None
    assert executor.submit_job(job) == executor.submit_job(job) == executor.find_job(job) == job.name
    assert len(azure.jobs) == 1
    with pytest.raises(ExecutorError, match="azure_ml has no job 'another' in space"):
        executor.look("another")
    with pytest.raises(JobGone):  # whether it runs all the same is for its replica to say
        executor.stop_job("another")


def test_secrets_are_in_no_request_and_it_is_quiet(place: Any, monkeypatch: Any, tmp_path: Path, caplog: Any) -> None:
    azure, backend = place
    monkeypatch.setenv("STORE_PASSWORD", "s3cr3t-value")
    executor = quick(backend, secrets=["STORE_PASSWORD"], env={"NOTE": "open with s3cr3t-value"})
    spec = ReplicaSpec(0, 1, tmp_path.as_uri(), extra_env={"API_TOKEN": "an0ther"}, **PLAIN)
    shown = json.dumps(executor.shown_payload(spec))
    assert "s3cr3t-value" not in shown and "an0ther" not in shown and "open with ***" in shown
    with pytest.raises(ValueError, match="API_TOKEN, STORE_PASSWORD can't be handed over"):
        executor.launch_replicas([spec])
    assert azure.submitted == []
    executor = quick(backend)
    executor.collect(executor.launch_replicas([ReplicaSpec(0, 1, tmp_path.as_uri(), **PLAIN)]), timeout=60)
    assert [one.message for one in caplog.records if one.name.startswith("azure.ai.ml")] == []
