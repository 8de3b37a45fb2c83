"""A stand-in for a Kubernetes API server: one kind of job, with its published schema, and pods on an `Engine`.

Objects are checked as a server does that was asked to be strict: a field that the schema doesn't have is an error. The
kind (`Kind`) says how a manifest becomes a container, and what its controller writes into `status`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.launchers.engine import Container, Engine
from tests.launchers.http import Refused, Request, Route, Service
from tests.launchers.kubernetes_schema import problems
from tests.launchers.kubernetes_secrets import Secrets, refused

TOKEN = "a-token-of-the-tests"
NAMESPACE = "training"
GPU_LABEL, GPU = "nvidia.com/gpu.product", "NVIDIA-H100-80GB-HBM3"
WHEN = "2026-11-01T00:00:00Z"
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")

# What is in the cluster, by its place in the API.
FOUND: dict[str, list[str]] = {
    "/api/v1/namespaces": ["default", NAMESPACE],
    f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts": ["default", "trainer"],
    f"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims": ["checkpoints"],
    "/apis/scheduling.volcano.sh/v1beta1/queues": ["default", "research"],
    "/apis/scheduling.k8s.io/v1/priorityclasses": ["high"],
}


@dataclass
class Record:
    """A job in the cluster."""

    manifest: dict[str, Any]
    container: Container | None = None  # None while a Secret is missing
    deleting: bool = False

    @property
    def name(self) -> str:
        return self.manifest["metadata"]["name"]

    @property
    def gone(self) -> bool:
        return self.deleting and (self.container is None or bool(self.container.ended))


@dataclass
class Kind:
    """One kind of job and its controller."""

    group: str
    version: str
    plural: str
    kind: str
    schema: str
    template: Callable[[dict[str, Any]], dict[str, Any]]  # a job's pod template
    command: Callable[[dict[str, Any], list[str]], list[str]]  # what runs, from manifest and the pod's command
    status: Callable[[Record], dict[str, Any]]
    labels: Callable[[Record], dict[str, str]]  # of the pod whose log it is, besides the template's
    log: Callable[[Record, Iterator[str]], Iterator[str]] = lambda record, lines: lines
    env: Mapping[str, str] = field(default_factory=dict)


class Cluster:
    def __init__(self, engine: Engine, kind: Kind) -> None:
        self.engine, self.kind = engine, kind
        self.jobs: dict[str, Record] = {}
        self.containers: dict[str, Container] = {}
        self.secrets = Secrets((f"{kind.group}/{kind.version}", kind.kind))
        self.forbidden: set[str] = set()  # paths below which these credentials may not look
        self.nodes = [{"nvidia.com/gpu": "8", "cpu": "64", "memory": "512Gi"}]
        self.dry_runs = 0
        jobs = f"/apis/{kind.group}/{kind.version}/namespaces/([^/]+)/{kind.plural}"
        pods = f"/api/v1/namespaces/{NAMESPACE}/pods"
        routes: list[Route] = [
            ("POST", jobs, self._create),
            ("GET", f"{jobs}/([^/]+)", lambda r: self._shown(self._record(r.groups[1]))),
            ("DELETE", f"{jobs}/([^/]+)", self._delete),
            *self.secrets.routes(f"/api/v1/namespaces/{NAMESPACE}/secrets"),
            ("GET", pods, self._pods),
            ("GET", f"{pods}/([^/]+)/log", self._log),
            ("GET", "/api/v1/nodes", self._nodes),
        ]
        for place, names in FOUND.items():
            routes.append(("GET", place, lambda r, names=names: {"items": [_named(name) for name in names]}))
            routes.append(("GET", f"{place}/([^/]+)", lambda r, names=names: self._one(r.groups[0], names)))
        self.service = Service([(method, path, self._allowed(answer)) for method, path, answer in routes])

    def _allowed(self, answer: Callable[[Request], Any]) -> Callable[[Request], Any]:
        def checked(request: Request) -> Any:
            if request.headers.get("authorization") != f"Bearer {TOKEN}":
                raise refused(401, "Unauthorized", "Unauthorized")
            if any(request.path.startswith(place) for place in self.forbidden):
                raise refused(403, "Forbidden", f'User "trainer" cannot get {request.path}')
            answered = answer(request)
            if request.handler.command == "POST":
                raise Refused(201, answered)  # created: the client reads no other answer
            return answered

        return checked

    def kubeconfig(self, folder: Path) -> Path:
        path = folder / "kubeconfig.json"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "cluster", "cluster": {"server": self.service.url}}],
            "users": [{"name": "me", "user": {"token": TOKEN}}],
            "contexts": [{"name": "here", "context": {"cluster": "cluster", "user": "me"}}],
        }
        path.write_text(json.dumps(config))
        return path

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _create(self, request: Request) -> dict[str, Any]:
        namespace, body = request.groups[0], request.json
        if namespace not in FOUND["/api/v1/namespaces"]:
            raise refused(404, "NotFound", f'namespaces "{namespace}" not found')
        self._check(request, body)
        if body["metadata"]["name"] in self.jobs and not self.jobs[body["metadata"]["name"]].gone:
            raise refused(409, "AlreadyExists", f'{self.kind.plural} "{body["metadata"]["name"]}" already exists')
        record = Record(body)
        if request.query.get("dryRun") == ["All"]:
            self.dry_runs += 1
            return self._shown(record)
        assert "dryRun" not in request.query
        refusal = self.engine.refusal()
        if refusal == "quota":
            raise refused(403, "Forbidden", f'"{record.name}" is forbidden: exceeded quota: gpus, used: 8, limited: 8')
        if refusal:
            raise refused(503, "ServiceUnavailable", "the server is currently unable to handle the request")
        self.jobs[record.name] = record
        self._start(record)
        return self._shown(record)

    def _check(self, request: Request, body: dict[str, Any]) -> None:
        found = problems(self.kind.schema, body)
        if found and request.query.get("fieldValidation") == ["Strict"]:
            raise refused(400, "BadRequest", f"strict decoding error: {'; '.join(found)}")
        assert not found, found  # a server that wasn't asked to be strict would drop fields in silence
        metadata = body["metadata"]
        assert set(metadata) <= {"name", "namespace", "labels", "annotations"} and metadata["namespace"] == NAMESPACE
        for name in (metadata["name"], *metadata["labels"].values()):
            if not NAME.fullmatch(name):
                raise refused(422, "Invalid", f"{name!r} is not a DNS-1035 label")
        from kubernetes.client import V1PodSpec

        V1PodSpec.model_validate(self.kind.template(body)["spec"])  # the client's own model takes no unknown fields

    def _start(self, record: Record) -> None:
        """What the controllers do: a pod from the template, once all Secrets are there."""
        (spec,) = self.kind.template(record.manifest)["spec"]["containers"]
        env: dict[str, str] = {}
        for source in spec.get("envFrom", []):
            if source["secretRef"]["name"] not in self.secrets:
                return
            env |= self.secrets[source["secretRef"]["name"]]["stringData"]
        for one in spec.get("env", []):
            if "valueFrom" in one:
                key = one["valueFrom"]["secretKeyRef"]
                if key["name"] not in self.secrets:
                    return
                env[one["name"]] = self.secrets[key["name"]]["stringData"][key["key"]]
            else:
                env[one["name"]] = expanded(one["value"], env)
        command = [expanded(word, env) for word in spec.get("command", [])]
        env |= self.kind.env
        words = self.kind.command(record.manifest, command)
        record.container = self.containers[record.name] = self.engine.start(record.name, words, env)

    def _record(self, name: str) -> Record:
        record = self.jobs.get(name)
        if record is None or record.gone:
            raise refused(404, "NotFound", f'{self.kind.plural}.{self.kind.group} "{name}" not found')
        return record

    def _shown(self, record: Record) -> dict[str, Any]:
        shown = copy.deepcopy(record.manifest)
        shown["metadata"] |= {"uid": f"uid-{record.name}", "creationTimestamp": WHEN}
        if record.deleting:
            shown["metadata"]["deletionTimestamp"] = WHEN
        if record.name in self.jobs:
            shown["status"] = self.kind.status(record)
            found = problems(self.kind.schema, shown)
            assert not found, found
        return shown

    def _delete(self, request: Request) -> dict[str, Any]:
        record = self._record(request.groups[1])
        assert (request.query.get("propagationPolicy") or [request.json.get("propagationPolicy")]) == ["Foreground"]
        record.deleting = True
        if record.container is not None:
            self.engine.stop(record.container)
        self.secrets.collect_garbage(f"uid-{record.name}")
        return self._shown(record)

    # -- pods ----------------------------------------------------------------------------------------------------------

    def _pod(self, record: Record) -> dict[str, Any]:
        template, container = self.kind.template(record.manifest), record.container
        (spec,) = template["spec"]["containers"]
        status: dict[str, Any] = {"phase": "Pending", "conditions": []}
        state: dict[str, Any] = {"waiting": {"reason": "CreateContainerConfigError", "message": "secret not found"}}
        if container is not None and not container.ended:
            status["phase"], state = "Running", {"running": {"startedAt": WHEN}}
        elif container is not None:
            code = container.exit_code or 0
            code = 128 - code if code < 0 else code
            status["phase"] = "Succeeded" if code == 0 else "Failed"
            state = {"terminated": {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}}
            if container.ended == "preempted":
                reason = {
                    "reason": "PreemptionByScheduler",
                    "message": "preempting to accommodate a higher priority pod",
                }
                status["conditions"].append({"type": "DisruptionTarget", "status": "True", **reason})
            elif container.ended == "expired":
                status |= {"phase": "Failed", "reason": "DeadlineExceeded"}
                status["message"] = "Pod was active on the node longer than the specified deadline"
        name = {"name": spec["name"], "image": spec["image"], "imageID": "", "ready": False, "restartCount": 0}
        status["containerStatuses"] = [{**name, "state": state}]
        metadata = {
            "name": f"{record.name}-replica-0",
            "namespace": NAMESPACE,
            "uid": f"pod-{record.name}-{0 if container is None else container.starts}",
            "creationTimestamp": WHEN,
            "labels": {**template["metadata"]["labels"], **self.kind.labels(record)},
        }
        return {"metadata": metadata, "spec": template["spec"], "status": status}

    def _pods(self, request: Request) -> dict[str, Any]:
        wanted = dict(one.split("=", 1) for one in request.query["labelSelector"][0].split(","))
        pods = [self._pod(record) for record in self.jobs.values() if not record.gone]
        found = [pod for pod in pods if wanted.items() <= pod["metadata"]["labels"].items()]
        return {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": found}

    def _log(self, request: Request) -> Iterator[bytes]:
        record = self._record(request.groups[0].removesuffix("-replica-0"))
        assert request.query["follow"] == ["true"]
        if record.container is None:
            raise refused(400, "BadRequest", f'container in pod "{request.groups[0]}" is waiting to start')
        lines = self.kind.log(record, self._lines(record.container))
        return (f"{line}\n".encode() for line in lines)

    def _lines(self, container: Container) -> Iterator[str]:
        """Of the present pod; one that takes its place has a log of its own."""
        with self.engine.changed:
            start, told = len(container.begins), container.begins[-1]
        while True:
            with self.engine.changed:
                while not (container.ended or len(container.begins) > start or len(container.lines) > told):
                    self.engine.changed.wait()
                end = container.begins[start] if len(container.begins) > start else None
                over, lines = end is not None or bool(container.ended), container.lines[told:end]
            told += len(lines)
            yield from lines
            if over:
                return

    # -- what else is there --------------------------------------------------------------------------------------------

    def _one(self, name: str, names: list[str]) -> dict[str, Any]:
        if name not in names:
            raise refused(404, "NotFound", f'"{name}" not found')
        return _named(name)

    def _nodes(self, request: Request) -> dict[str, Any]:
        return {
            "items": [
                {"metadata": {"name": "node", "labels": {GPU_LABEL: GPU}}, "status": {"allocatable": one}}
                for one in self.nodes
            ]
        }


def expanded(text: str, env: dict[str, str]) -> str:
    """What Kubernetes makes of `$(NAME)` and `$$` in a command or variable."""
    known = re.compile(r"\$(\$|\(([^()]*)\))")
    return known.sub(lambda m: "$" if m[1] == "$" else env.get(m[2], m[0]), text)


def _named(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "value": 1000}
