"""A replica's pod: what is asked for, and how it ended.

Facts of Kubernetes that this rests on: `$(NAME)` in a container's command and variables is replaced before it starts,
unless the dollar is doubled; a pod's reason and its condition `DisruptionTarget` tell apart what took its machine
(eviction, preemption, a node that shut down) from what its own process did; `activeDeadlineSeconds` ends it with the
reason `DeadlineExceeded`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_replication.diloco.serverless.jobs.job import Job, Seen

__all__ = ["JOB_LABEL", "PodSettings", "container_manifest", "failed", "literal", "pending", "pod_spec"]

CONTAINER = "replica"
JOB_LABEL = "composer-replication-job"

# Why a kubelet or a scheduler takes a pod from its machine, in `status.reason`.
_TAKEN = {"Evicted", "NodeAffinity", "NodeLost", "NodeShutdown", "Preempting", "Shutdown", "Terminated"}
_TAKEN |= {"UnexpectedAdmissionError"}


@dataclass(frozen=True, kw_only=True)
class PodSettings:
    """What an executor's settings say of the pod; see `KubernetesExecutor`."""

    image: str | None
    gpus: int
    gpu_resource: str
    cpus: str | int | float | None
    memory: str | None
    shm: str | None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    service_account: str | None = None
    secret_name: str | None = None
    image_pull_secrets: Sequence[str] = ()
    volumes: Mapping[str, str | Mapping[str, Any]] = field(default_factory=dict)
    grace_seconds: int = 120

    def __post_init__(self) -> None:
        if self.gpus < 0:
            raise ValueError(f"gpus must be 0 or more, got {self.gpus}")
        if self.grace_seconds < 1:
            raise ValueError(f"grace_seconds must be at least 1, got {self.grace_seconds}")
        for place in self.volumes:
            if not place.startswith("/") or ":" in place:
                raise ValueError(f"volumes: {place!r} must be an absolute path without a colon")


def container_manifest(job: Job, settings: PodSettings) -> dict[str, Any]:
    """The container without its command. Secrets are named, never held: they are in a Secret called like the job."""
    env: list[dict[str, Any]] = [{"name": name, "value": literal(value)} for name, value in sorted(job.env.items())]
    for name in sorted(job.secrets):
        env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": job.name, "key": name}}})
    container: dict[str, Any] = {"name": CONTAINER, "image": settings.image}
    if env:
        container["env"] = env
    if settings.secret_name:
        container["envFrom"] = [{"secretRef": {"name": settings.secret_name}}]
    asked = {"cpu": settings.cpus, "memory": settings.memory}
    requests = {name: str(value) for name, value in asked.items() if value is not None}
    limits = {"memory": settings.memory} if settings.memory is not None else {}
    if settings.gpus:
        limits[settings.gpu_resource] = str(settings.gpus)  # a limit is its own request
    resources = {kind: values for kind, values in (("requests", requests), ("limits", limits)) if values}
    if resources:
        container["resources"] = resources
    mounts = [{"name": name, "mountPath": place} for name, place, _ in _volumes(settings)]
    if mounts:
        container["volumeMounts"] = mounts
    return container


def pod_spec(container: Mapping[str, Any], settings: PodSettings) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "containers": [dict(container)],
        "terminationGracePeriodSeconds": settings.grace_seconds,
    }
    volumes = [{"name": name, **source} for name, _, source in _volumes(settings)]
    if volumes:
        spec["volumes"] = volumes
    if settings.node_selector:
        spec["nodeSelector"] = dict(settings.node_selector)
    if settings.tolerations:
        spec["tolerations"] = [dict(one) for one in settings.tolerations]
    if settings.service_account:
        spec["serviceAccountName"] = settings.service_account
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    return spec


def literal(text: str) -> str:
    """The text as it has to be written to arrive as it is."""
    return text.replace("$", "$$")


def _volumes(settings: PodSettings) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, place, source) of each volume."""
    volumes: list[tuple[str, str, dict[str, Any]]] = []
    if settings.shm:  # what a container has by itself, 64 MB, is too little for a data loader's workers
        volumes.append(("shm", "/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": settings.shm}}))
    for number, (place, source) in enumerate(settings.volumes.items()):
        named = {"persistentVolumeClaim": {"claimName": source}} if isinstance(source, str) else dict(source)
        volumes.append((f"volume-{number}", place, named))
    return volumes


@dataclass(frozen=True)
class Fate:
    """How a pod ended, or stands."""

    reason: str = ""
    exit_code: int | None = None
    preempted: bool = False
    timed_out: bool = False


def fate(pods: Iterable[Any]) -> Fate:
    """Of the newest of a replica's pods, as the client gives them."""
    newest = max(pods, key=lambda pod: _created(pod), default=None)
    if newest is None:
        return Fate()
    status = newest.status
    conditions = {one.type: one for one in status.conditions or [] if one.status == "True"}
    disrupted = conditions.get("DisruptionTarget")
    reason = " ".join(filter(None, [status.reason, status.message]))
    if disrupted is not None:
        reason = " ".join(filter(None, [reason, disrupted.reason, disrupted.message]))
    code = None
    for container in status.container_statuses or []:
        ended = container.state.terminated if container.state is not None else None
        if container.name == CONTAINER and ended is not None:
            code = ended.exit_code
            if ended.reason == "OOMKilled":
                reason = "its container ran out of memory (OOMKilled)"
    return Fate(
        reason=reason,
        exit_code=code,
        preempted=disrupted is not None or status.reason in _TAKEN,
        timed_out=status.reason == "DeadlineExceeded",
    )


def waiting_for(pods: Iterable[Any]) -> str:
    """What keeps a pod from starting: an image that can't be pulled, no node with room for it, a missing Secret."""
    for pod in pods:
        for container in pod.status.container_statuses or []:
            waiting = container.state.waiting if container.state is not None else None
            if waiting is not None and waiting.reason not in (None, "ContainerCreating", "PodInitializing"):
                return ": ".join(filter(None, [waiting.reason, waiting.message]))
        for one in pod.status.conditions or []:
            if one.type == "PodScheduled" and one.status == "False":
                return ": ".join(filter(None, [one.reason, one.message]))
    return ""


def failed(native: str, pods: list[Any], *, attempt: int, reason: str = "") -> Seen:
    """An ended job that wasn't completed, by what its pods say."""
    end = fate(pods)
    state = "preempted" if end.preempted else "failed"
    words = end.reason or reason
    return Seen(state, native, words, end.exit_code, attempt=attempt, timed_out=end.timed_out)


def pending(native: str, pods: list[Any], *, attempt: int, reason: str = "") -> Seen:
    return Seen("pending", native, waiting_for(pods) or reason, attempt=attempt)


def _created(pod: Any) -> tuple[str, str]:
    return str(pod.metadata.creation_timestamp), pod.metadata.name
