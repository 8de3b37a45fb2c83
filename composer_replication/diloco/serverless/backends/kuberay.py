"""KubeRay, Ray's operator for Kubernetes, through `kubernetes`: one RayJob for each replica, a cluster of one pod.

Facts of the service that this rests on: the entry point is a text that, but for `HTTPMode`, a shell of the submitter
splits, `ray job submit` joins in Windows' way and a shell of the head reads again, so only words without special
characters arrive as they are; its variables are the head's; all GPUs of the head are the entry point's if it reserves
none; when it stops, Ray waits three seconds unless told otherwise; a RayJob's name has 47 characters at most; the head
is deleted when the job ends, the submitter, whose log is the entry point's, isn't.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from composer_replication.diloco.serverless.backends.client import check_known
from composer_replication.diloco.serverless.backends.kubernetes import KubernetesExecutor
from composer_replication.diloco.serverless.backends.pods import container_manifest, failed, pending, pod_spec
from composer_replication.diloco.serverless.jobs.encoded import encoded
from composer_replication.diloco.serverless.jobs.job import Job, Seen

__all__ = ["KubeRayExecutor"]

MODES = ("HTTPMode", "K8sJobMode", "SidecarMode")
SUBMITTER = "ray-job-submitter"  # its container in SidecarMode
_LONGEST_WORD = 100_000  # of a command line's, in bytes, is 128 KiB on Linux

# Of `reason`: the head, or the way to it, was lost.
_LOST = {"JobStatusCheckTimeoutExceeded", "JobDeploymentStatusTransitionGracePeriodExceeded"}


class KubeRayExecutor(KubernetesExecutor):
    """Replicas as RayJobs; the image holds Ray (`ray[default]`) and this package.

    Args:
        submission_mode: how KubeRay hands the entry point to Ray: `K8sJobMode`, `SidecarMode` or `HTTPMode`. In the
            last one nothing keeps the output, so it goes into the store.
        backoff_limit: how often KubeRay itself starts a failed replica again, with a new cluster, within one job.
        ray_version: of the image, for KubeRay's own checks.
        settings: those of `KubernetesExecutor` and `JobExecutor`.
    """

    backend_name = "kuberay"
    title = "KubeRay"
    name_limit = 47
    group, version, plural, kind = "ray.io", "v1", "rayjobs", "RayJob"

    def __init__(
        self,
        *,
        submission_mode: str = "K8sJobMode",
        backoff_limit: int = 0,
        ray_version: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        check_known("submission_mode", submission_mode, MODES)
        if backoff_limit < 0:
            raise ValueError(f"backoff_limit must be 0 or more, got {backoff_limit}")
        self.submission_mode = submission_mode
        self.backoff_limit = backoff_limit
        self.ray_version = ray_version
        self.ship_logs = submission_mode == "HTTPMode"

    def spec(self, job: Job) -> dict[str, Any]:
        head = container_manifest(job, self.pod)
        wait = {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(self.pod.grace_seconds)}
        head["env"] = [*head.get("env", []), wait]
        cluster: dict[str, Any] = {
            "headGroupSpec": {
                "rayStartParams": {"dashboard-host": "0.0.0.0"},  # the submitter is another pod
                "template": {"metadata": {"labels": job.labels}, "spec": pod_spec(head, self.pod)},
            }
        }
        if self.ray_version:
            cluster["rayVersion"] = self.ray_version
        program, rest = job.command[:3], job.command[3:]  # python -m container, which decodes the rest
        return {
            "entrypoint": shlex.join([*program, *encoded(rest, _LONGEST_WORD)]),
            "submissionMode": self.submission_mode,
            "shutdownAfterJobFinishes": True,
            "activeDeadlineSeconds": job.time_limit_seconds,
            "backoffLimit": self.backoff_limit,
            "rayClusterSpec": cluster,
        }

    def log_source(self, job_id: str) -> tuple[str, str | None]:
        if self.submission_mode == "SidecarMode":
            return super().log_source(job_id)[0], SUBMITTER
        return f"job-name={job_id}", None  # the submitter is a Kubernetes Job of the RayJob's name

    def own_lines(self, job_id: str, lines: Iterator[str]) -> Iterator[str]:
        """Without what the submitter says before the replica begins, unless it never does."""
        before: list[str] = []
        for line in lines:
            if line.startswith(f"job {job_id}: "):
                yield line
                yield from lines
                return
            before.append(line)
        yield from before

    def seen(self, status: Mapping[str, Any], pods: Callable[[], list[Any]]) -> Seen:
        deployment, ray = status.get("jobDeploymentStatus") or "", status.get("jobStatus") or ""
        native = "/".join(filter(None, [deployment, ray])) or "new"
        cause, message = status.get("reason") or "", " ".join(str(status.get("message") or "").split())
        reason = ": ".join(filter(None, [cause, message]))
        failures = int(status.get("failed") or 0)
        if deployment == "Complete" and ray in ("SUCCEEDED", "STOPPED"):
            return Seen("completed" if ray == "SUCCEEDED" else "cancelled", native, reason, attempt=failures + 1)
        if deployment in ("Complete", "Failed", "ValidationFailed"):
            code = re.search(r"exit code (-?\d+)", message)
            if cause == "DeadlineExceeded":
                return Seen("failed", native, reason, attempt=max(1, failures), timed_out=True)
            if cause in _LOST:
                return Seen("preempted", native, reason, attempt=max(1, failures))
            if code is not None:
                return Seen("failed", native, reason, int(code[1]), attempt=max(1, failures))
            return failed(native, pods(), attempt=max(1, failures), reason=reason)
        if deployment == "Retrying":
            return Seen("preempted", native, reason, attempt=failures + 1, will_retry=True)
        if deployment == "Running" and ray == "RUNNING":
            return Seen("running", native, attempt=failures + 1)
        return pending(native, pods(), attempt=failures + 1, reason=reason)
