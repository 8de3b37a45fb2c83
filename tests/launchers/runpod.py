"""A stand-in for RunPod: its GraphQL interface, parsed and checked against a schema, with containers of an `Engine`.

The schema holds what the service's documents and its own client name, of the calls that are used here. A query that it
doesn't allow, or a variable with a field that it doesn't know, fails the test.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from composer_replication.diloco.serverless.backends.runpod import RunPodExecutor
from tests.launchers.backend import Backend
from tests.launchers.engine import Container, Engine
from tests.launchers.http import Refused, Request, Service

KEY = "rpa_a-key-of-the-tests"
GPUS = {
    "NVIDIA A100 80GB PCIe": "A100 PCIe",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
}
DEPLOY = """
  cloudType: CloudTypeEnum gpuCount: Int gpuTypeId: String name: String imageName: String dockerArgs: String
  env: [EnvironmentVariableInput] templateId: String volumeInGb: Int containerDiskInGb: Int minVcpuCount: Int
  minMemoryInGb: Int ports: String volumeMountPath: String networkVolumeId: String dataCenterId: String
  countryCode: String startSsh: Boolean startJupyter: Boolean supportPublicIp: Boolean stopAfter: DateTime
  terminateAfter: DateTime allowedCudaVersions: [String]
"""
SCHEMA = f"""
scalar DateTime
scalar Void
enum CloudTypeEnum {{ ALL SECURE COMMUNITY }}
enum PodStatus {{ CREATED RUNNING RESTARTING EXITED PAUSED DEAD TERMINATED }}
input EnvironmentVariableInput {{ key: String! value: String! }}
input PodFindAndDeployOnDemandInput {{ {DEPLOY} }}
input PodRentInterruptableInput {{ {DEPLOY} bidPerGpu: Float! }}
input PodFilter {{ podId: String! }}
input PodStopInput {{ podId: String! incrementVersion: Boolean }}
input PodTerminateInput {{ podId: String! }}
type PodRuntime {{ uptimeInSeconds: Int! }}
type Pod {{
  id: String! name: String env: [String] imageName: String desiredStatus: PodStatus! lastStatusChange: String
  runtime: PodRuntime machineId: String
}}
type User {{ id: String! pods: [Pod] }}
type GpuType {{ id: String displayName: String memoryInGb: Int }}
type Query {{ myself: User pod(input: PodFilter): Pod gpuTypes: [GpuType] }}
type Mutation {{
  podFindAndDeployOnDemand(input: PodFindAndDeployOnDemandInput): Pod
  podRentInterruptable(input: PodRentInterruptableInput!): Pod
  podStop(input: PodStopInput!): Pod
  podTerminate(input: PodTerminateInput!): Void
}}
"""


@dataclass
class Pod:
    asked: dict[str, Any]
    container: Container
    spot: bool
    terminated: bool = False
    shown: dict[str, Any] | None = None  # what the service says, against what happened

    @property
    def expired(self) -> bool:
        return "expired" in (self.container.stopping, self.container.ended)


class RunPod:
    def __init__(self, engine: Engine) -> None:
        from graphql import build_schema

        self.engine = engine
        self.pods: dict[str, Pod] = {}
        self.unknown: list[str] = []
        self.refusals: list[Refused] = []  # of the next requests
        self.elapsed = 0.0  # seconds that pass unseen
        self.can_end_itself = True
        self._schema = build_schema(SCHEMA)
        self._lock = threading.Lock()
        self.service = Service([("POST", "/graphql", self._answer)])

    def clock(self) -> float:
        """The time, for an executor: a container whose time was let run out has run for its time."""
        return time.time() + self.elapsed + 7200 * any(pod.expired for pod in self.pods.values())

    def _answer(self, request: Request) -> dict[str, Any]:
        from graphql import graphql_sync

        if self.refusals:
            raise self.refusals.pop(0)
        key = (request.headers.get("authorization") or "").removeprefix("Bearer ")
        if key != KEY and key.removeprefix("pod-key-") not in self.pods:
            raise Refused(401, {"errors": [{"message": "Unauthorized"}]})
        body = request.json
        with self._lock:
            found = graphql_sync(
                self._schema,
                body["query"],
                root_value=_Root(self),
                context_value=key,
                variable_values=body["variables"],
            )
        for error in found.errors or ():
            if error.path is None:  # of the request, not of what it asked for
                self.unknown.append(error.message)
            elif isinstance(error.original_error, Refused):
                raise error.original_error
        return found.formatted

    def deploy(self, asked: dict[str, Any], spot: bool) -> dict[str, Any] | None:
        refusal = self.engine.refusal()
        if refusal == "outage":
            raise Refused(503, {"message": "Service Unavailable"})
        if refusal:
            raise RuntimeError("There are no longer any instances available with the requested specifications.")
        if asked["gpuTypeId"] not in GPUS or not (asked.get("imageName") or asked.get("templateId")):
            raise ValueError("no such GPU, or no image")
        if set("'\"\\\n") & set(asked["dockerArgs"]):
            self.unknown.append(f"words that would be split differently: {asked['dockerArgs']}")
        pod_id = f"pod{len(self.pods):03}"
        env = {one["key"]: one["value"] for one in asked["env"]}
        own = {"RUNPOD_POD_ID": pod_id, "RUNPOD_API_BASE_URL": self.service.url}
        if self.can_end_itself:
            own["RUNPOD_API_KEY"] = f"pod-key-{pod_id}"
        container = self.engine.start(asked["name"], asked["dockerArgs"].split(), {**env, **own})
        self.pods[pod_id] = Pod(asked, container, spot)
        return self.show(pod_id)

    def show(self, pod_id: str) -> dict[str, Any] | None:
        pod = self.pods.get(pod_id)
        if pod is None or pod.terminated or pod.expired:
            return None
        # A container that ends by itself is started again: its pod stays RUNNING.
        status = {"preempted": "EXITED", "stopped": "EXITED"}.get(pod.container.ended, "RUNNING")
        return {
            "id": pod_id,
            "name": pod.asked["name"],
            "env": [f"{one['key']}={one['value']}" for one in pod.asked["env"]],
            "desiredStatus": status,
            "lastStatusChange": f"{status.capitalize()} by Runpod",
            "runtime": {"uptimeInSeconds": 1} if status == "RUNNING" else None,
            **(pod.shown or {}),
        }

    def end(self, pod_id: str, key: str, *, terminate: bool) -> dict[str, Any] | None:
        if key not in (KEY, f"pod-key-{pod_id}"):
            raise Refused(403, {"errors": [{"message": "Forbidden"}]})
        if self.show(pod_id) is None:
            raise ValueError("pod not found")
        pod = self.pods[pod_id]
        if not terminate and pod.asked.get("networkVolumeId"):
            raise ValueError("a pod with a network volume can't be stopped")
        pod.terminated = terminate
        self.engine.stop(pod.container)
        return self.show(pod_id)


class _Root:
    """The schema's top-level fields."""

    def __init__(self, service: RunPod) -> None:
        self.service = service

    def myself(self, info: Any) -> dict[str, Any]:
        pods = [self.service.show(pod_id) for pod_id in self.service.pods]
        return {"id": "user-1", "pods": [pod for pod in pods if pod is not None]}

    def gpuTypes(self, info: Any) -> list[dict[str, str]]:
        return [{"id": name, "displayName": short} for name, short in GPUS.items()]

    def pod(self, info: Any, input: dict[str, Any]) -> dict[str, Any] | None:
        return self.service.show(input["podId"])

    def podFindAndDeployOnDemand(self, info: Any, input: dict[str, Any]) -> dict[str, Any] | None:
        return self.service.deploy(input, spot=False)

    def podRentInterruptable(self, info: Any, input: dict[str, Any]) -> dict[str, Any] | None:
        return self.service.deploy(input, spot=True)

    def podStop(self, info: Any, input: dict[str, Any]) -> dict[str, Any] | None:
        return self.service.end(input["podId"], info.context, terminate=False)

    def podTerminate(self, info: Any, input: dict[str, Any]) -> None:
        self.service.end(input["podId"], info.context, terminate=True)


@contextlib.contextmanager
def served(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunPod]:
    """The service, and an environment with its key."""
    pytest.importorskip("graphql")
    pods = RunPod(engine)
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    try:
        yield pods
    finally:
        pods.service.close()


def make(pods: RunPod, **settings: Any) -> RunPodExecutor:
    executor = RunPodExecutor(**{"endpoint": pods.service.url, "image": "registry/image:1", **settings})
    executor.clock = pods.clock
    return executor


@contextlib.contextmanager
def backend(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    with served(engine, monkeypatch) as pods:
        yield Backend(
            engine,
            make=lambda **more: make(pods, **more),
            container=lambda job_id: pods.pods[job_id.partition("@")[0]].container,
            bad_settings=[
                ({"gpu_type": "NVIDIA A100 80GB PCI"}, "Did you mean 'NVIDIA A100 80GB PCIe'"),
                ({"gpu_type": "rtx4090"}, "Did you mean 'RTX 4090'"),
                ({"cloud_type": "SECURED"}, "Did you mean 'SECURE'"),
                ({"image": None}, "needs an image"),
                ({"time_limit_hours": 2000.0}, "runs a job for 720 hours at most"),
            ],
            unknown=pods.unknown,
        )
