"""What back ends on Kubernetes share: objects, pods and their logs, Secrets, checks.

Facts of the service that this rests on: the API server checks a manifest without keeping it (a dry run) and refuses
unknown fields, both if asked to; a job's logs are its pods', and go with them when the job is deleted; a Secret that is
owned by a job is deleted with it.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from composer_replication.diloco.serverless.backends.kubernetes_checks import Reference, check_nodes, check_references
from composer_replication.diloco.serverless.backends.kubernetes_client import EXTRA, Api, Exists, Missing
from composer_replication.diloco.serverless.backends.pods import JOB_LABEL, PodSettings
from composer_replication.diloco.serverless.executor import JobGone
from composer_replication.diloco.serverless.jobs.job import Job, Seen, masked
from composer_replication.diloco.serverless.jobs.job_executor import JobExecutor
from composer_replication.diloco.serverless.spec import ReplicaSpec
from composer_replication.errors import ExecutorError

__all__ = ["KubernetesExecutor"]

logger = logging.getLogger(__name__)


class KubernetesExecutor(JobExecutor):
    """Replicas as objects of a cluster's own job service.

    Args:
        namespace: where jobs, Secrets and pods are.
        kubeconfig: its path. None: `$KUBECONFIG`, `~/.kube/config`, or inside a cluster the pod's own identity.
        context: of the kubeconfig. None: its current one.
        gpus: of each replica.
        gpu_resource: what the cluster calls them.
        cpus, memory: what a replica needs, as Kubernetes writes it ("8", "64Gi"). None: not said.
        shm: size of /dev/shm; it counts as memory. None: the 64 MB that containers have.
        node_selector: labels of the nodes to run on, {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}.
        tolerations: as Kubernetes has them.
        service_account: whose identity the replica has; a cloud's workload identity goes through it.
        secret_name: a Secret of the namespace that is there, whose keys become variables.
        image_pull_secrets: names of Secrets of the image's registry.
        volumes: {"/checkpoints": "NAME OF A CLAIM"}, or a volume source as Kubernetes has it for the value.
        grace_seconds: what a replica gets to save a checkpoint when it is asked to stop.
        settings: those of `JobExecutor`.

    `secrets` go into a Secret of the job's name, which is deleted with the job.
    """

    default_scheme = "s3"
    extra = EXTRA
    longest_seconds = 365 * 24 * 3600  # clusters have no limit; this is what "none" is

    # Said by each kind of job.
    title: str  # of what must be installed in the cluster
    group: str
    version: str
    plural: str
    kind: str

    def __init__(
        self,
        *,
        namespace: str = "default",
        kubeconfig: str | None = None,
        context: str | None = None,
        image: str | None = None,
        gpus: int = 1,
        gpu_resource: str = "nvidia.com/gpu",
        cpus: str | int | float | None = None,
        memory: str | None = None,
        shm: str | None = "8Gi",
        node_selector: Mapping[str, str] | None = None,
        tolerations: Sequence[Mapping[str, Any]] = (),
        service_account: str | None = None,
        secret_name: str | None = None,
        image_pull_secrets: Sequence[str] = (),
        volumes: Mapping[str, str | Mapping[str, Any]] | None = None,
        grace_seconds: int = 120,
        **settings: Any,
    ) -> None:
        super().__init__(image=image, **settings)
        self.namespace = namespace
        self.api = Api(kubeconfig, context)
        self.pod = PodSettings(
            image=image,
            gpus=gpus,
            gpu_resource=gpu_resource,
            cpus=cpus,
            memory=memory,
            shm=shm,
            node_selector=dict(node_selector or {}),
            tolerations=tuple(tolerations),
            service_account=service_account,
            secret_name=secret_name,
            image_pull_secrets=tuple(image_pull_secrets),
            volumes=dict(volumes or {}),
            grace_seconds=grace_seconds,
        )
        self._told: dict[str, dict[str, int]] = {}  # job: pod: lines of its log that were read

    @property
    def supports_inter_replica_network(self) -> bool:
        return True

    # -- what a kind of job says ---------------------------------------------------------------------------------------

    @abstractmethod
    def spec(self, job: Job) -> dict[str, Any]:
        """The manifest's `spec`."""

    @abstractmethod
    def seen(self, status: Mapping[str, Any], pods: Callable[[], list[Any]]) -> Seen:
        """What the object's status, and its pods if needed, say."""

    def references(self) -> list[Reference]:
        """What else must be in the cluster."""
        core, space, pod = self.api.core, self.namespace, self.pod
        found = [Reference("namespace", space, partial(core.read_namespace, space), core.list_namespace)]
        if pod.service_account:
            read = partial(core.read_namespaced_service_account, pod.service_account, space)
            names = partial(core.list_namespaced_service_account, space)
            found.append(Reference("service_account", pod.service_account, read, names))
        secrets = {
            "secret_name": [pod.secret_name] if pod.secret_name else [],
            "image_pull_secrets": pod.image_pull_secrets,
        }
        for setting, given in secrets.items():
            for name in given:
                found.append(Reference(setting, name, partial(core.read_namespaced_secret, name, space)))
        for claim in pod.volumes.values():
            if isinstance(claim, str):
                read = partial(core.read_namespaced_persistent_volume_claim, claim, space)
                names = partial(core.list_namespaced_persistent_volume_claim, space)
                found.append(Reference("claim of volumes", claim, read, names))
        return found

    def log_source(self, job_id: str) -> tuple[str, str | None]:
        """(label selector, container) of the pods whose log is the replica's output."""
        return f"{JOB_LABEL}={job_id}", None

    def own_lines(self, job_id: str, lines: Iterator[str]) -> Iterator[str]:
        """The replica's lines among those of a pod."""
        return lines

    def on_objects(self, verb: str, *args: Any, **more: Any) -> Any:
        """`verb` a job of this kind."""
        function = getattr(self.api.objects, f"{verb}_namespaced_custom_object")
        return self.api.call(function, self.group, self.version, self.namespace, self.plural, *args, **more)

    # -- what JobExecutor asks for -------------------------------------------------------------------------------------

    def check(self, job: Job) -> None:
        if not self.image:
            raise ValueError(f"{self.backend_name} needs an image that holds this package, such as 'registry/image:1'")
        try:
            _ = self._checked
            self.on_objects("create", self.payload(job), dry_run="All", field_validation="Strict")
        except Exists:
            pass  # launched before
        except Missing as error:
            raise ExecutorError(f"{self.title} isn't installed in this cluster: {error}") from error

    @cached_property
    def _checked(self) -> bool:
        """Once for all replicas."""
        check_references(self.api, self.references())
        check_nodes(self.api, self.pod)
        return True

    def payload(self, job: Job) -> dict[str, Any]:
        return {
            "apiVersion": f"{self.group}/{self.version}",
            "kind": self.kind,
            "metadata": {"name": job.name, "namespace": self.namespace, "labels": job.labels},
            "spec": self.spec(job),
        }

    def shown_payload(self, spec: ReplicaSpec, submission: int = 0) -> dict[str, Any]:
        """The manifest; a list of the Secret's, masked, and it if there are secrets."""
        job = self.job(spec, submission)
        shown = masked(self.payload(job), job.secrets.values())
        if not job.secrets:
            return shown
        secret = masked(self._secret_manifest(job), job.secrets.values())
        return {"apiVersion": "v1", "kind": "List", "items": [secret, shown]}

    def _secret_manifest(self, job: Job) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": job.name, "namespace": self.namespace, "labels": job.labels},
            "type": "Opaque",
            "stringData": dict(job.secrets),
        }

    def submit_job(self, job: Job) -> str:
        if job.secrets:
            self._hand_over(job)
        try:
            made = self.on_objects("create", self.payload(job), field_validation="Strict")
        except Exists:  # a request whose answer was lost, or another launcher's
            return job.name
        except ExecutorError:
            if job.secrets:
                self._forget(job)
            raise
        if job.secrets:
            owner = {key: made[key] for key in ("apiVersion", "kind")}
            owner |= {key: made["metadata"][key] for key in ("name", "uid")}
            try:
                body = {"metadata": {"ownerReferences": [owner]}}
                self.api.call(self.api.core.patch_namespaced_secret, job.name, self.namespace, body)
            except ExecutorError as error:
                logger.warning("the Secret %s isn't deleted with its job: %s", job.name, error)
        return job.name

    def _hand_over(self, job: Job) -> None:
        models = self.api.models
        body = models.V1Secret(
            api_version="v1",
            kind="Secret",
            metadata=models.V1ObjectMeta(name=job.name, namespace=self.namespace, labels=job.labels),
            type="Opaque",
            string_data=dict(job.secrets),
        )
        try:
            self.api.call(self.api.core.create_namespaced_secret, self.namespace, body)
        except Exists:  # of a launcher that died before it started the job
            self.api.call(self.api.core.replace_namespaced_secret, job.name, self.namespace, body)

    def _forget(self, job: Job) -> None:
        try:
            self.api.call(self.api.core.delete_namespaced_secret, job.name, self.namespace)
        except ExecutorError as error:
            logger.warning("the Secret %s is left: %s", job.name, error)

    def find_job(self, job: Job) -> str | None:
        try:
            return self.on_objects("get", job.name)["metadata"]["name"]
        except Missing:
            return None

    def look(self, job_id: str) -> Seen:
        try:
            found = self.on_objects("get", job_id)
        except Missing:
            return self._deleted(job_id)
        seen = self.seen(found.get("status") or {}, lambda: self._pods(f"{JOB_LABEL}={job_id}"))
        if found["metadata"].get("deletionTimestamp"):  # its pods have their grace time
            return Seen("running", f"{seen.native}, being deleted", attempt=seen.attempt)
        return seen

    def _deleted(self, job_id: str) -> Seen:
        """By us or others or because it had ended long ago: the replica's word says more."""
        replica = job_id.rpartition("-r")[2].partition("-")[0]
        mark = self.marks().read(int(replica), job_id) if replica.isdigit() else None
        if self._alive(mark) and not self.marks().asked_to_stop(job_id):  # a job is there until its pods have ended
            raise self._unknown(job_id)
        state = "preempted" if mark is None or mark.exit_code is None else "failed"
        return Seen(state, "gone", "" if mark is not None and mark.exit_code is not None else "the job was deleted")

    def stop_job(self, job_id: str) -> None:
        try:
            self.on_objects("delete", job_id, propagation_policy="Foreground")
        except Missing:
            raise self._unknown(job_id) from None

    def _unknown(self, job_id: str) -> JobGone:
        words = f"no {self.kind} {job_id} in namespace {self.namespace}: was it deleted, or is it another cluster's?"
        return JobGone(f"{self.backend_name}: {words}")

    def _pods(self, selector: str) -> list[Any]:
        found = self.api.call(self.api.core.list_namespaced_pod, self.namespace, label_selector=selector).items
        return sorted(found, key=lambda pod: (str(pod.metadata.creation_timestamp), pod.metadata.name))

    # -- logs ----------------------------------------------------------------------------------------------------------

    def follow(self, job_id: str) -> Iterator[str]:
        selector, container = self.log_source(job_id)
        told = self._told.setdefault(job_id, {})
        here = {pod.metadata.uid for pod in self._pods(selector)}
        for pod, count in told.items():  # logs of pods that have gone keep their place before a cursor
            if pod not in here:
                yield from [""] * count
        done = set(told) - here
        while True:
            pods = [pod for pod in self._pods(selector) if pod.metadata.uid not in done]
            begun = next((pod for pod in pods if pod.status.phase not in (None, "Pending")), None)
            if begun is None:
                if self.look(job_id).state not in ("pending", "running"):
                    return
                self.sleep(self.log_pause_seconds)
                continue
            uid = begun.metadata.uid
            lines = self.api.pod_lines(begun.metadata.name, self.namespace, container)
            for number, line in enumerate(self.own_lines(job_id, lines)):
                told[uid] = max(told.get(uid, 0), number + 1)
                yield line
            if any(pod.metadata.uid == uid and pod.status.phase == "Running" for pod in self._pods(selector)):
                return  # the connection has ended, not the container
            done.add(uid)
