"""Hugging Face Jobs, through `huggingface_hub`.

Facts of the service that this rests on: the time limit is 30 minutes unless it is sent; there is no exit code and no
stage for a preemption; a job that fails is ERROR, and `attempts` runs it again without counting where one can see it.
So the replica's own word in the store decides (`jobs/verdict.py`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from composer_replication.diloco.serverless.backends.client import answer, check_known, client_module, stop_if_running
from composer_replication.diloco.serverless.executor import BackendUnavailable, JobGone, QuotaExceeded
from composer_replication.diloco.serverless.jobs.job import Job, Seen
from composer_replication.diloco.serverless.jobs.job_executor import JobExecutor
from composer_replication.errors import ExecutorError

__all__ = ["HFJobsExecutor"]

STATES = {
    "SCHEDULING": "pending",
    "RUNNING": "running",
    "COMPLETED": "completed",
    "ERROR": "failed",
    "CANCELED": "cancelled",
    "DELETED": "cancelled",
}


class HFJobsExecutor(JobExecutor):
    """Replicas as Hugging Face Jobs.

    Args:
        flavor: the hardware, such as `a10g-small` or `a100-large`.
        namespace: the user or organisation that pays. None: whoever the token is of.
        volumes: buckets and repositories to mount, {"/data": "hf://buckets/me/runs"}; a folder below one as `output`
            keeps checkpoints across attempts.
        network_group: jobs of one group are placed together and reach one another. Nothing here needs it, and being
            placed together is what independent replicas want to do without.
        endpoint: another address of the Hub.
        settings: those of `JobExecutor`.

    The token is that of `huggingface_hub` (`HF_TOKEN`, or `hf auth login`). For a store on `hf://` replicas need one,
    too: `secrets=["HF_TOKEN"]`.
    """

    backend_name = "hf_jobs"
    default_scheme = "hf"
    extra = "hf"
    longest_seconds = 30 * 24 * 3600  # the service names none; this is what is sent for "no limit"

    def __init__(
        self,
        *,
        flavor: str = "a10g-small",
        namespace: str | None = None,
        volumes: Mapping[str, str] | None = None,
        network_group: str | None = None,
        endpoint: str | None = None,
        image: str | None = None,
        time_limit_hours: float | None = 24.0,
        **settings: Any,
    ) -> None:
        super().__init__(image=image, time_limit_hours=time_limit_hours, **settings)
        self.flavor = flavor
        self.volumes = dict(volumes or {})
        self.network_group = network_group
        self.endpoint = endpoint
        self._namespace = namespace

    @property
    def supports_inter_replica_network(self) -> bool:
        return self.network_group is not None

    @cached_property
    def api(self) -> Any:
        """The client; it takes the token, and the endpoint unless one is given, from the environment."""
        return client_module("huggingface_hub", self.extra).HfApi(endpoint=self.endpoint)

    @cached_property
    def namespace(self) -> str:
        return self._namespace or _told(lambda: self.api.whoami()["name"])  # once, not at every call

    @cached_property
    def hardware(self) -> dict[str, Any]:
        """Flavors that the service has now, with their prices."""
        return {one.name: one for one in _told(self.api.list_jobs_hardware)}

    def check(self, job: Job) -> None:
        if not self.image:
            raise ValueError(f"{self.backend_name} needs an image, such as 'pytorch/pytorch:2.9.1-cuda12.8-cudnn9'")
        _ = self.namespace  # a missing or expired token is found out here
        check_known("flavor", self.flavor, self.hardware)
        for place, source in self.volumes.items():
            _volume(place, source)

    def payload(self, job: Job) -> dict[str, Any]:
        values: dict[str, Any] = {
            "image": self.image,
            "command": list(job.command),
            "env": dict(job.env),
            "secrets": dict(job.secrets),
            "flavor": self.flavor,
            "timeout": job.time_limit_seconds,
            "name": job.name,
            "labels": job.labels,
            "namespace": self.namespace,
        }
        if self.volumes:
            values["volumes"] = [_volume(place, source) for place, source in self.volumes.items()]
        if self.network_group:
            values["network_group"] = self.network_group
            values["network_aliases"] = [f"replica-{job.replica}"]
        return values

    def submit_job(self, job: Job) -> str:
        values = self.payload(job)
        if "volumes" in values:
            kind = client_module("huggingface_hub", self.extra).Volume
            values["volumes"] = [kind(**one) for one in values["volumes"]]
        return _told(lambda: self.api.run_job(**values)).id

    def find_job(self, job: Job) -> str | None:
        found = _told(lambda: list(self.api.list_jobs(labels=job.labels, namespace=self.namespace)))
        return found[0].id if found else None

    def look(self, job_id: str) -> Seen:
        info = _told(lambda: self.api.inspect_job(job_id=job_id, namespace=self.namespace))
        native, message = str(info.status.stage), info.status.message or ""
        late = native == "ERROR" and "timeout" in message.lower().replace(" ", "").replace("timedout", "timeout")
        return Seen(STATES.get(native, "pending"), native, message, timed_out=late, log_url=info.url)

    def stop_job(self, job_id: str) -> None:
        stop_if_running(
            lambda: _told(lambda: self.api.cancel_job(job_id=job_id, namespace=self.namespace)),
            lambda: self.look(job_id).state in ("pending", "running"),
        )

    def follow(self, job_id: str) -> Iterator[str]:
        namespace = self.namespace
        try:
            yield from self.api.fetch_job_logs(job_id=job_id, namespace=namespace, follow=True)
        except Exception as error:
            raise _translated(error) from error


def _volume(place: str, source: str) -> dict[str, Any]:
    kind, _, rest = source.removeprefix("hf://").partition("/")
    owner, _, name = rest.partition("/")
    name, _, path = name.partition("/")
    kinds = {"buckets": "bucket", "models": "model", "datasets": "dataset", "spaces": "space"}
    if kind not in kinds or not owner or not name:
        raise ValueError(f"volumes: {source!r} must be like hf://buckets/OWNER/NAME or hf://datasets/OWNER/NAME")
    values = {"type": kinds[kind], "source": f"{owner}/{name}", "mount_path": place}
    return {**values, "path": path} if path else values


def _told(call: Any) -> Any:
    return answer(call, _translated)


def _translated(error: Exception) -> Exception:
    status = getattr(getattr(error, "response", None), "status_code", None)
    words = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if status == 429 or status == 402:
        return QuotaExceeded(f"Hugging Face Jobs: {words}")
    if status in (401, 403) or "token" in words.lower():
        set_by = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "no HF_TOKEN is set"
        return ExecutorError(f"Hugging Face Jobs refuses the token ({set_by}): {words}")
    if status is not None and status < 500:
        return (JobGone if status == 404 else ExecutorError)(f"Hugging Face Jobs: {words}")
    if status is None and not isinstance(error, OSError) and "httpx" not in type(error).__module__:
        words = f"an answer that its client can't read ({type(error).__name__}: {words})"
    return BackendUnavailable(f"Hugging Face Jobs: {words}")
