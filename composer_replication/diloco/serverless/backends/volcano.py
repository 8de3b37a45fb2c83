"""Volcano, the batch scheduler of Kubernetes, through `kubernetes`: one Volcano Job for each replica.

Facts of the service that this rests on: a job's pods are placed all or none, so one job for the fleet would wait for
the last GPU; a pod that is deleted under a job is an eviction, which `RestartTask` answers with a new pod; one whose
machine was taken but which is still there has failed, and the job with it; a job has no time limit, its pods have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from composer_replication.diloco.serverless.backends.kubernetes import KubernetesExecutor
from composer_replication.diloco.serverless.backends.kubernetes_checks import Reference
from composer_replication.diloco.serverless.backends.pods import container_manifest, failed, literal, pending, pod_spec
from composer_replication.diloco.serverless.jobs.job import Job, Seen

__all__ = ["K8sExecutor", "VolcanoExecutor"]

STATES = {
    "Pending": "pending",
    "Running": "running",
    "Completing": "running",
    "Aborting": "running",
    "Terminating": "running",
    "Restarting": "preempted",
    "Completed": "completed",
    "Failed": "failed",
    "Aborted": "cancelled",
    "Terminated": "cancelled",
}


class VolcanoExecutor(KubernetesExecutor):
    """Replicas as Volcano Jobs.

    Args:
        queue: Volcano's, whose quota the replicas count against.
        priority_class: the name of a PriorityClass.
        max_retry: how often Volcano itself starts a replica again whose pod was evicted, within one job.
        keep_seconds: how long an ended job, its pods and their logs are kept.
        settings: those of `KubernetesExecutor` and `JobExecutor`.
    """

    backend_name = "volcano"
    title = "Volcano"
    group, version, plural, kind = "batch.volcano.sh", "v1alpha1", "jobs", "Job"

    def __init__(
        self,
        *,
        queue: str = "default",
        priority_class: str | None = None,
        max_retry: int = 3,
        keep_seconds: int = 7 * 24 * 3600,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        for name, value in {"max_retry": max_retry, "keep_seconds": keep_seconds}.items():
            if value < 0:
                raise ValueError(f"{name} must be 0 or more, got {value}")
        self.queue = queue
        self.priority_class = priority_class
        self.max_retry = max_retry
        self.keep_seconds = keep_seconds

    def spec(self, job: Job) -> dict[str, Any]:
        container = {**container_manifest(job, self.pod), "command": [literal(word) for word in job.command]}
        pod = {
            **pod_spec(container, self.pod),
            "restartPolicy": "Never",
            "activeDeadlineSeconds": job.time_limit_seconds,
        }
        spec: dict[str, Any] = {
            "schedulerName": "volcano",
            "queue": self.queue,
            "minAvailable": 1,
            "maxRetry": self.max_retry,
            "ttlSecondsAfterFinished": self.keep_seconds,
            "policies": [{"event": "PodEvicted", "action": "RestartTask"}],
            "tasks": [
                {"name": "replica", "replicas": 1, "template": {"metadata": {"labels": job.labels}, "spec": pod}}
            ],
        }
        if self.priority_class:
            spec["priorityClassName"] = self.priority_class
            pod["priorityClassName"] = self.priority_class
        return spec

    def references(self) -> list[Reference]:
        objects, scheduling = self.api.objects, self.api.scheduling
        place = ("scheduling.volcano.sh", "v1beta1", "queues")
        read, names = objects.get_cluster_custom_object, objects.list_cluster_custom_object
        found = [
            *super().references(),
            Reference("queue", self.queue, partial(read, *place, self.queue), partial(names, *place)),
        ]
        if self.priority_class:
            read = partial(scheduling.read_priority_class, self.priority_class)
            found.append(Reference("priority_class", self.priority_class, read, scheduling.list_priority_class))
        return found

    def seen(self, status: Mapping[str, Any], pods: Callable[[], list[Any]]) -> Seen:
        state = status.get("state") or {}
        native = state.get("phase") or "Pending"
        reason = ": ".join(filter(None, [state.get("reason"), state.get("message")]))
        attempt = 1 + int(status.get("retryCount") or 0)
        ours = STATES.get(native, "pending")
        if ours == "failed":
            return failed(native, pods(), attempt=attempt, reason=reason)
        if ours == "pending":
            return pending(native, pods(), attempt=attempt, reason=reason)
        return Seen(ours, native, reason, attempt=attempt, will_retry=ours == "preempted")


K8sExecutor = VolcanoExecutor
