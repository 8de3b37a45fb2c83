"""Amazon SageMaker training jobs, through `boto3`.

Facts of the service that this rests on (its model in botocore, and its documents): a job's name is unique in an account
and region, so the name is the id. An argument has at most 256 characters and no newline, there are 100 at most, a
variable has at most 512 characters; whoever may describe the job sees both, so nothing secret goes there. A job runs
for 28 days at most, and for five unless the account's quota was raised. Stopping, and the end of its time, is SIGTERM
and 120 seconds. An interrupted spot job is started again by the service, with a log stream of its own, until its
MaxWaitTime is over; without spot, a lost machine is the failure InternalServerError. CloudWatch has the output, some
seconds late, without empty lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from composer_replication.diloco.serverless.backends.aws import refusals, told
from composer_replication.diloco.serverless.backends.client import check_known, client_module, stop_if_running
from composer_replication.diloco.serverless.backends.cloudwatch import Log
from composer_replication.diloco.serverless.backends.tail import tail
from composer_replication.diloco.serverless.executor import BackendUnavailable, JobGone, QuotaExceeded
from composer_replication.diloco.serverless.handle import ENDED, ReplicaHandle, ReplicaResult
from composer_replication.diloco.serverless.jobs.encoded import encoded
from composer_replication.diloco.serverless.jobs.job import Job, Seen
from composer_replication.diloco.serverless.jobs.job_executor import JobExecutor
from composer_replication.errors import ExecutorError

__all__ = ["SageMakerExecutor"]

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
CHECKPOINTS = "/opt/ml/checkpoints"
_LONGEST_ARGUMENT, _MOST_ARGUMENTS, _LONGEST_VALUE = 256, 100, 512
_BETWEEN = {"Interrupted", "Restarting", "Starting", "Pending"}  # no container of the job runs
_RETRYABLE = re.compile(r"\s*(CapacityError|InternalServerError|ServiceUnavailable)", re.IGNORECASE)
_EXIT_CODE = re.compile(r"exit\s*code:?\s*(\d+)", re.IGNORECASE)


class SageMakerExecutor(JobExecutor):
    """Replicas as SageMaker training jobs of one instance each.

    Args:
        role_arn: the role that the jobs run as. Replicas reach the store with its permissions.
        instance_type: such as `ml.g5.xlarge` or `ml.p4d.24xlarge`.
        output_path: where the service puts what is left in /opt/ml/model, an S3 URI. It wants one in any case.
        volume_gb: of the disk at /opt/ml. Instances with disks of their own have those instead.
        spot: spare capacity, cheaper; the service interrupts it and starts it again by itself.
        max_wait_hours: with spot, how long waiting and running may take together. None: the time limit and a day.
        keep_alive_minutes: keep the machine that long for the next job (a warm pool, an hour's quota). Not with spot.
        checkpoint_uri: an S3 URI that the service keeps in step with /opt/ml/checkpoints, in a folder for each replica.
            The replica's own folder (`output`) lies there then, so that one that comes back has its checkpoints.
        subnets, security_groups: of the VPC that the jobs are in. Both or neither.
        tags: more of them, beside those that say which run and job it is.
        region, profile: those of the AWS configuration if None.
        settings: those of `JobExecutor`.

    The credentials are those that boto3 finds. The store is reached by the role: no secrets are sent.
    """

    backend_name = "sagemaker"
    default_scheme = "s3"
    extra = "sagemaker"
    longest_seconds = 28 * 24 * 3600
    name_limit = 63
    has_vault = False

    def __init__(
        self,
        *,
        role_arn: str,
        output_path: str,
        instance_type: str = "ml.g5.xlarge",
        volume_gb: int = 100,
        spot: bool = False,
        max_wait_hours: float | None = None,
        keep_alive_minutes: int = 0,
        checkpoint_uri: str | None = None,
        subnets: Sequence[str] = (),
        security_groups: Sequence[str] = (),
        tags: Mapping[str, str] | None = None,
        region: str | None = None,
        profile: str | None = None,
        image: str | None = None,
        time_limit_hours: float | None = 24.0,
        output: str | None = None,
        **settings: Any,
    ) -> None:
        output = output or (CHECKPOINTS if checkpoint_uri else None)
        super().__init__(image=image, time_limit_hours=time_limit_hours, output=output, **settings)
        if spot and keep_alive_minutes:
            raise ValueError("keep_alive_minutes: the service keeps no spot machine warm; choose one of the two")
        if max_wait_hours is not None and not spot:
            raise ValueError("max_wait_hours is for spot=True only")
        if bool(subnets) != bool(security_groups):
            raise ValueError("subnets and security_groups go together: give both or neither")
        wait = None if max_wait_hours is None else int(max_wait_hours * 3600)
        if wait is not None and wait < self.time_limit_seconds:
            raise ValueError(
                f"max_wait_hours={max_wait_hours:g} must be at least the time limit, "
                f"{self.time_limit_seconds / 3600:g} hours: it covers waiting and running"
            )
        self.role_arn, self.output_path, self.instance_type = role_arn, output_path.rstrip("/"), instance_type
        self.volume_gb, self.spot, self.keep_alive_minutes = volume_gb, spot, keep_alive_minutes
        self.max_wait_seconds = wait or self.time_limit_seconds + 24 * 3600
        self.checkpoint_uri = checkpoint_uri.rstrip("/") if checkpoint_uri else None
        self.subnets, self.security_groups = list(subnets), list(security_groups)
        self.tags = dict(tags or {})
        self.region, self.profile = region, profile

    @property
    def supports_inter_replica_network(self) -> bool:
        return bool(self.subnets)

    # -- the clients ---------------------------------------------------------------------------------------------------

    @cached_property
    def api(self) -> Any:
        return self._client("sagemaker")

    @cached_property
    def logs(self) -> Any:
        return self._client("logs")

    def _client(self, service: str) -> Any:
        boto3 = client_module("boto3", self.extra)
        config = client_module("botocore.config", self.extra).Config(
            retries={"total_max_attempts": 1},  # trying again, with pauses, is `JobExecutor`'s
            connect_timeout=20,
            read_timeout=60,
        )
        session = told(lambda: boto3.Session(region_name=self.region, profile_name=self.profile))
        return told(lambda: session.client(service, config=config))

    @cached_property
    def account(self) -> str:
        """The account that the credentials are of; without or with expired ones, an ExecutorError that says so."""
        return told(self._client("sts").get_caller_identity)["Account"]

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def check(self, job: Job) -> None:
        if not self.image:
            raise ValueError("sagemaker needs an image in ECR: 'ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG'")
        shape = self.api.meta.service_model.operation_model("CreateTrainingJob").input_shape
        known = shape.members["ResourceConfig"].members["InstanceType"].enum
        check_known("instance_type", self.instance_type, known)
        refused = refusals(self.payload(job), shape)
        if refused:
            raise ValueError(f"sagemaker would refuse the job: {'; '.join(refused)}")
        _ = self.account

    def payload(self, job: Job) -> dict[str, Any]:
        long = {name: value for name, value in job.env.items() if len(value) > _LONGEST_VALUE}
        resources: dict[str, Any] = {
            "InstanceType": self.instance_type,
            "InstanceCount": 1,
            "VolumeSizeInGB": self.volume_gb,
        }
        if self.keep_alive_minutes:
            resources["KeepAlivePeriodInSeconds"] = self.keep_alive_minutes * 60
        stopping = {"MaxRuntimeInSeconds": job.time_limit_seconds}
        if self.spot:
            stopping["MaxWaitTimeInSeconds"] = self.max_wait_seconds
        values: dict[str, Any] = {
            "TrainingJobName": job.name,
            "RoleArn": self.role_arn,
            "AlgorithmSpecification": {
                "TrainingImage": self.image,
                "TrainingInputMode": "File",
                "ContainerEntrypoint": list(job.command[:3]),  # python -m, and the module that reads the arguments
                "ContainerArguments": _arguments(job.command[3:], long),
            },
            "OutputDataConfig": {"S3OutputPath": self.output_path},
            "ResourceConfig": resources,
            "StoppingCondition": stopping,
            "EnableManagedSpotTraining": self.spot,
            "Environment": {name: value for name, value in job.env.items() if name not in long},
            "Tags": [{"Key": key, "Value": value} for key, value in {**self.tags, **job.labels}.items()],
        }
        if self.checkpoint_uri:
            values["CheckpointConfig"] = {"S3Uri": self._folder(job.run, job.replica), "LocalPath": CHECKPOINTS}
        if self.subnets:
            values["VpcConfig"] = {"Subnets": self.subnets, "SecurityGroupIds": self.security_groups}
        return values

    def submit_job(self, job: Job) -> str:
        values = self.payload(job)
        try:
            told(lambda: self.api.create_training_job(**values))
        except ExecutorError as error:
            if "ResourceInUse" not in str(error):
                raise
            # Another launcher was quicker, or an answer was lost: the name says that it is this very job.
        return job.name

    def find_job(self, job: Job) -> str | None:
        return job.name if self._describe(job.name) else None

    def _present(self, job_id: str) -> dict[str, Any]:
        info = self._describe(job_id)
        if not info:
            raise JobGone(f"sagemaker has no job {job_id!r}: was it deleted, or is it another region's?")
        return info

    def _describe(self, name: str) -> dict[str, Any]:
        """What the service says of a job; nothing if it has none of this name."""
        try:
            return told(lambda: self.api.describe_training_job(TrainingJobName=name))
        except (BackendUnavailable, QuotaExceeded) as error:
            raise BackendUnavailable(str(error)) from error  # too many questions: ask later
        except ExecutorError as error:
            if "not found" in str(error) or "ResourceNotFound" in str(error):
                return {}
            raise

    def look(self, job_id: str) -> Seen:
        info = self._present(job_id)
        status, detail = info["TrainingJobStatus"], info["SecondaryStatus"]
        why = info.get("FailureReason", "")
        code = _EXIT_CODE.search(why)
        state = _state(status, detail, why)
        region = self.api.meta.region_name
        return Seen(
            state,
            f"{status}/{detail}",
            why or _REASONS.get(detail, ""),
            exit_code=int(code.group(1)) if code and state in ("failed", "preempted") else None,
            attempt=_starts(info.get("SecondaryStatusTransitions", [])),
            will_retry=state == "preempted" and status == "InProgress",
            timed_out=detail == "MaxRuntimeExceeded",
            log_url=f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}#/jobs/{job_id}",
        )

    def stop_job(self, job_id: str) -> None:
        stop_if_running(
            lambda: told(lambda: self.api.stop_training_job(TrainingJobName=job_id)),
            lambda: self._present(job_id)["TrainingJobStatus"] == "InProgress",
        )

    def follow(self, job_id: str) -> Iterator[str]:
        log = Log(self.logs, LOG_GROUP, f"{job_id}/")  # a stream for each start

        def ended() -> bool:
            seen = self.look(job_id)
            return seen.state in ENDED and not seen.will_retry

        return tail(job_id, log.new_lines, ended, lambda: self.sleep(self.log_pause_seconds))

    def _result(self, handle: ReplicaHandle) -> ReplicaResult:
        result = super()._result(handle)
        inside, kept = f"file://{CHECKPOINTS}", result.final_checkpoint_uri
        if self.checkpoint_uri and kept and kept.startswith(inside):  # as the service has copied it
            folder = self._folder(handle.name.rpartition("-r")[0], handle.replica_id)
            return replace(result, final_checkpoint_uri=folder + kept.removeprefix(inside))
        return result

    def _folder(self, run: str, replica: int) -> str:
        return f"{self.checkpoint_uri}/{run}/replica-{replica}"


_REASONS = {
    "Interrupted": "its spot machine was taken; the service starts it again",
    "MaxWaitTimeExceeded": "no spot machine was to be had within the time that it may wait",
}


def _state(status: str, detail: str, why: str) -> str:
    if status == "InProgress":
        if detail in ("Interrupted", "Restarting"):
            return "preempted"
        return "running" if detail in ("Training", "Uploading", "Updating") else "pending"
    if status == "Failed":
        return "preempted" if _RETRYABLE.match(why) else "failed"
    if status == "Stopped" and detail == "MaxWaitTimeExceeded":
        return "preempted"
    return {"Completed": "completed", "Stopping": "running"}.get(status, "cancelled")


def _starts(transitions: Sequence[Mapping[str, Any]]) -> int:
    """How often a container of the job was started."""
    starts, between = 0, True
    for one in transitions:
        if one["Status"] in _BETWEEN:
            between = True
        elif one["Status"] == "Training" and between:
            starts, between = starts + 1, False
    return max(1, starts)


def _arguments(words: Sequence[str], long: Mapping[str, str]) -> list[str]:
    """The container module's arguments, as they are if the service takes them. `long` variables are among them."""
    words = [*(f"--variable={name}={value}" for name, value in long.items()), *words]
    plain = all(re.fullmatch(rf"[ -~]{{1,{_LONGEST_ARGUMENT}}}", word) for word in words)
    return words if plain and len(words) <= _MOST_ARGUMENTS else encoded(words, _LONGEST_ARGUMENT)
