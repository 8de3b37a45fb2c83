"""RunPod's pods, over its GraphQL interface, with a client of our own: every value goes as a variable.

Facts of the service that this rests on: a pod has no exit code, no logs that can be asked for, and no end of its own;
a container that ends is started again and the pod goes on costing money. So a pod ends itself (`runpod_pod.py`), the
replica's mark in the store says how, its output goes into the store, and a launcher that sees an ended pod deletes it.
A spot pod whose machine is taken is EXITED. Names aren't unique. The command's words are split at spaces, so it is sent
in a form that has nothing else to split. Variables, secrets among them, can be read in the console.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from composer_replication.diloco.serverless.backends.client import check_known, stop_if_running
from composer_replication.diloco.serverless.executor import BackendUnavailable, QuotaExceeded
from composer_replication.diloco.serverless.exit_codes import again
from composer_replication.diloco.serverless.jobs.container import BEAT_SECONDS
from composer_replication.diloco.serverless.jobs.encoded import encoded
from composer_replication.diloco.serverless.jobs.job import Job, Seen, masked
from composer_replication.diloco.serverless.jobs.job_executor import JobExecutor
from composer_replication.diloco.serverless.jobs.marks import Mark
from composer_replication.errors import ExecutorError

__all__ = ["RunPodExecutor", "ask"]

CLOUDS = ("ALL", "SECURE", "COMMUNITY")
IN_POD = "composer_replication.diloco.serverless.backends.runpod_pod"
DEADLINE = "COMPOSER_REPLICATION_DEADLINE"  # a pod's variable: when its time is over, in seconds since 1970
PENDING = ("CREATED", "RESTARTING", "PAUSED")
RUNNING = "RUNNING"

ON_DEMAND = """mutation Deploy($input: PodFindAndDeployOnDemandInput!) {
  podFindAndDeployOnDemand(input: $input) { id }
}"""
SPOT = "mutation Rent($input: PodRentInterruptableInput!) { podRentInterruptable(input: $input) { id } }"
POD = """query Pod($input: PodFilter!) {
  pod(input: $input) { id name desiredStatus lastStatusChange runtime { uptimeInSeconds } }
}"""
PODS = "query Pods { myself { pods { id name env } } }"
GPUS = "query Gpus { myself { id } gpuTypes { id displayName } }"
STOP = "mutation Stop($input: PodStopInput!) { podStop(input: $input) { id } }"
TERMINATE = "mutation Terminate($input: PodTerminateInput!) { podTerminate(input: $input) }"


class RunPodExecutor(JobExecutor):
    """Replicas as RunPod pods.

    Args:
        gpu_type: by its id or its short name, such as `NVIDIA A100 80GB PCIe` or `A100 PCIe`.
        gpu_count: GPUs of one replica.
        cloud_type: `SECURE`, `COMMUNITY` or `ALL`.
        bid_per_gpu: dollars per hour and GPU: rent spot pods, whose machine may be taken. None: on demand.
        image: the container image. Its entry point, if it has one, must run the words that it is given.
        template: the id of a template, which may say the image.
        data_center: such as `EU-RO-1`. None: any.
        container_disk_gb: what the container may write.
        network_volume: the id of one, which is mounted at `volume_path` and ties the pods to its data center.
        volume_path: where.
        endpoint: another address of the interface.
        settings: those of `JobExecutor`.

    The key is `RUNPOD_API_KEY`. Secrets are variables of the pod, which those with access to the account can read in
    its console: give replicas credentials that are short-lived and reach the run's prefix only.
    """

    backend_name = "runpod"
    default_scheme = "s3"
    longest_seconds = 30 * 24 * 3600  # the service names none; this is what is sent for "no limit"
    name_limit = 128
    ship_logs = True

    def __init__(
        self,
        *,
        gpu_type: str = "NVIDIA A100 80GB PCIe",
        gpu_count: int = 1,
        cloud_type: str = "ALL",
        bid_per_gpu: float | None = None,
        image: str | None = None,
        template: str | None = None,
        data_center: str | None = None,
        container_disk_gb: int = 50,
        network_volume: str | None = None,
        volume_path: str = "/workspace",
        endpoint: str | None = None,
        time_limit_hours: float | None = 24.0,
        **settings: Any,
    ) -> None:
        super().__init__(image=image, time_limit_hours=time_limit_hours, **settings)
        for name, value in {"gpu_count": gpu_count, "container_disk_gb": container_disk_gb}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if bid_per_gpu is not None and not bid_per_gpu > 0:
            raise ValueError(f"bid_per_gpu must be more than 0 dollars per hour, got {bid_per_gpu}")
        self.gpu_type = gpu_type
        self.gpu_count = gpu_count
        self.cloud_type = cloud_type
        self.bid_per_gpu = bid_per_gpu
        self.template = template
        self.data_center = data_center
        self.container_disk_gb = container_disk_gb
        self.network_volume = network_volume
        self.volume_path = volume_path
        self.endpoint = endpoint

    def _ask(self, query: str, **variables: Any) -> dict[str, Any]:
        return ask(query, variables, self.endpoint)

    @cached_property
    def gpu_types(self) -> dict[str, str]:
        """The service's GPU types: both of each type's names, with its id."""
        found = self._ask(GPUS)["gpuTypes"]
        return {name: one["id"] for one in found for name in (one["displayName"], one["id"]) if name}

    def check(self, job: Job) -> None:
        if not self.image and not self.template:
            raise ValueError(f"{self.backend_name} needs an image, such as 'pytorch/pytorch:2.9.1-cuda12.8-cudnn9'")
        check_known("cloud_type", self.cloud_type, CLOUDS)
        check_known("gpu_type", self.gpu_type, self.gpu_types)  # a missing or refused key is found out here

    def payload(self, job: Job) -> dict[str, Any]:
        deadline = int(self.clock()) + job.time_limit_seconds
        words = ["python", "-m", IN_POD, *encoded(job.command[3:], 4000)]  # in place of python -m ...jobs.container
        env = {**job.env, **job.secrets, DEADLINE: str(deadline)}
        values = {
            "name": job.name,
            "imageName": self.image,
            "templateId": self.template,
            "dockerArgs": " ".join(words),
            "env": [{"key": key, "value": value} for key, value in env.items()],
            "gpuTypeId": self.gpu_types.get(self.gpu_type, self.gpu_type),
            "gpuCount": self.gpu_count,
            "cloudType": self.cloud_type,
            "dataCenterId": self.data_center,
            "containerDiskInGb": self.container_disk_gb,
            "volumeInGb": 0,
            "networkVolumeId": self.network_volume,
            "volumeMountPath": self.volume_path if self.network_volume else None,
            "startSsh": False,
            "terminateAfter": datetime.fromtimestamp(deadline, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "bidPerGpu": self.bid_per_gpu,
        }
        return {name: value for name, value in values.items() if value is not None}

    def submit_job(self, job: Job) -> str:
        values = self.payload(job)
        mutation = ON_DEMAND if self.bid_per_gpu is None else SPOT
        (pod,) = ask(mutation, {"input": values}, self.endpoint, hidden=job.secrets.values()).values()
        if pod is None:
            raise QuotaExceeded(f"RunPod has no {self.gpu_type} now")
        return _job_id(pod["id"], {one["key"]: one["value"] for one in values["env"]})

    def find_job(self, job: Job) -> str | None:
        for pod in self._ask(PODS)["myself"]["pods"] or ():
            if pod["name"] == job.name:
                return _job_id(pod["id"], dict(one.split("=", 1) for one in pod["env"] or () if "=" in one))
        return None

    def look(self, job_id: str) -> Seen:
        pod_id, _, deadline = job_id.partition("@")
        url = f"https://console.runpod.io/pods?id={pod_id}"
        late = bool(deadline) and self.clock() >= int(deadline)
        pod = self._pod(pod_id)
        if pod is None:
            mark = self._mark_of_handle(job_id)
            alive = mark is not None and mark.exit_code is None and self.clock() - mark.seen < 3 * BEAT_SECONDS
            if alive and not late:  # just deleted, or another account's
                return Seen("running", "gone", "the pod isn't found, but its replica was alive just now", log_url=url)
            return self._ended("gone", "", mark, late, url)
        native, reason = pod["desiredStatus"], pod["lastStatusChange"] or ""
        mark = self._mark_of_name(pod["name"])
        going = native == RUNNING or native in PENDING
        if going and not late and (mark is None or mark.exit_code is None):
            begun = native == RUNNING and pod["runtime"] is not None
            return Seen("running" if begun else "pending", native, reason, log_url=url)
        # It has ended, or its container has and would be started again, or its time is over.
        with contextlib.suppress(ExecutorError):  # it's over in any case, and the next look tries again
            self._ask(TERMINATE, input={"podId": pod_id})
        return self._ended(native, reason, mark, late, url)

    def _pod(self, pod_id: str) -> dict[str, Any] | None:
        try:
            return self._ask(POD, input={"podId": pod_id})["pod"]
        except ExecutorError as error:
            if "not found" in str(error).lower():
                return None
            raise

    def _ended(self, native: str, reason: str, mark: Mark | None, late: bool, url: str) -> Seen:
        code = mark.exit_code if mark is not None else None
        if late and (code is None or again(code) == "preemption"):
            return Seen("failed", native, reason, timed_out=True, log_url=url)
        if code is None:
            return Seen("preempted", native, reason, log_url=url)
        return Seen("completed" if code == 0 else "failed", native, exit_code=code, log_url=url)

    def _mark_of_name(self, name: str) -> Mark | None:
        found = re.fullmatch(r".*-r(\d+)-\d+", name)
        return self.marks().read(int(found[1]), name) if found else None

    def _mark_of_handle(self, job_id: str) -> Mark | None:
        """Of a pod that is gone, with its name."""
        for handle in self.marks().handles():
            if handle.job_id == job_id:
                return self.marks().read(handle.replica_id, handle.name)
        return None

    def stop_job(self, job_id: str) -> None:
        pod = {"podId": job_id.partition("@")[0]}
        query = TERMINATE if self.network_volume else STOP  # a pod with a network volume can only be deleted
        stop_if_running(lambda: self._ask(query, input=pod), lambda: self.look(job_id).state in ("pending", "running"))

    def follow(self, job_id: str) -> Iterator[str]:
        """Nothing: the output is in the store."""
        return iter(())


def _job_id(pod_id: str, env: Mapping[str, str]) -> str:
    """The pod's id, and when its time is over, which nobody could say of a pod that is gone."""
    return f"{pod_id}@{env[DEADLINE]}" if DEADLINE in env else pod_id


