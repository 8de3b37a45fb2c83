"""A stand-in for SageMaker's training jobs, their logs in CloudWatch, and STS, with containers of an `Engine`.

Each request is checked with the services' own models, and each answer, too: what they don't know is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from composer_replication.diloco.serverless.backends.sagemaker import LOG_GROUP, SageMakerExecutor
from tests.launchers.aws_models import faults, models
from tests.launchers.backend import Backend
from tests.launchers.engine import Container, Engine
from tests.launchers.http import Refused, Request, Service

KEY = "AKIATESTSTESTSTESTS0"
ROLE = "arn:aws:iam::123456789012:role/replicas"
PAGE = 3  # lines


def error(code: str, message: str, status: int = 400) -> Refused:
    return Refused(status, {"__type": code, "message": message})


class TrainingJob:
    """One job. Each look moves it one status on, so that every one of them is seen by somebody."""

    def __init__(self, body: dict[str, Any], container: Container) -> None:
        self.body, self.container = body, container
        self.spot = bool(body.get("EnableManagedSpotTraining"))
        self.looks = 0
        self.force: tuple[str, str, str] | None = None  # for tests: status, secondary status, reason

    def statuses(self) -> list[str]:
        done = ["Starting", "Pending", "Downloading", "Training"]
        done += ["Interrupted", "Starting", "Training"] * (self.container.starts - 1)
        if self.container.ended:
            return [*done, *self._end()[3]]
        return [*done, "Stopping"] if self.container.stopping else done

    def _end(self) -> tuple[str, str, str, list[str]]:
        how, code = self.container.ended, self.container.exit_code
        if how == "exited" and code == 0:
            return "Completed", "Completed", "", ["Uploading", "Completed"]
        if how == "exited":
            status = code if code is not None and code >= 0 else 128 - (code or 0)
            return "Failed", "Failed", f"AlgorithmError: , exit code: {status}", ["Failed"]
        if how == "preempted" and self.spot:
            return "Stopped", "MaxWaitTimeExceeded", "", ["Interrupted", "MaxWaitTimeExceeded"]
        if how == "preempted":
            why = "InternalServerError: We encountered an internal error. Please try again."
            return "Failed", "Failed", why, ["Failed"]
        detail = "MaxRuntimeExceeded" if how == "expired" else "Stopped"
        return "Stopped", detail, "", ["Stopping", detail]

    def description(self) -> dict[str, Any]:
        statuses = self.statuses()
        self.looks = min(self.looks + 1, len(statuses))
        seen = statuses[: self.looks]
        status, detail, why = "InProgress", seen[-1], ""
        if detail == "Stopping":
            status = "Stopping"
        if self.container.ended and self.looks == len(statuses):
            status, detail, why, _ = self._end()
        if self.force is not None:
            status, detail, why = self.force
            seen = [*seen, detail]
        kept = {k: v for k, v in self.body.items() if k != "Tags"}
        return {
            **kept,
            "TrainingJobArn": f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{self.body['TrainingJobName']}",
            "ModelArtifacts": {"S3ModelArtifacts": self.body["OutputDataConfig"]["S3OutputPath"]},
            "TrainingJobStatus": status,
            "SecondaryStatus": detail,
            **({"FailureReason": why} if why else {}),
            "CreationTime": 1793491200.0,
            "SecondaryStatusTransitions": [
                {"Status": one, "StartTime": 1793491200.0 + number} for number, one in enumerate(seen)
            ],
        }


class AWS:
    def __init__(self, engine: Engine) -> None:
        from botocore.validate import ParamValidator

        self.engine = engine
        self.jobs: dict[str, TrainingJob] = {}
        self.submitted: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.throttled = 0  # how many reads of the logs to refuse
        self._known: dict[str, int] = {}  # lines of a stream that the logs have got by now
        self._models = models()
        self._validate = ParamValidator().validate
        self.service = Service([("POST", "/", self._answer)])

    def _answer(self, request: Request) -> Any:
        try:
            return self._answered(request)
        except Refused:
            raise
        except Exception as problem:  # a fault of the stand-in, or a request that it can't make sense of
            self.service.unknown.append(repr(problem))
            raise error("ValidationException", repr(problem)) from problem

    def _answered(self, request: Request) -> Any:
        signed = request.headers.get("Authorization", "")
        prefix, _, operation = request.headers.get("X-Amz-Target", "").partition(".")
        if not prefix:
            return self._sts(request, signed)
        if f"Credential={KEY}/" not in signed:
            raise error("UnrecognizedClientException", "The security token included in the request is invalid.")
        self.calls.append(operation)
        handler = getattr(self, f"do_{operation}", None)
        if handler is None:
            self.service.unknown.append(operation)
            raise error("UnknownOperationException", operation)
        model = self._models[prefix].operation_model(operation)
        body = request.json
        self._check(body, model.input_shape)
        answer = handler(body)
        if model.output_shape is not None:
            self._check(answer, model.output_shape)
        return answer

    def _check(self, body: dict[str, Any], shape: Any) -> None:
        report = self._validate(body, shape)
        problems = [report.generate_report()] if report.has_errors() else list(faults(body, shape, shape.name))
        if problems:
            self.service.unknown.append(f"{shape.name}: {problems}")
            raise error("ValidationException", "; ".join(problems))

    def _sts(self, request: Request, signed: str) -> bytes:
        if request.raw != b"Action=GetCallerIdentity&Version=2011-06-15":
            self.service.unknown.append(request.raw.decode())
        if f"Credential={KEY}/" not in signed:
            code = "ExpiredToken" if "Credential=ASIAEXPIRED" in signed else "InvalidClientTokenId"
            words = f"<Error><Type>Sender</Type><Code>{code}</Code><Message>The token isn't valid</Message></Error>"
            raise Refused(403, f"<ErrorResponse>{words}<RequestId>1</RequestId></ErrorResponse>".encode())
        who = "<Arn>arn:aws:iam::123456789012:user/me</Arn><UserId>AIDA</UserId><Account>123456789012</Account>"
        inner = f"<GetCallerIdentityResult>{who}</GetCallerIdentityResult>"
        space = "https://sts.amazonaws.com/doc/2011-06-15/"
        return f'<GetCallerIdentityResponse xmlns="{space}">{inner}</GetCallerIdentityResponse>'.encode()

    # -- SageMaker -----------------------------------------------------------------------------------------------------

    def do_CreateTrainingJob(self, body: dict[str, Any]) -> dict[str, Any]:
        refusal = self.engine.refusal()
        if refusal == "quota":
            raise error("ResourceLimitExceeded", "The account-level service limit is 1 Instances. refused for the test")
        if refusal:
            raise error("ServiceUnavailable", f"refused for the test: {refusal}", 503)
        name, stopping = body["TrainingJobName"], body["StoppingCondition"]
        spot, resources = body.get("EnableManagedSpotTraining", False), body["ResourceConfig"]
        if name in self.jobs:
            raise error("ResourceInUse", "Training job names must be unique within an AWS account and region")
        if stopping["MaxRuntimeInSeconds"] > 28 * 86400:
            raise error("ValidationException", "MaxRuntimeInSeconds is over 28 days")
        if spot != ("MaxWaitTimeInSeconds" in stopping):
            raise error("ValidationException", "MaxWaitTimeInSeconds goes with spot training")
        if spot and stopping["MaxWaitTimeInSeconds"] < stopping["MaxRuntimeInSeconds"]:
            raise error("ValidationException", "MaxWaitTimeInSeconds must be at least MaxRuntimeInSeconds")
        if spot and resources.get("KeepAlivePeriodInSeconds"):
            raise error("ValidationException", "Warm pools aren't for spot training")
        algorithm = body["AlgorithmSpecification"]
        command = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
        self.submitted.append(body)
        self.jobs[name] = TrainingJob(body, self.engine.start(name, command, body["Environment"]))
        return {"TrainingJobArn": f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{name}"}

    def _job(self, body: dict[str, Any]) -> TrainingJob:
        if body["TrainingJobName"] not in self.jobs:
            raise error("ValidationException", "Requested resource not found.")
        return self.jobs[body["TrainingJobName"]]

    def do_DescribeTrainingJob(self, body: dict[str, Any]) -> dict[str, Any]:
        return self._job(body).description()

    def do_StopTrainingJob(self, body: dict[str, Any]) -> dict[str, Any]:
        job = self._job(body)
        if job.container.ended:
            raise error(
                "ValidationException", "The request was rejected because the training job is in status Stopped."
            )
        self.engine.stop(job.container)
        return {}

    # -- CloudWatch Logs -----------------------------------------------------------------------------------------------

    def _expect(self, true: bool, what: str) -> None:
        if not true:
            self.service.unknown.append(f"{what} is wrong")
            raise error("InvalidParameterException", f"{what} is wrong")

    def _slow_down(self) -> None:
        if self.throttled:
            self.throttled -= 1
            raise error("ThrottlingException", "Rate exceeded")

    def do_DescribeLogStreams(self, body: dict[str, Any]) -> dict[str, Any]:
        self._slow_down()
        self._expect(body["logGroupName"] == LOG_GROUP, "the log group")
        found = []
        for name, job in self.jobs.items():
            for number, lines in enumerate(self._streams(job.container)):
                stream = f"{name}/algo-1-{1793491200 + number}"
                shown = self._known.get(f"{stream}+", 0)
                self._known[stream], self._known[f"{stream}+"] = shown, len(lines)  # one look late, as it is
                if shown and stream.startswith(body["logStreamNamePrefix"]):
                    found.append({"logStreamName": stream, "creationTime": 1793491200000 + number})
        if not any(self._known.values()):
            raise error("ResourceNotFoundException", "The specified log group does not exist.")
        found.sort(key=lambda one: one["logStreamName"], reverse=True)  # in no order that one could rely on
        begin = int(body.get("nextToken", "0"))
        page: dict[str, Any] = {"logStreams": found[begin : begin + 1]}
        return {**page, "nextToken": str(begin + 1)} if begin + 1 < len(found) else page

    @staticmethod
    def _streams(container: Container) -> list[list[str]]:
        ends = [*container.begins[1:], None]
        return [list(container.lines[a:b]) for a, b in zip(container.begins, ends, strict=True)]

    def do_GetLogEvents(self, body: dict[str, Any]) -> dict[str, Any]:
        self._slow_down()
        self._expect(body["logGroupName"] == LOG_GROUP and body["startFromHead"] is True, "the place in the log")
        stream = body["logStreamName"]
        name, _, which = stream.partition("/algo-1-")
        lines = self._streams(self.jobs[name].container)[int(which) - 1793491200][: self._known[stream]]
        begin = int(body.get("nextToken", "f/0").removeprefix("f/"))
        end = min(begin + PAGE, len(lines))
        events = [{"timestamp": 1793491200000, "message": line} for line in lines[begin:end] if line]
        return {"events": events, "nextForwardToken": f"f/{end}", "nextBackwardToken": f"b/{begin}"}


@contextlib.contextmanager
def backend(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    with served(engine, monkeypatch) as (_, made):
        yield made


@contextlib.contextmanager
def served(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AWS, Backend]]:
    pytest.importorskip("boto3")
    aws = AWS(engine)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    for service in ("SAGEMAKER", "CLOUDWATCH_LOGS", "STS"):
        monkeypatch.setenv(f"AWS_ENDPOINT_URL_{service}", aws.service.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-key-of-the-tests")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere/config")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere/credentials")
    usual = {
        "role_arn": ROLE,
        "output_path": "s3://bucket/out",
        "instance_type": "ml.g5.xlarge",
        "region": "us-east-1",
        "image": "123456789012.dkr.ecr.us-east-1.amazonaws.com/replica:1",
        "spot": True,
    }
    made = Backend(
        engine,
        make=lambda **more: SageMakerExecutor(**{**usual, **more}),
        container=lambda job_id: aws.jobs[job_id].container,
        bad_settings=[
            ({"instance_type": "ml.g5.xlrge"}, "Did you mean 'ml.g5.xlarge'"),
            ({"image": None}, "needs an image"),
            ({"time_limit_hours": 673.0}, "runs a job for 672 hours at most"),
            ({"role_arn": "replicas"}, "RoleArn 'replicas' isn't of the form"),
            ({"region": None}, "region: none is given"),
        ],
        unknown=aws.service.unknown,
        has_vault=False,
        retries_itself=True,
    )
    try:
        yield aws, made
    finally:
        aws.service.close()
