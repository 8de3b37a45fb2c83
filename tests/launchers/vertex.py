"""A stand-in for Vertex AI's custom jobs and for Cloud Logging: their HTTP interfaces, bodies read with the client's
own messages."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from composer_replication.diloco.serverless.backends.vertex import VertexExecutor
from tests.launchers.backend import Backend
from tests.launchers.engine import Container, Engine
from tests.launchers.http import Refused, Request, Service
from tests.launchers.kubernetes_api import expanded

TOKEN = "ya29.a-token-of-the-tests"
PARENT = "projects/shop/locations/us-central1"
BEGAN = datetime(2026, 11, 1, tzinfo=timezone.utc)


def credentials(token: str = TOKEN) -> Any:
    from google.oauth2.credentials import Credentials

    return Credentials(token=token)


class Vertex:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.jobs: dict[str, tuple[Any, Container]] = {}
        self.submitted: list[dict[str, Any]] = []
        self._numbers = itertools.count(1000)
        self.reads = 0
        self.busy_reads = 0  # how many of the next reads of logs are refused
        job = rf"/v1/({PARENT}/customJobs/\d+)"
        self.service = Service(
            [
                ("POST", f"/v1/{PARENT}/customJobs", self._create),
                ("GET", f"/v1/{PARENT}/customJobs", self._list),
                ("GET", job, lambda r: self._shown(r)),
                ("POST", f"{job}:cancel", self._cancel),
                ("POST", "/v2/entries:list", self._entries),
            ]
        )

    def _allowed(self, request: Request) -> None:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            raise _refused(401, "UNAUTHENTICATED", "Request had invalid authentication credentials.")

    def _create(self, request: Request) -> dict[str, Any]:
        from google.cloud.aiplatform_v1.types import CustomJob
        from google.protobuf.json_format import ParseError

        self._allowed(request)
        refusal = self.engine.refusal()
        if refusal == "quota":
            metric = "aiplatform.googleapis.com/custom_model_training_nvidia_l4_gpus"
            raise _refused(429, "RESOURCE_EXHAUSTED", f"The following quota metrics exceed quota limits: {metric}")
        if refusal:
            raise _refused(503, "UNAVAILABLE", "The service is currently unavailable.")
        try:
            job = CustomJob.from_json(request.raw.decode())
        except ParseError as error:
            raise _refused(400, "INVALID_ARGUMENT", str(error)) from error
        (pool,) = job.job_spec.worker_pool_specs
        container, machine = pool.container_spec, pool.machine_spec
        assert job.display_name and not job.name and pool.replica_count == 1 and len(container.env) <= 100
        for part in (*job.labels, *job.labels.values()):
            assert re.fullmatch(r"[a-z][-_a-z0-9]{0,62}", part), part
        assert not any("$" in word for word in (*container.command, *container.args))
        if (machine.accelerator_type.value == 0) != (machine.accelerator_count == 0):
            raise _refused(400, "INVALID_ARGUMENT", "an accelerator needs a type and a count")
        self.submitted.append(request.json)
        env: dict[str, str] = {}
        for one in container.env:
            env[one.name] = expanded(one.value, env)
        job.name, job.create_time = f"{PARENT}/customJobs/{next(self._numbers)}", BEGAN
        self.jobs[job.name] = job, self.engine.start(job.display_name, [*container.command, *container.args], env)
        return self._job(job.name)

    def _job(self, name: str) -> dict[str, Any]:
        from google.cloud.aiplatform_v1.types import CustomJob, JobState

        if name not in self.jobs:
            raise _refused(404, "NOT_FOUND", f"The CustomJob {name} doesn't exist.")
        job, container = self.jobs[name]
        job.start_time = BEGAN
        job.state = JobState.JOB_STATE_CANCELLING if container.stopping == "stopped" else JobState.JOB_STATE_RUNNING
        if container.ended:
            job.end_time = BEGAN + timedelta(minutes=1)
            state, error = JobState.JOB_STATE_FAILED, {}
            if container.ended == "exited":
                code = container.exit_code or 0
                state = JobState.JOB_STATE_SUCCEEDED if code == 0 else state
                words = f"The replica workerpool0-0 exited with a non-zero status of {code}."
                error = {"code": 3, "message": words} if code else {}
            elif container.ended == "stopped":
                state = JobState.JOB_STATE_CANCELLED
            elif container.ended == "expired":
                state, job.end_time = JobState.JOB_STATE_CANCELLED, BEGAN + job.job_spec.scheduling.timeout
            else:
                error = {"code": 14, "message": "The replica workerpool0-0 was preempted too often."}
            job.state, job.error = state, error
        return json.loads(CustomJob.to_json(job))

    def _shown(self, request: Request) -> dict[str, Any]:
        self._allowed(request)
        return self._job(request.groups[0])

    def _list(self, request: Request) -> dict[str, Any]:
        self._allowed(request)
        wanted = re.fullmatch(r'display_name="([^"]+)"', request.query["filter"][0])
        assert wanted is not None
        found = [name for name, (job, _) in self.jobs.items() if job.display_name == wanted[1]]
        return {"customJobs": [self._job(name) for name in found]}

    def _cancel(self, request: Request) -> dict[str, Any]:
        self._allowed(request)
        _, container = self.jobs[request.groups[0]]
        if container.ended:
            raise _refused(400, "FAILED_PRECONDITION", "The job has ended.")
        self.engine.stop(container)
        return {}

    # -- Cloud Logging -------------------------------------------------------------------------------------------------

    def _entries(self, request: Request) -> dict[str, Any]:
        self._allowed(request)
        self.reads += 1
        if self.busy_reads:
            self.busy_reads -= 1
            raise _refused(429, "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'Read requests'")
        body = request.json
        assert set(body) <= {"resourceNames", "filter", "orderBy", "pageSize", "pageToken"}
        assert body["resourceNames"] == ["projects/shop"] and body["orderBy"] == "timestamp asc"
        assert 0 < body["pageSize"] <= 1000
        parts = dict(re.split(">=|=", part, maxsplit=1) for part in body["filter"].split(" AND "))
        assert json.loads(parts.pop("resource.type")) == "ml_job"
        number, task = (json.loads(parts.pop(f"resource.labels.{key}")) for key in ("job_id", "task_name"))
        since = json.loads(parts.pop("timestamp", '""'))
        assert parts == {}
        _, container = self.jobs[f"{PARENT}/customJobs/{number}"]
        with self.engine.changed:
            lines = list(container.lines)
        told = [("service", "Waiting for the job to be provisioned."), *(("workerpool0-0", line) for line in lines)]
        found = [_entry(place, text) for place, (one, text) in enumerate(told) if one == task and _when(place) >= since]
        first = int(body.get("pageToken", 0))
        page = {"entries": found[first : first + 3]}  # short pages, so that there are several
        return {**page, "nextPageToken": str(first + 3)} if len(found) > first + 3 else page


def _when(place: int) -> str:
    return f"2026-11-01T00:00:{place % 60:02}.{place:09}Z"


def _entry(place: int, text: str) -> dict[str, Any]:
    payload = {"textPayload": text} if place % 2 else {"jsonPayload": {"message": text, "levelname": "INFO"}}
    return {"insertId": f"id-{place}", "timestamp": _when(place), "severity": "INFO", **payload}


def _refused(code: int, status: str, message: str) -> Refused:
    return Refused(code, {"error": {"code": code, "message": message, "status": status}})


@contextlib.contextmanager
def backend(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    pytest.importorskip("google.cloud.aiplatform_v1")
    vertex = Vertex(engine)
    usual = {
        "project": "shop",
        "image": "us-docker.pkg.dev/shop/images/trainer:1",
        "credentials": credentials(),
        "endpoint": vertex.service.url,
        "logging_endpoint": vertex.service.url,
    }
    try:
        yield Backend(
            engine,
            make=lambda **more: VertexExecutor(**{**usual, **more}),
            container=lambda job_id: vertex.jobs[job_id][1],
            bad_settings=[
                ({"accelerator_type": "NVIDIA_H100"}, "Did you mean 'NVIDIA_H100_80GB'"),
                ({"accelerator_type": "nvidia_l4"}, "isn't known"),
                ({"image": None}, "needs an image"),
                ({"time_limit_hours": 200.0}, "runs a job for 168 hours at most"),
                ({"credentials": credentials("old")}, "Google Cloud refuses the credentials"),
                ({"env": {f"V{n}": "" for n in range(101)}}, "takes 100 variables at most"),
                ({"max_wait_hours": 1.0, "spot": True}, "not for spot"),
            ],
            unknown=vertex.service.unknown,
            has_vault=False,
            retries_itself=True,
        )
    finally:
        vertex.service.close()
