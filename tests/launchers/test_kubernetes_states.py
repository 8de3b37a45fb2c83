"""What Volcano Jobs, RayJobs and pods say, in our words."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("kubernetes")

from composer_replication.diloco.serverless.backends.kuberay import KubeRayExecutor
from composer_replication.diloco.serverless.backends.volcano import STATES, VolcanoExecutor
from tests.launchers.kubernetes_schema import schema

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def pod(**status: Any) -> Any:
    from kubernetes.client import V1Pod

    metadata = {"name": "p", "creationTimestamp": "2026-11-01T00:00:00Z"}
    spec = {"containers": [{"name": "replica", "image": "registry/image:1"}]}
    found = V1Pod.from_dict({"metadata": metadata, "spec": spec, "status": status})
    assert found is not None
    return found


def container(**state: Any) -> dict[str, Any]:
    common = {"name": "replica", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    return {"containerStatuses": [{**common, "state": state}]}


DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drained"}
UNPLACED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no GPU"}


@pytest.mark.parametrize(
    ("status", "state", "code", "preempted", "timed_out", "reason"),
    [
        (container(terminated={"exitCode": 3, "reason": "Error"}), "failed", 3, False, False, ""),
        (container(terminated={"exitCode": 137, "reason": "OOMKilled"}), "failed", 137, False, False, "out of memory"),
        ({"reason": "Evicted", "message": "low on disk"}, "preempted", None, True, False, "Evicted low on disk"),
        ({"reason": "Preempting"}, "preempted", None, True, False, "Preempting"),
        ({"reason": "Terminated", "message": "node shutdown"}, "preempted", None, True, False, "node shutdown"),
        ({"conditions": [DISRUPTED]}, "preempted", None, True, False, "EvictionByEvictionAPI drained"),
        ({"conditions": [{**DISRUPTED, "status": "False"}]}, "failed", None, False, False, ""),
        ({"reason": "DeadlineExceeded"}, "failed", None, False, True, "DeadlineExceeded"),
    ],
)
def test_how_a_volcano_pod_ended(
    status: dict[str, Any], state: str, code: int | None, preempted: bool, timed_out: bool, reason: str
) -> None:
    seen = VolcanoExecutor(image="i").seen({"state": {"phase": "Failed"}}, lambda: [pod(phase="Failed", **status)])
    assert (seen.state, seen.native, seen.exit_code, seen.timed_out) == (state, "Failed", code, timed_out)
    assert (seen.state == "preempted") == preempted and reason in seen.reason


@pytest.mark.parametrize(
    ("phase", "state", "will_retry"),
    [
        ("", "pending", False),
        ("Pending", "pending", False),
        ("Running", "running", False),
        ("Completing", "running", False),
        ("Aborting", "running", False),
        ("Terminating", "running", False),
        ("Restarting", "preempted", True),
        ("Completed", "completed", False),
        ("Failed", "failed", False),
        ("Aborted", "cancelled", False),
        ("Terminated", "cancelled", False),
    ],
)
def test_volcano_phases(phase: str, state: str, will_retry: bool) -> None:
    status = {"state": {"phase": phase, "message": "words"}, "retryCount": 2} if phase else {}
    seen = VolcanoExecutor(image="i").seen(status, list)
    assert (seen.state, seen.native, seen.will_retry) == (state, phase or "Pending", will_retry)
    assert (seen.attempt, seen.reason) == ((3, "words") if phase else (1, ""))


def test_all_phases_of_the_published_schema_are_known() -> None:
    phase = schema("volcano_jobs")["properties"]["status"]["properties"]["state"]["properties"]["phase"]
    assert set(phase["enum"]) == set(STATES)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (
            container(waiting={"reason": "ImagePullBackOff", "message": "no such image"}),
            "ImagePullBackOff: no such image",
        ),
        (container(waiting={"reason": "ContainerCreating"}), ""),
        ({"conditions": [UNPLACED]}, "Unschedulable: 0/3 nodes: no GPU"),
    ],
)
def test_why_it_waits_is_told(status: dict[str, Any], reason: str) -> None:
    seen = VolcanoExecutor(image="i").seen({"state": {"phase": "Pending"}}, lambda: [pod(phase="Pending", **status)])
    assert (seen.state, seen.reason) == ("pending", reason)


@pytest.mark.parametrize(
    ("status", "state", "native"),
    [
        ({}, "pending", "new"),
        ({"jobDeploymentStatus": "Initializing"}, "pending", "Initializing"),
        ({"jobDeploymentStatus": "Waiting"}, "pending", "Waiting"),
        ({"jobDeploymentStatus": "Suspending"}, "pending", "Suspending"),
        ({"jobDeploymentStatus": "Suspended"}, "pending", "Suspended"),
        ({"jobDeploymentStatus": "Running", "jobStatus": "PENDING"}, "pending", "Running/PENDING"),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, "running", "Running/RUNNING"),
        ({"jobDeploymentStatus": "Retrying", "failed": 1}, "preempted", "Retrying"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, "completed", "Complete/SUCCEEDED"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, "cancelled", "Complete/STOPPED"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "FAILED"}, "failed", "Complete/FAILED"),
        ({"jobDeploymentStatus": "ValidationFailed", "reason": "ValidationFailed"}, "failed", "ValidationFailed"),
        ({"jobDeploymentStatus": "Failed", "reason": "SubmissionFailed"}, "failed", "Failed"),
        ({"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded"}, "failed", "Failed"),
        ({"jobDeploymentStatus": "Failed", "reason": "JobStatusCheckTimeoutExceeded"}, "preempted", "Failed"),
    ],
)
def test_ray_job_states(status: dict[str, Any], state: str, native: str) -> None:
    seen = KubeRayExecutor(image="i").seen(status, list)
    assert (seen.state, seen.native) == (state, native)
    assert seen.timed_out == (status.get("reason") == "DeadlineExceeded")
    assert seen.will_retry == (native == "Retrying")


def test_a_ray_jobs_exit_code_is_in_its_message_and_its_heads_end_in_the_pod() -> None:
    executor = KubeRayExecutor(image="i")
    message = "Job entrypoint command failed with exit code 75, last available logs (truncated to 20,000 chars): ..."
    status = {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": "AppFailed", "failed": 1}
    seen = executor.seen({**status, "message": message}, list)
    assert (seen.state, seen.exit_code, seen.attempt) == ("failed", 75, 1) and "AppFailed" in seen.reason
    seen = executor.seen(
        {**status, "message": "The actor died."}, lambda: [pod(phase="Failed", conditions=[DISRUPTED])]
    )
    assert (seen.state, seen.exit_code) == ("preempted", None)
