"""Azure Machine Learning command jobs, through `azure-ai-ml`.

Facts of the service that this rests on: a job's name is unique in its workspace and is its id; a command is one string
for a shell, in which ${{...}} is the service's own; variables are seen by whoever may see the job, so nothing secret
goes there; a job on a cluster lives 21 days at most, on spot machines seven; a limit's end and a cancellation are both
"Canceled". A spot machine that is taken away puts its job back into the queue. The client prints a job's output and
gives it to nobody, so it is read from the run history (`azure.py`).
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

from composer_replication.diloco.serverless.backends.azure import SCOPE, RunHistory, later, quietly, told
from composer_replication.diloco.serverless.backends.azure_states import STATES, explained
from composer_replication.diloco.serverless.backends.client import check_known, client_module, stop_if_running
from composer_replication.diloco.serverless.backends.tail import tail
from composer_replication.diloco.serverless.executor import BackendUnavailable, JobGone, QuotaExceeded
from composer_replication.diloco.serverless.handle import ENDED
from composer_replication.diloco.serverless.jobs.encoded import encoded
from composer_replication.diloco.serverless.jobs.job import Job, Seen
from composer_replication.diloco.serverless.jobs.job_executor import JobExecutor
from composer_replication.errors import ExecutorError

__all__ = ["AzureMLExecutor"]

TIERS = ("spot", "basic", "standard", "premium")
_SPOT_SECONDS = 7 * 24 * 3600
_SILENT_SECONDS = 1800.0  # without a heartbeat, until the job counts as lost
_LONGEST_ARGUMENT = 100_000  # Linux takes 131,071 bytes in one
_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)  # nothing to a shell, or to the service
_ENVIRONMENT = re.compile(r"(?:/subscriptions/|azureml://registries/).+/versions/.+")
_SHORT_ENVIRONMENT = re.compile(r"([\w.-]+):([\w.-]+)")


class AzureMLExecutor(JobExecutor):
    """Replicas as Azure ML command jobs of one node each.

    Args:
        subscription_id, resource_group, workspace: where the jobs are.
        compute: a cluster of the workspace, by name.
        instance_type: a VM size, such as `Standard_NC24ads_A100_v4`, on serverless compute. Either this or `compute`.
        tier: of serverless compute: `spot`, or `basic`, `standard`, `premium`.
        environment: a registered one instead of `image`: `NAME:VERSION` of the workspace, or its full resource id, or
            `azureml://registries/REGISTRY/environments/NAME/versions/VERSION`.
        identity: the client id of a managed identity that the jobs run as, or "system" for the compute's own. Replicas
            reach the store with its roles.
        experiment_name: under which the studio shows the jobs. None: the run's name.
        shm_size: of /dev/shm.
        tags: more of them, beside those that say which run and job it is.
        credential: any that has `get_token`. None: `DefaultAzureCredential`.
        settings: those of `JobExecutor`.

    The store is reached by the jobs' identity: no secrets are sent.
    """

    backend_name = "azure_ml"
    default_scheme = "az"
    extra = "azureml"
    longest_seconds = 21 * 24 * 3600
    name_limit = 255
    has_vault = False

    def __init__(
        self,
        *,
        subscription_id: str,
        resource_group: str,
        workspace: str,
        compute: str | None = None,
        instance_type: str | None = None,
        tier: str | None = None,
        environment: str | None = None,
        identity: str | None = None,
        experiment_name: str | None = None,
        shm_size: str = "16g",
        tags: Mapping[str, str] | None = None,
        credential: Any = None,
        image: str | None = None,
        time_limit_hours: float | None = 24.0,
        **settings: Any,
    ) -> None:
        super().__init__(image=image, time_limit_hours=time_limit_hours, **settings)
        if bool(compute) == bool(instance_type):
            raise ValueError("give one of compute (a cluster's name) and instance_type (serverless), not both")
        if tier is not None and not instance_type:
            raise ValueError(f"tier={tier!r} is for serverless compute: a cluster has its own")
        if tier is not None:
            check_known("tier", tier, TIERS)
        if tier == "spot" and self.time_limit_seconds > _SPOT_SECONDS:
            hours = self.time_limit_seconds / 3600
            raise ValueError(f"time_limit_hours={hours:g}: azure_ml runs a job on spot machines for 168 hours at most")
        if image and environment:
            raise ValueError("give one of image and environment, not both")
        for name, value in {"subscription_id": subscription_id, "workspace": workspace}.items():
            if not value:
                raise ValueError(f"{name} is empty")
        self.place = f"/subscriptions/{subscription_id}/resourceGroups/{resource_group}"
        self.place += f"/providers/Microsoft.MachineLearningServices/workspaces/{workspace}"
        self.scope = (subscription_id, resource_group, workspace)
        self.compute, self.instance_type, self.tier = compute, instance_type, tier
        self.environment = self._environment_id(environment) if environment else None
        self.identity, self.experiment_name, self.shm_size = identity, experiment_name, shm_size
        self.tags = dict(tags or {})
        self._credential = credential
        self._silent_since: dict[str, float] = {}

    def _environment_id(self, text: str) -> str:
        if _ENVIRONMENT.fullmatch(text):
            return text
        short = _SHORT_ENVIRONMENT.fullmatch(text.removeprefix("azureml:"))
        if not short:
            raise ValueError(
                f"environment {text!r} must be NAME:VERSION, a resource id (/subscriptions/.../versions/1) or "
                "azureml://registries/REGISTRY/environments/NAME/versions/VERSION"
            )
        return f"{self.place}/environments/{short[1]}/versions/{short[2]}"

    # -- the client ----------------------------------------------------------------------------------------------------

    @cached_property
    def credential(self) -> Any:
        """What signs in; without credentials, or with expired ones, an ExecutorError that says so."""
        found = self._credential
        if found is None:
            identity = client_module("azure.identity", self.extra)
            found = quietly(identity.DefaultAzureCredential, "azure.identity")
        told(lambda: found.get_token(SCOPE))
        return found

    @cached_property
    def api(self) -> Any:
        # Trying again, with pauses, is `JobExecutor`'s.
        options = {"enable_telemetry": False, "show_progress": False, "retry_total": 0}
        credential = self.credential

        def make() -> Any:
            return client_module("azure.ai.ml", self.extra).MLClient(credential, *self.scope, **options)

        return told(lambda: quietly(make, "azure.ai.ml", "azure.ai.ml._telemetry"))

    @cached_property
    def history(self) -> RunHistory:
        return RunHistory(self.credential, self.details.discovery_url, self.place, self.extra)

    @cached_property
    def details(self) -> Any:
        """What the service says of the workspace."""
        return told(lambda: self.api.workspaces.get(self.scope[2]))

    @cached_property
    def hardware(self) -> list[str]:
        """The workspace's clusters, or the VM sizes of its region."""
        if self.compute:
            return told(lambda: [one.name for one in self.api.compute.list()])
        return told(lambda: [one.name for one in self.api.compute.list_sizes(location=self.details.location)])

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def check(self, job: Job) -> None:
        if not self.image and not self.environment:
            raise ValueError("azure_ml needs an image, such as 'REGISTRY.azurecr.io/NAME:TAG', or an environment")
        _ = self.details
        check_known(
            "compute" if self.compute else "instance_type", self.compute or self.instance_type or "", self.hardware
        )

    def payload(self, job: Job) -> dict[str, Any]:
        values: dict[str, Any] = {
            "name": job.name,
            "display_name": job.name,
            "experiment_name": self.experiment_name or job.run,
            "command": _shell(job.command),
            "environment": self.environment or {"image": self.image},
            "environment_variables": dict(job.env),
            "timeout": job.time_limit_seconds,
            "shm_size": self.shm_size,
            "instance_count": 1,
            "tags": {**self.tags, **job.labels},
        }
        if self.compute:
            values["compute"] = f"{self.place}/computes/{self.compute}"
        else:
            values["instance_type"] = self.instance_type
        if self.tier:
            values["job_tier"] = self.tier
        if self.identity:
            own = self.identity == "system"
            values["identity"] = {"type": "managed"} if own else {"type": "managed", "client_id": self.identity}
            if not own:  # which of the machine's identities the store's client is to take
                values["environment_variables"].setdefault("AZURE_CLIENT_ID", self.identity)
        return values

    def submit_job(self, job: Job) -> str:
        values = self.payload(job)
        module = client_module("azure.ai.ml", self.extra)
        entities = client_module("azure.ai.ml.entities", self.extra)
        if isinstance(values["environment"], dict):
            values["environment"] = entities.Environment(**values["environment"])
        if "identity" in values:
            values["identity"] = entities.ManagedIdentityConfiguration(client_id=values["identity"].get("client_id"))
        try:
            told(lambda: self.api.jobs.create_or_update(module.command(**values)))
        except (QuotaExceeded, BackendUnavailable):
            raise
        except ExecutorError:
            if self.find_job(job) is None:
                raise
            # Another launcher was quicker, or an answer was lost: the name says that it is this very job.
        return job.name

    def find_job(self, job: Job) -> str | None:
        return job.name if self._get(job.name) is not None else None

    def _present(self, job_id: str) -> Any:
        job = self._get(job_id)
        if job is None:
            raise JobGone(f"azure_ml has no job {job_id!r} in {self.scope[2]}: was it deleted?")
        return job

    def _get(self, name: str) -> Any:
        """What the service says of a job; None if it has none of this name."""
        missing = client_module("azure.core.exceptions", self.extra).ResourceNotFoundError

        def ask() -> Any:
            try:
                return self.api.jobs.get(name)
            except missing:
                return None

        return later(ask)

    def look(self, job_id: str) -> Seen:
        job = self._present(job_id)
        native = str(getattr(job.status, "value", job.status))
        seen = Seen(STATES.get(native, "running"), native, log_url=getattr(job, "studio_url", None))
        if native == "NotResponding":
            return self._without_heartbeat(seen, job_id)
        self._silent_since.pop(job_id, None)
        if native in ("Queued", "Canceled", "Failed"):
            limit = float(getattr(getattr(job, "limits", None), "timeout", None) or 0)
            return explained(seen, later(lambda: self.history.details(job_id)), limit)
        return seen

    def _without_heartbeat(self, seen: Seen, job_id: str) -> Seen:
        silent = self.clock() - self._silent_since.setdefault(job_id, self.clock())
        if silent < _SILENT_SECONDS:
            return replace(seen, reason=f"no heartbeat for {silent:.0f} s")
        with contextlib.suppress(ExecutorError):  # so that it doesn't come back beside its successor
            self.stop_job(job_id)
        return replace(seen, state="preempted", reason=f"no heartbeat for {silent:.0f} s: its machine is lost")

    def stop_job(self, job_id: str) -> None:
        def running() -> bool:
            job = self._present(job_id)
            return STATES.get(str(getattr(job.status, "value", job.status))) not in ENDED

        stop_if_running(lambda: told(lambda: self.api.jobs.begin_cancel(job_id, polling=False)), running)

    def follow(self, job_id: str) -> Iterator[str]:
        output = self.history.output(job_id)

        def ended() -> bool:
            seen = self.look(job_id)
            return seen.state in ENDED and not seen.will_retry

        def lines() -> Iterator[str]:
            return later(lambda: iter(list(output.new_lines())))

        yield from tail(job_id, lines, ended, lambda: self.sleep(self.log_pause_seconds))
        yield from output.rest()


def _shell(words: tuple[str, ...]) -> str:
    """The command for the service's shell. What means something to it, or to the service, is encoded."""
    if not all(_PLAIN.fullmatch(word) for word in words):
        words = (*words[:3], *encoded(words[3:], _LONGEST_ARGUMENT))  # python -m, and the module that decodes it
    return shlex.join(words)
