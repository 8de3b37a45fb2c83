"""A stand-in for Azure ML: Azure's resource manager, a workspace's run history and its files, with containers of an
`Engine`.

Bodies and answers are checked with the models that the client itself is made of: a field that they don't know is an
error. It speaks HTTPS, as Azure's clients send no token over anything else.
"""

from __future__ import annotations

import contextlib
import datetime
import ssl
import time
from collections.abc import Iterator
from typing import Any

import pytest

from composer_replication.diloco.serverless.backends.azure_ml import AzureMLExecutor
from tests.launchers.azure_models import certificate, faults
from tests.launchers.backend import Backend
from tests.launchers.engine import Container, Engine
from tests.launchers.http import Refused, Reply, Request, Service

TOKEN = "a-token-of-the-tests"
SUBSCRIPTION = "11111111-2222-3333-4444-555555555555"
PLACE = (
    f"/subscriptions/{SUBSCRIPTION}/resourceGroups/group/providers/Microsoft.MachineLearningServices/workspaces/space"
)
STARTED = datetime.datetime(2026, 11, 1, tzinfo=datetime.timezone.utc)
SIZES = ("Standard_DS3_v2", "Standard_NC24ads_A100_v4", "Standard_ND96isr_H100_v5")


class Credential:
    """Signs in whoever asks; `problem` is raised instead."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.problem = problem

    def get_token(self, *scopes: str, **options: Any) -> Any:
        from azure.core.credentials import AccessToken

        if self.problem is not None:
            raise self.problem
        assert scopes == ("https://management.azure.com/.default",), scopes
        return AccessToken(TOKEN, int(time.time()) + 3600)


class AzureJob:
    """Each look moves it one status on, so that every one of them is seen by somebody."""

    def __init__(self, name: str, body: dict[str, Any], container: Container) -> None:
        self.name, self.body, self.container = name, body, container
        self.looks = 0
        self.force: str | None = None  # for tests: a status
        self.error: dict[str, Any] | None = None  # and what the run history says of it

    def statuses(self) -> list[str]:
        done = ["NotStarted", "Queued", "Preparing", "Running"]
        done += ["Queued", "Running"] * (self.container.starts - 1)
        how, code = self.container.ended, self.container.exit_code
        if not how:
            return [*done, "CancelRequested"] if self.container.stopping == "stopped" else done
        if how == "exited":
            return [*done, "Finalizing", "Completed" if code == 0 else "Failed"]
        return [*done, "Failed" if how == "preempted" else "Canceled"]

    def status(self, *, look: bool = False) -> str:
        statuses = self.statuses()
        self.looks = min(self.looks + look, len(statuses))
        return self.force or statuses[max(0, self.looks - 1)]

    def resource(self, url: str) -> dict[str, Any]:
        studio = {"endpoint": f"https://ml.azure.com/runs/{self.name}", "jobServiceType": "Studio"}
        properties = {**self.body["properties"], "status": self.status(look=True), "services": {"Studio": studio}}
        return {"id": f"{PLACE}/jobs/{self.name}", "name": self.name, "type": "x/jobs", "properties": properties}

    def details(self, url: str) -> dict[str, Any]:
        import isodate

        status, ended = self.status(), self.container.ended
        values: dict[str, Any] = {"runId": self.name, "status": status, "logFiles": {}}
        if self.looks >= 4:  # it has run
            values["startTimeUtc"] = STARTED.isoformat().replace("+00:00", "Z")
            values["logFiles"] = {
                "user_logs/std_log.txt": f"{url}/files/{self.name}?sig=a-signature",
                "system_logs/lifecycler/execution-wrapper.log": f"{url}/files/other?sig=x",
            }
        if ended and status in ("Failed", "Canceled", "Completed"):
            limit = isodate.parse_duration(self.body["properties"]["limits"]["timeout"])
            end = STARTED + (limit if ended == "expired" else datetime.timedelta(seconds=5))
            values["endTimeUtc"] = end.strftime("%Y-%m-%dT%H:%M:%S.1234567+00:00")
            if status == "Failed" and ended == "preempted":
                values["error"] = {"error": {"code": "ServiceError", "message": "The node was lost."}}
            elif status == "Failed":
                code = self.container.exit_code
                why = f"Execution failed. Process exited with status code {code}. Please check log file for details."
                values["error"] = {"error": {"code": "UserError", "message": why}}
        if self.error is not None:
            values["error"] = {"error": self.error}
        return values

    def file(self) -> bytes:
        """The output of its last start; without the last newline if it was killed."""
        lines = self.container.lines[self.container.begins[-1] :]
        return "\n".join(lines if self.container.ended == "preempted" or not lines else [*lines, ""]).encode()


class Azure:
    def __init__(self, engine: Engine) -> None:
        from azure.ai.ml._restclient.arm_ml_service import models
        from azure.ai.ml._restclient.runhistory import models as history

        self._models, self._history = models, history
        self.engine = engine
        self.jobs: dict[str, AzureJob] = {}
        self.environments: dict[str, dict[str, Any]] = {}
        self.submitted: list[dict[str, Any]] = []
        self.throttled = 0  # how many reads to refuse
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate())
        job, sizes = rf"{PLACE}/jobs/([\w-]+)", f"/subscriptions/{SUBSCRIPTION}/providers/"
        sizes += "Microsoft.MachineLearningServices/locations/westeurope/vmSizes"
        arm, plain = self._signed_in, self._guarded
        self.service = Service(
            [
                ("GET", rf"{PLACE.rpartition('/')[0]}/([\w-]+)", arm(self._workspace)),
                ("GET", "/discovery", plain(lambda r: {"api": self.service.url})),
                ("GET", f"{PLACE}/computes", arm(self._computes)),
                ("GET", sizes, arm(self._sizes)),
                ("PUT", rf"{PLACE}/environments/([\w-]+)/versions/([\w-]+)", arm(self._environment)),
                ("PUT", job, arm(self._submit)),
                ("GET", job, arm(lambda r: self._job(r).resource(self.service.url))),
                ("POST", f"{job}/cancel", arm(self._cancel)),
                ("GET", rf"/history/v1.0{PLACE}/runs/([\w-]+)/details", arm(self._details)),
                ("GET", r"/files/([\w-]+)", plain(self._file)),
            ],
            context,
        )

    def _guarded(self, answer: Any) -> Any:
        def guarded(request: Request) -> Any:
            try:
                return answer(request)
            except Refused:
                raise
            except Exception as problem:
                self.service.unknown.append(repr(problem))
                raise self._error(400, "Fault", repr(problem)) from problem

        return guarded

    def _signed_in(self, answer: Any) -> Any:
        def signed_in(request: Request) -> Any:
            if request.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise self._error(401, "InvalidAuthenticationToken", "The access token is invalid.")
            if request.query.get("api-version") is None:
                raise self._error(400, "MissingApiVersionParameter", "The api-version query parameter is required.")
            return answer(request)

        return self._guarded(signed_in)

    @staticmethod
    def _error(status: int, code: str, message: str) -> Refused:
        return Refused(status, {"error": {"code": code, "message": message}})

    def _check(self, value: Any, kind: Any, models: Any) -> None:
        problems = list(faults(value, kind, models, kind.__name__))
        if problems:
            self.service.unknown += problems
            raise self._error(400, "UserError", "; ".join(problems))

    # -- the workspace -------------------------------------------------------------------------------------------------

    def _workspace(self, request: Request) -> dict[str, Any]:
        if request.path != PLACE:
            raise self._error(404, "ResourceNotFound", f"The Resource '{request.groups[0]}' was not found.")
        properties = {"discoveryUrl": f"{self.service.url}/discovery", "workspaceId": SUBSCRIPTION}
        return {"id": PLACE, "name": "space", "location": "westeurope", "properties": properties}

    def _computes(self, request: Request) -> dict[str, Any]:
        properties = {"computeType": "AmlCompute", "properties": {"vmSize": SIZES[1]}}
        return {"value": [{"id": f"{PLACE}/computes/gpus", "name": "gpus", "properties": properties}]}

    def _sizes(self, request: Request) -> dict[str, Any]:
        return {"value": [{"name": name, "supportedComputeTypes": ["AmlCompute"]} for name in SIZES]}

    def _environment(self, request: Request) -> dict[str, Any]:
        body, path = request.json, request.path
        self._check(body, self._models.EnvironmentVersion, self._models)
        self.environments[path] = body
        return {**body, "id": path, "name": request.groups[1], "type": "x/environments/versions"}

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _submit(self, request: Request) -> Any:
        refusal = self.engine.refusal()
        if refusal == "quota":
            raise self._error(429, "TooManyRequests", "refused for the test: quota")
        if refusal:
            raise self._error(503, "ServiceUnavailable", f"refused for the test: {refusal}")
        name, body = request.groups[0], request.json
        self._check(body, self._models.JobBase, self._models)
        properties = body["properties"]
        if name in self.jobs:
            raise self._error(400, "UserError", "A job with this name already exists.")
        if ("computeId" in properties) == ("instanceType" in properties.get("resources", {})):
            raise self._error(400, "UserError", "One of a compute target and an instance type is needed.")
        if "${{" in properties["command"]:
            raise self._error(400, "UserError", "An expression that isn't known.")
        environment = properties["environmentId"]
        if environment not in self.environments and not environment.endswith("/environments/torch/versions/3"):
            raise self._error(404, "UserError", f"No environment {environment}.")
        self.submitted.append(body)
        shell = ["bash", "-c", properties["command"]]
        container = self.engine.start(name, ["python", "-c", _EXEC, *shell], properties["environmentVariables"])
        self.jobs[name] = AzureJob(name, body, container)
        return Reply(self.jobs[name].resource(self.service.url), 201)

    def _job(self, request: Request) -> AzureJob:
        if request.groups[0] not in self.jobs:
            raise self._error(404, "UserError", f"Job {request.groups[0]} was not found.")
        return self.jobs[request.groups[0]]

    def _cancel(self, request: Request) -> Any:
        job = self._job(request)
        if job.container.ended:
            raise self._error(400, "UserError", "The job is in a final state.")
        self.engine.stop(job.container)
        return Reply(b"", 202)

    def _details(self, request: Request) -> dict[str, Any]:
        if self.throttled:
            self.throttled -= 1
            raise self._error(429, "TooManyRequests", "slow down")
        values = self._job(request).details(self.service.url)
        self._check(values, self._history.RunDetails, self._history)
        return values

    def _file(self, request: Request) -> Reply:
        if request.headers.get("Authorization") or request.query.get("sig") != ["a-signature"]:
            self.service.unknown.append("a token was sent to the storage, or no signature")
            raise self._error(403, "AuthenticationFailed", "no")
        data = self._job(request).file()
        begin, end = map(int, request.headers["x-ms-range"].removeprefix("bytes=").split("-"))
        born = {"x-ms-creation-time": f"start {self._job(request).container.starts}"}
        if begin >= len(data):
            return Reply(b"", 416, {**born, "Content-Range": f"bytes */{len(data)}"})
        part = data[begin : min(end + 1, begin + 50)]  # less than asked for, as a service may
        return Reply(part, 206, {**born, "Content-Range": f"bytes {begin}-{begin + len(part) - 1}/{len(data)}"})


_EXEC = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"  # the shell is the container's first process


@contextlib.contextmanager
def backend(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    with served(engine, monkeypatch) as (_, made):
        yield made


@contextlib.contextmanager
def served(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Azure, Backend]]:
    pytest.importorskip("azure.ai.ml")
    azure = Azure(engine)
    monkeypatch.setenv("AZUREML_DEV_URL_MFE", azure.service.url)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", certificate()[0])
    usual = {
        "subscription_id": SUBSCRIPTION,
        "resource_group": "group",
        "workspace": "space",
        "instance_type": "Standard_NC24ads_A100_v4",
        "tier": "spot",
        "image": "registry.azurecr.io/replica:1",
        "credential": Credential(),
    }
    made = Backend(
        engine,
        make=lambda **more: AzureMLExecutor(**{**usual, **more}),
        container=lambda job_id: azure.jobs[job_id].container,
        bad_settings=[
            ({"instance_type": "Standard_NC24ads_A10_v4"}, "Did you mean 'Standard_NC24ads_A100_v4'"),
            ({"instance_type": None, "tier": None, "compute": "gpu"}, "compute 'gpu' isn't known. Did you mean 'gpus'"),
            ({"image": None}, "needs an image"),
            ({"time_limit_hours": 505.0}, "runs a job for 504 hours at most"),
            ({"time_limit_hours": 200.0}, "spot machines for 168 hours at most"),
            ({"environment": "torch:3"}, "one of image and environment"),
            ({"image": None, "environment": "torch@latest"}, "must be NAME:VERSION"),
            ({"tier": "sport"}, "Did you mean 'spot'"),
        ],
        unknown=azure.service.unknown,
        has_vault=False,
        retries_itself=True,
    )
    try:
        yield azure, made
    finally:
        azure.service.close()