def ask(
    query: str, variables: Mapping[str, Any], endpoint: str | None = None, *, hidden: Iterable[str] = ()
) -> dict[str, Any]:
    """One GraphQL request with the key of this environment. Raises what executors raise.

    `hidden` are secrets among the variables: GraphQL's errors quote the values that they refuse.
    """
    key = os.environ.get("RUNPOD_API_KEY", "").strip()  # a file's last line break is no part of it
    if not key:
        raise ExecutorError("RunPod: RUNPOD_API_KEY isn't set; make a key in the console's settings")
    if not key.isascii() or not key.isprintable():  # what goes on to refuse it would show it
        raise ExecutorError("RunPod: RUNPOD_API_KEY holds characters that no key has: set it again")
    base = endpoint or os.environ.get("RUNPOD_API_BASE_URL") or "https://api.runpod.io"
    request = urllib.request.Request(
        base.rstrip("/") + "/graphql",
        data=json.dumps({"query": query, "variables": dict(variables)}).encode(),
        headers={
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
            "User-Agent": "composer-replication",
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error.code, masked(error.read().decode("utf-8", errors="replace"), hidden)) from None
    except (OSError, ValueError) as error:
        raise BackendUnavailable(f"RunPod: {error}") from error
    try:
        errors = [str(one.get("message", one)) for one in answer.get("errors") or ()]
        data = None if errors else {**answer["data"]}
    except (AttributeError, LookupError, TypeError):
        raise BackendUnavailable(f"RunPod answers what isn't GraphQL: {str(masked(answer, hidden))[:200]}") from None
    if data is None:
        raise _refusal(200, masked("; ".join(errors), hidden))
    return data


def _refusal(status: int, text: str) -> ExecutorError:
    words = f"RunPod: {' '.join(text.split())[:500] or f'HTTP {status}'}"
    full = re.search(
        r"no longer any instances|no instances|not enough|capacity|out of stock|too many|limit", text, re.I
    )
    if status == 429 or (status == 200 and full):
        return QuotaExceeded(words)
    if status in (401, 403) or "unauthorized" in text.lower():
        return ExecutorError(f"RunPod refuses the key in RUNPOD_API_KEY: {text.strip() or status}")
    return BackendUnavailable(words) if status >= 500 else ExecutorError(words)
