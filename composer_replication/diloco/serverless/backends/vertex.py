"""Vertex AI custom jobs, through the generated client of `google-cloud-aiplatform`, over HTTP.

Facts of the service that this rests on: a job's id is the server's, so it is found by its display name; a spot machine
that goes leaves the job RUNNING while the service starts it again, which only the replica's own word shows; the time
limit is seven days unless it is sent; variables are shown to whoever may look at the job; `$(NAME)` in them is replaced
unless the dollar is doubled; output is in Cloud Logging only, some seconds late, and a project may read it 60 times a
minute; the exit code is in the error's text.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from composer_replication.diloco.serverless.backends.client import answer, check_known, client_module, stop_if_running
from composer_replication.diloco.serverless.backends.pods import literal
from composer_replication.diloco.serverless.backends.tail import tail
from composer_replication.diloco.serverless.backends.vertex_logs import Entries
from composer_replication.diloco.serverless.backends.vertex_states import seen
from composer_replication.diloco.serverless.executor import BackendUnavailable, JobGone, QuotaExceeded
from composer_replication.diloco.serverless.jobs.encoded import encoded
from composer_replication.diloco.serverless.jobs.job import Job, Seen
from composer_replication.diloco.serverless.jobs.job_executor import JobExecutor
from composer_replication.errors import ExecutorError

__all__ = ["VertexExecutor"]

SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_MOST_VARIABLES = 100
_LONGEST_WORD = 100_000


class VertexExecutor(JobExecutor):
    """Replicas as Vertex AI custom jobs.

    Args:
        project: that pays. None: the credentials' own.
        location: the region, such as `us-central1`.
        machine_type: such as `a3-highgpu-8g`.
        accelerator_type: as Vertex calls it, `NVIDIA_H100_80GB`. None: a machine without.
        accelerator_count: of them; the machine type says how many there may be.
        spot: machines that may be taken away, at a fraction of the price.
        max_wait_hours: queue for a machine, for as long as this (flex start). None: don't.
        service_account: whose identity the replica has. It needs the run's bucket.
        network: the VPC network to peer with, `projects/NUMBER/global/networks/NAME`.
        restart_job_on_worker_restart: Vertex starts a replica again by itself whose machine was restarted.
        disable_retries: Vertex starts nothing again by itself; then all of it is on `restarts`.
        disk_gb: of the boot disk.
        credentials: of google-auth. None: the application default ones.
        endpoint, logging_endpoint: other addresses of the services.
        settings: those of `JobExecutor`.
    """

    backend_name = "vertex"
    default_scheme = "gs"
    extra = "vertex"
    longest_seconds = 7 * 24 * 3600
    has_vault = False
    log_pause_seconds = 10.0

    def __init__(
        self,
        *,
        project: str | None = None,
        location: str = "us-central1",
        machine_type: str = "g2-standard-12",
        accelerator_type: str | None = "NVIDIA_L4",
        accelerator_count: int = 1,
        spot: bool = False,
        max_wait_hours: float | None = None,
        service_account: str | None = None,
        network: str | None = None,
        restart_job_on_worker_restart: bool = False,
        disable_retries: bool = False,
        disk_gb: int = 100,
        credentials: Any = None,
        endpoint: str | None = None,
        logging_endpoint: str = "https://logging.googleapis.com",
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if accelerator_count < 1:
            raise ValueError(f"accelerator_count must be at least 1, got {accelerator_count}")
        if max_wait_hours is not None and (spot or not max_wait_hours > 0):
            raise ValueError(f"max_wait_hours must be more than 0 and is not for spot machines, got {max_wait_hours}")
        if disk_gb < 100:
            raise ValueError(f"disk_gb must be at least 100, got {disk_gb}")
        self.location = location
        self.machine_type = machine_type
        self.accelerator_type = accelerator_type
        self.accelerator_count = accelerator_count
        self.spot = spot
        self.max_wait_hours = max_wait_hours
        self.service_account = service_account
        self.network = network
        self.restart_job_on_worker_restart = restart_job_on_worker_restart
        self.disable_retries = disable_retries
        self.disk_gb = disk_gb
        self.endpoint = endpoint or f"https://{location}-aiplatform.googleapis.com"
        self.logging_endpoint = logging_endpoint
        self._given = project, credentials

    # -- the service ---------------------------------------------------------------------------------------------------

    @cached_property
    def identity(self) -> tuple[Any, str]:
        """(credentials, project)."""
        project, credentials = self._given
        if credentials is None:
            auth = client_module("google.auth", self.extra)
            try:
                credentials, own = auth.default(scopes=[SCOPE])
            except auth.exceptions.GoogleAuthError as error:
                raise ExecutorError(
                    f"no Google Cloud credentials (gcloud auth application-default login makes some): {_first(error)}"
                ) from error
            project = project or own
        if not project:
            raise ExecutorError("project isn't given, and the credentials don't say one")
        return credentials, project

    @cached_property
    def types(self) -> Any:
        return client_module("google.cloud.aiplatform_v1.types", self.extra)

    @cached_property
    def api(self) -> Any:
        service = client_module("google.cloud.aiplatform_v1.services.job_service", self.extra)
        transports = client_module("google.cloud.aiplatform_v1.services.job_service.transports", self.extra)
        transport = transports.JobServiceRestTransport(host=self.endpoint, credentials=self.identity[0])
        return service.JobServiceClient(transport=transport)

    @property
    def parent(self) -> str:
        return f"projects/{self.identity[1]}/locations/{self.location}"

    @cached_property
    def entries(self) -> Entries:
        session = client_module("google.auth.transport.requests", self.extra).AuthorizedSession(self.identity[0])
        return Entries(session, self.logging_endpoint, self.identity[1])

    # -- what JobExecutor asks for -------------------------------------------------------------------------------------

    def check(self, job: Job) -> None:
        if not self.image:
            raise ValueError(
                f"{self.backend_name} needs an image, such as 'us-docker.pkg.dev/PROJECT/REPOSITORY/image:1'"
            )
        if self.accelerator_type is not None:
            known = [one.name for one in self.types.AcceleratorType if one.value]
            check_known("accelerator_type", self.accelerator_type, known)
        if len(job.env) > _MOST_VARIABLES:
            raise ValueError(f"Vertex takes {_MOST_VARIABLES} variables at most, got {len(job.env)}")
        self.types.CustomJob(self.payload(job)["custom_job"])
        self._found(job.name)  # missing or expired credentials, an unknown project, a service that isn't enabled

    def payload(self, job: Job) -> dict[str, Any]:
        machine: dict[str, Any] = {"machine_type": self.machine_type}
        if self.accelerator_type is not None:
            machine |= {"accelerator_type": self.accelerator_type, "accelerator_count": self.accelerator_count}
        words = list(job.command[3:])
        if any("$" in word for word in words):  # for the command nothing says whether dollars are left alone
            words = encoded(words, _LONGEST_WORD)
        strategy = "SPOT" if self.spot else "STANDARD" if self.max_wait_hours is None else "FLEX_START"
        scheduling: dict[str, Any] = {
            "timeout": {"seconds": job.time_limit_seconds},
            "strategy": strategy,
            "restart_job_on_worker_restart": self.restart_job_on_worker_restart,
            "disable_retries": self.disable_retries,
        }
        if self.max_wait_hours is not None:
            scheduling["max_wait_duration"] = {"seconds": int(self.max_wait_hours * 3600)}
        spec: dict[str, Any] = {
            "worker_pool_specs": [
                {
                    "machine_spec": machine,
                    "replica_count": 1,
                    "disk_spec": {"boot_disk_type": "pd-ssd", "boot_disk_size_gb": self.disk_gb},
                    "container_spec": {
                        "image_uri": self.image,
                        "command": list(job.command[:3]),
                        "args": words,
                        "env": [{"name": name, "value": literal(value)} for name, value in sorted(job.env.items())],
                    },
                }
            ],
            "scheduling": scheduling,
        }
        if self.service_account:
            spec["service_account"] = self.service_account
        if self.network:
            spec["network"] = self.network
        job_values = {"display_name": job.name, "labels": job.labels, "job_spec": spec}
        return {"parent": self.parent, "custom_job": job_values}

    def submit_job(self, job: Job) -> str:
        values = self.payload(job)
        made = self.types.CustomJob(values["custom_job"])
        return _told(lambda: self.api.create_custom_job(parent=values["parent"], custom_job=made)).name

    def find_job(self, job: Job) -> str | None:
        ours = [one for one in self._found(job.name) if job.labels.items() <= dict(one.labels).items()]
        newest = max(ours, key=lambda one: one.create_time, default=None)
        return None if newest is None else newest.name

    def _found(self, display_name: str) -> list[Any]:
        request = {"parent": self.parent, "filter": f'display_name="{display_name}"'}
        return _told(lambda: list(self.api.list_custom_jobs(request=request)))

    def look(self, job_id: str) -> Seen:
        return seen(_told(lambda: self.api.get_custom_job(name=job_id)))

    def stop_job(self, job_id: str) -> None:
        stop_if_running(
            lambda: _told(lambda: self.api.cancel_custom_job(name=job_id)),
            lambda: self.look(job_id).state in ("pending", "running"),
        )

    def follow(self, job_id: str) -> Iterator[str]:
        known: set[str] = set()
        since = ""

        def new_lines() -> Iterator[str]:
            nonlocal since
            try:
                for entry in self.entries.after(job_id.rpartition("/")[2], since):
                    if entry.key not in known:
                        known.add(entry.key)
                        since = max(since, entry.timestamp)
                        yield from entry.text.rstrip("\n").split("\n")
            except QuotaExceeded:  # others read, too
                return

        def ended() -> bool:
            return self.look(job_id).state not in ("pending", "running")

        name = _told(lambda: self.api.get_custom_job(name=job_id)).display_name
        return tail(name, new_lines, ended, lambda: self.sleep(self.log_pause_seconds))


def _told(call: Any) -> Any:
    return answer(call, translated)


def translated(error: Exception) -> Exception:
    kind, status, words = type(error).__module__, getattr(error, "code", None), _first(error)
    of_credentials = kind.startswith("google.auth") and type(error).__name__ != "TransportError"
    if of_credentials or status in (401, 403):
        return ExecutorError(f"Google Cloud refuses the credentials, or what they may do: {words}")
    if status == 429:
        return QuotaExceeded(f"Vertex AI: {words}")
    if isinstance(status, int) and status < 500:
        return (JobGone if status == 404 else ExecutorError)(f"Vertex AI: {words}")
    if isinstance(status, int) or isinstance(error, OSError) or kind.startswith("google."):
        return BackendUnavailable(f"Vertex AI: {words}")
    return error


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
