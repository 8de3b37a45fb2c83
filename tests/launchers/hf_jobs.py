"""A stand-in for Hugging Face Jobs: its HTTP interface, with containers of an `Engine`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from composer_replication.diloco.serverless.backends.hf_jobs import HFJobsExecutor
from tests.launchers.backend import Backend
from tests.launchers.engine import Container, Engine
from tests.launchers.http import Refused, Request, Service

TOKEN = "hf_a-token-of-the-tests"
FLAVORS = ("cpu-basic", "a10g-small", "a100-large")
# Everything that a submission may hold; the service refuses other keys.
KEYS = {"command", "arguments", "environment", "flavor", "secrets", "timeoutSeconds", "attempts", "labels", "volumes"}
KEYS |= {"expose", "ssh", "network", "resourceGroupId", "dockerImage", "spaceId"}


class Hub:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.jobs: dict[str, tuple[dict[str, Any], Container]] = {}
        self.submitted: list[dict[str, Any]] = []
        job = r"/api/jobs/team/(job-\d+)"
        self.service = Service(
            [
                ("GET", "/api/whoami-v2", lambda r: self._allowed(r) or {"name": "team", "type": "user"}),
                ("GET", "/api/jobs/hardware", self._hardware),
                ("POST", "/api/jobs/team", self._submit),
                ("GET", "/api/jobs/team", self._list),
                ("GET", job, lambda r: self._info(r.groups[0])),
                ("GET", rf"{job}/logs", self._logs),
                ("POST", rf"{job}/cancel", self._cancel),
            ]
        )

    def _allowed(self, request: Request) -> None:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            raise Refused(401, {"error": "Invalid credentials in Authorization header"})

    def _hardware(self, request: Request) -> list[dict[str, Any]]:
        common = {"cpu": "2 vCPU", "ram": "16 GB", "ephemeralStorage": "20 GB", "accelerator": None}
        price = {"unitCostMicroUSD": 16667, "unitCostUSD": 0.016667, "unitLabel": "minute"}
        return [{"name": name, "prettyName": name, **common, **price} for name in FLAVORS]

    def _submit(self, request: Request) -> dict[str, Any]:
        self._allowed(request)
        refusal = self.engine.refusal()
        if refusal:
            raise Refused(429 if refusal == "quota" else 503, {"error": f"refused for the test: {refusal}"})
        body = request.json
        if set(body) - KEYS or ("dockerImage" in body) == ("spaceId" in body):
            raise Refused(400, {"error": f"unexpected keys: {sorted(set(body) - KEYS)}"})
        if body["flavor"] not in FLAVORS or not 0 < body["timeoutSeconds"]:
            raise Refused(400, {"error": "no such flavor, or no time limit"})
        for variable in (*body["environment"].items(), *body.get("secrets", {}).items()):
            if not all(isinstance(part, str) for part in variable):
                raise Refused(400, {"error": f"{variable[0]} must be a string"})
        self.submitted.append(body)
        env = {**body["environment"], **body.get("secrets", {})}
        container = self.engine.start(body["labels"]["name"], body["command"], env, attempts=body.get("attempts", 1))
        job_id = f"job-{len(self.jobs)}"
        self.jobs[job_id] = body, container
        return self._info(job_id)

    def _list(self, request: Request) -> list[dict[str, Any]]:
        self._allowed(request)
        wanted = dict(label.split("=", 1) for label in request.query.get("label", []))
        return [
            self._info(job_id)
            for job_id, (body, _) in self.jobs.items()
            if all(body["labels"].get(key) == value for key, value in wanted.items())
        ]

    def _info(self, job_id: str) -> dict[str, Any]:
        if job_id not in self.jobs:
            raise Refused(404, {"error": "Job not found"})
        body, container = self.jobs[job_id]
        stage, message = "RUNNING", None
        if container.ended:
            stage = "COMPLETED" if container.ended == "exited" and container.exit_code == 0 else "ERROR"
            stage = "CANCELED" if container.ended == "stopped" else stage
            message = {"expired": "Job timeout", "preempted": "Job failed"}.get(container.ended)
        return {
            "id": job_id,
            "createdAt": "2026-11-01T00:00:00.000Z",
            "dockerImage": body.get("dockerImage"),
            "spaceId": body.get("spaceId"),
            "command": body["command"],
            "arguments": [],
            "environment": body["environment"],
            "secrets": {},
            "flavor": body["flavor"],
            "labels": body["labels"],
            "status": {"stage": stage, "message": message},
            "owner": {"id": "1", "name": "team", "type": "user"},
        }

    def _logs(self, request: Request) -> Iterator[bytes]:
        _, container = self.jobs[request.groups[0]]

        def event(text: str) -> bytes:
            return f"data: {json.dumps({'timestamp': '2026-11-01T00:00:00Z', 'data': text})}\n\n".encode()

        yield event("===== Job started at 2026-11-01 00:00:00 =====")
        yield from map(event, self.engine.follow(container))

    def _cancel(self, request: Request) -> dict[str, Any]:
        self._allowed(request)
        self.engine.stop(self.jobs[request.groups[0]][1])
        return self._info(request.groups[0])


@contextlib.contextmanager
def backend(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    pytest.importorskip("huggingface_hub")
    hub = Hub(engine)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    usual = {"endpoint": hub.service.url, "image": "registry/image:1", "flavor": "cpu-basic"}
    try:
        yield Backend(
            engine,
            make=lambda **more: HFJobsExecutor(**{**usual, **more}),
            container=lambda job_id: hub.jobs[job_id][1],
            bad_settings=[
                ({"flavor": "a10g-smal"}, "Did you mean 'a10g-small'"),
                ({"image": None}, "needs an image"),
                ({"time_limit_hours": 2000.0}, "runs a job for 720 hours at most"),
            ],
            unknown=hub.service.unknown,
        )
    finally:
        hub.service.close()
