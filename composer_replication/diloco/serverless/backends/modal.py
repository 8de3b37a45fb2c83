"""Modal sandboxes, through `modal`.

Facts of the service that this rests on: a sandbox runs for 300 seconds unless a time limit is sent, and for 24 hours at
most; with `gpu` the call that creates it waits until it is scheduled, and gives up after 21 minutes. What has been
terminated reports exit code 137, what ran out of time 124, as a process may do by itself: only waiting for it tells
them apart. A name is unique among an app's running sandboxes, and only those are listed. The output of a sandbox
without a GPU can be had from its worker alone, while it runs, so it is kept in the run's store.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from composer_replication import __version__
from composer_replication.diloco.serverless.backends.client import answer, check_known, client_module
from composer_replication.diloco.serverless.executor import BackendUnavailable, JobGone, QuotaExceeded
from composer_replication.diloco.serverless.jobs.job import Job, Seen
from composer_replication.diloco.serverless.jobs.job_executor import JobExecutor
from composer_replication.errors import ExecutorError
from composer_replication.store.clients import extra_of
from composer_replication.store.location import kind_of

__all__ = ["ModalExecutor"]

# The service takes them in any case and keeps no list that can be asked for. As of November 2026.
GPUS = ("T4", "L4", "A10", "A10G", "L40S", "A100", "A100-40GB", "A100-80GB", "RTX-PRO-6000")
GPUS += ("H100", "H100!", "H200", "B200", "B200+", "B300")
MOST_GPUS = 8
PYTHON = "3.12"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,63}")


class ModalExecutor(JobExecutor):
    """Replicas as Modal sandboxes.

    Args:
        gpu: such as `A100-40GB` or `H100:8`. None: no GPU.
        image: a reference to a registry's image, or the id (`im-...`) of one of Modal's. None: Debian with Python, and
            this version of this package, `transformers` and what the store needs from the package index.
        region: one, or several to choose from, such as `us-east`. None: anywhere, which is cheapest.
        cloud: `aws`, `gcp`, `oci`, ... None: any.
        preemptible: Modal may take a sandbox's machine if it has a GPU (or, in some of its documents, is tied to a
            region or a cloud), and has no option against that; a replica comes back as `restarts` allows. With False,
            such a sandbox is refused here.
        cpu: cores, at least.
        memory_mib: memory, at least.
        volumes: what is mounted where, {"/data": "my-volume", "/bucket": "s3://bucket/prefix"}; a volume is made if
            there is none of its name.
        bucket_role: the AWS role that bucket mounts take on (by OpenID Connect, no keys). None: the job's `secrets`.
        app: the name of the Modal app that the sandboxes belong to; it is made if it isn't there.
        environment: of the workspace. None: its default.
        use_clustered_rdma: refused, see below.
        settings: those of `JobExecutor`. A longer `time_limit_hours` than 24 means several sandboxes, one after
            another, each of which goes on from the store.

    `use_clustered_rdma`: Modal offers RDMA to the containers of one clustered function that each take all GPUs of their
    host, start together and end together. Replicas here are sandboxes that come and go alone and meet in the store, so
    there is nothing that RDMA could carry; True raises ValueError, which says what to do instead.

    The token is that of `modal` (`MODAL_TOKEN_ID` and `MODAL_TOKEN_SECRET`, or `modal token new`).
    """

    backend_name = "modal"
    default_scheme = "s3"
    extra = "modal"
    longest_seconds = 24 * 3600
    relaunches_at_limit = True

    def __init__(
        self,
        *,
        gpu: str | None = "A100-40GB",
        image: str | None = None,
        region: str | list[str] | None = None,
        cloud: str | None = None,
        preemptible: bool = True,
        cpu: float | None = None,
        memory_mib: int | None = None,
        volumes: Mapping[str, str] | None = None,
        bucket_role: str | None = None,
        app: str = "composer-replication",
        environment: str | None = None,
        use_clustered_rdma: bool = False,
        **settings: Any,
    ) -> None:
        # A submission waits until its sandbox is scheduled; the others needn't wait for it.
        super().__init__(image=image, **{"max_concurrent_launches": 16, **settings})
        if use_clustered_rdma:
            raise ValueError(
                "use_clustered_rdma: Modal's RDMA joins the containers of one clustered function, which take all GPUs "
                "of their hosts and start and fail together, while replicas are sandboxes of their own that meet in "
                f"the store. For fast links within a replica give it a whole host, gpu='H100:{MOST_GPUS}'; between "
                "replicas a lower interval costs less than RDMA"
            )
        if not preemptible and (gpu or region or cloud):
            raise ValueError(
                "preemptible=False: Modal may take the machine of a sandbox that has a GPU or is tied to a region or "
                "cloud, and offers no option against it; leave preemptible=True, and replicas that were taken come "
                "back as often as restarts allows"
            )
        self.gpu = gpu
        self.region = region
        self.cloud = cloud
        self.cpu = cpu
        self.memory_mib = memory_mib
        self.volumes = dict(volumes or {})
        self.bucket_role = bucket_role
        self.app_name = app
        self.environment = environment
        self.ship_logs = gpu is None

    @cached_property
    def modal(self) -> Any:
        return client_module("modal", self.extra)

    @cached_property
    def client(self) -> Any:
        """The connection, tried once."""

        def connect() -> Any:
            client = self.modal.Client.from_env()
            client.hello()
            return client

        return self._told(connect)

    @cached_property
    def app(self) -> Any:
        find = self.modal.App.lookup
        more = {"environment_name": self.environment, "client": self.client}
        return self._told(lambda: find(self.app_name, create_if_missing=True, **more))

    def check(self, job: Job) -> None:
        if self.gpu is not None:
            kind, _, count = self.gpu.partition(":")
            check_known("gpu", kind.upper(), GPUS)
            if count and not (count.isdigit() and 1 <= int(count) <= MOST_GPUS):
                raise ValueError(f"gpu {self.gpu!r}: the number of GPUs must be 1 to {MOST_GPUS}, like '{kind}:2'")
        if not _NAME.fullmatch(self.app_name):
            raise ValueError(f"app {self.app_name!r}: use letters, digits, dashes, periods and underscores, at most 63")
        for place, source in self.volumes.items():
            if not place.startswith("/"):
                raise ValueError(f"volumes: {place!r} must be an absolute path")
            if "://" in source and not source.startswith("s3://"):
                raise ValueError(f"volumes: {source!r} must be a Modal volume's name or like s3://bucket/prefix")
            if "://" not in source and not _NAME.fullmatch(source):
                raise ValueError(f"volumes: {source!r} can't be a Modal volume's name")
        _ = self.client  # a missing or refused token is found out here

    def payload(self, job: Job) -> dict[str, Any]:
        values: dict[str, Any] = {
            "args": list(job.command),
            "app": self.app_name,
            "name": job.name,
            "tags": job.labels,
            "image": self.image or {"debian_slim": PYTHON, "pip_install": packages(job)},
            "env": dict(job.env),
            "secrets": dict(job.secrets),
            "timeout": job.time_limit_seconds,
        }
        optional = {
            "gpu": self.gpu,
            "region": self.region,
            "cloud": self.cloud,
            "cpu": self.cpu,
            "memory": self.memory_mib,
            "volumes": {place: self._volume(source) for place, source in self.volumes.items()},
        }
        return values | {name: value for name, value in optional.items() if value}

    def _volume(self, source: str) -> dict[str, Any]:
        if not source.startswith("s3://"):
            return {"volume": source}
        bucket, _, prefix = source.removeprefix("s3://").partition("/")
        values: dict[str, Any] = {"bucket_name": bucket}
        if prefix:
            values["key_prefix"] = prefix.rstrip("/") + "/"
        return {**values, "oidc_auth_role_arn": self.bucket_role} if self.bucket_role else values

    def submit_job(self, job: Job) -> str:
        values, modal = self.payload(job), self.modal
        secret = modal.Secret.from_dict(values.pop("secrets")) if job.secrets else None
        values["secrets"] = [secret] if secret else []
        values["image"] = self._image(values["image"])
        if "volumes" in values:
            values["volumes"] = {place: self._mounted(one, secret) for place, one in values["volumes"].items()}
        words, values["app"] = values.pop("args"), self.app
        try:
            return self._told(lambda: modal.Sandbox.create(*words, client=self.client, **values).object_id)
        except _NameTaken as error:  # another launcher was quicker
            found = self.find_job(job)
            if found is None:
                raise BackendUnavailable(str(error)) from error
            return found

    def _image(self, image: Any) -> Any:
        kinds = self.modal.Image
        if isinstance(image, dict):
            return kinds.debian_slim(python_version=image["debian_slim"]).pip_install(*image["pip_install"])
        return kinds.from_id(image) if image.startswith("im-") else kinds.from_registry(image)

    def _mounted(self, values: dict[str, Any], secret: Any) -> Any:
        if "volume" in values:
            more = {"environment_name": self.environment, "create_if_missing": True}
            return self.modal.Volume.from_name(values["volume"], **more)
        keys = None if "oidc_auth_role_arn" in values else secret
        return self.modal.CloudBucketMount(**values, secret=keys)

    def find_job(self, job: Job) -> str | None:
        listed = self.modal.Sandbox.list
        found = self._told(lambda: list(listed(app_id=self.app.app_id, tags=job.labels, client=self.client)))
        return found[0].object_id if found else None

    def look(self, job_id: str) -> Seen:
        sandbox = self._sandbox(job_id)
        code = sandbox.returncode
        if code is None:
            return Seen("running", "running")
        try:
            self._told(sandbox.wait)  # answers at once
        except _Terminated:
            return Seen("preempted", "terminated")  # or cancelled, if a launcher asked for it
        except _TimedOut:
            return Seen("failed", "timeout", timed_out=True)
        if code == 0:  # also for some that the service lost: only the replica's own word makes it completed
            return Seen("completed", "exit code 0")
        return Seen("failed", f"exit code {code}", exit_code=code)

    def stop_job(self, job_id: str) -> None:
        self._told(self._sandbox(job_id).terminate)

    def follow(self, job_id: str) -> Iterator[str]:
        """What it prints; then what came on its standard error, where a replica's own output doesn't go."""
        sandbox = self._sandbox(job_id)
        for stream in (sandbox.stdout, sandbox.stderr):
            try:
                for line in stream:
                    yield line.rstrip("\n")
            except Exception as error:
                raise self._translated(error) from error

    def _sandbox(self, job_id: str) -> Any:
        return self._told(lambda: self.modal.Sandbox.from_id(job_id, client=self.client))

    def _told(self, call: Any) -> Any:
        return answer(call, self._translated)

    def _translated(self, error: Exception) -> Exception:
        kinds = self.modal.exception
        words = f"Modal: {str(error).strip() or type(error).__name__}"
        for kind, ours in {
            kinds.AuthError: ExecutorError,
            kinds.ResourceExhaustedError: QuotaExceeded,
            kinds.AlreadyExistsError: _NameTaken,
            kinds.NotFoundError: JobGone,
            kinds.SandboxTerminatedError: _Terminated,
            kinds.SandboxTimeoutError: _TimedOut,
            kinds.ServiceError: BackendUnavailable,
            kinds.InternalError: BackendUnavailable,
            kinds.ConnectionError: BackendUnavailable,
            kinds.TimeoutError: BackendUnavailable,
            kinds.Error: ExecutorError,
            OSError: BackendUnavailable,
        }.items():
            if isinstance(error, kind):
                return ours(words)
        return error


class _NameTaken(ExecutorError):
    pass


class _Terminated(ExecutorError):
    pass


class _TimedOut(ExecutorError):
    pass


def packages(job: Job) -> list[str]:
    """What pip installs into the default image: this package with what the job's trainer and store need."""
    settings = dict(word[2:].split("=", 1) for word in job.command if word.startswith("--") and "=" in word)
    trainer = "composer" if "composer.cli" in job.command else "lightning"
    store = extra_of(kind_of(settings["rendezvous-uri"]))
    extras = ",".join(filter(None, [trainer, "recipe", "safetensors", store]))
    return [f"composer-replication[{extras}]=={__version__}", "transformers"]
