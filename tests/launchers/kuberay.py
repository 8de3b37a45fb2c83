"""A stand-in for a cluster with KubeRay, whose entry point goes through as many hands as in one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.diloco.serverless.backends.kuberay import KubeRayExecutor
from tests.launchers.backend import Backend
from tests.launchers.engine import Engine
from tests.launchers.kubernetes_api import NAMESPACE, Cluster, Kind, Record

ADDRESS = "job-head-svc.training.svc.cluster.local:8265"


def _status(record: Record) -> dict[str, Any]:
    container = record.container
    if container is None:
        return {"jobDeploymentStatus": "Initializing", "failed": 0, "succeeded": 0}
    failed = container.starts - 1
    if not container.ended:
        return {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING", "failed": failed, "succeeded": 0}
    if container.ended == "exited" and container.exit_code == 0:
        return {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED", "failed": failed, "succeeded": 1}
    if container.ended == "stopped":
        return {"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED", "failed": failed, "succeeded": 0}
    reason, message = {
        "preempted": ("JobStatusCheckTimeoutExceeded", "the job's status could not be read for 300 s"),
        "expired": ("DeadlineExceeded", "The RayJob has passed the activeDeadlineSeconds."),
        "exited": ("AppFailed", f"Job entrypoint command failed with exit code {container.exit_code}, last logs: ..."),
    }[container.ended]
    ray = {"jobStatus": "FAILED"} if container.ended == "exited" else {}
    counts = {"failed": failed + 1, "succeeded": 0}
    return {"jobDeploymentStatus": "Failed", **ray, "reason": reason, "message": message, **counts}


def _command(manifest: dict[str, Any], command: list[str]) -> list[str]:
    spec = manifest["spec"]
    assert command == [] and spec["shutdownAfterJobFinishes"] and len(manifest["metadata"]["name"]) <= 47
    entrypoint = spec["entrypoint"].strip()
    if spec["submissionMode"] != "HTTPMode":
        # A shell in the submitter takes it apart, and `ray job submit` puts it together.
        script = "import subprocess, sys; sys.stdout.write(subprocess.list2cmdline(sys.argv[1:]))"
        submit = ["bash", "-c", f'"$0" -c "$1" {entrypoint} ;', sys.executable, script]
        entrypoint = subprocess.run(submit, capture_output=True, text=True, check=True).stdout
    return ["/bin/sh", "-c", f"exec {entrypoint}"]


def _log(record: Record, lines: Iterator[str]) -> Iterator[str]:
    yield f"Job submission server address: http://{ADDRESS}"
    yield f"Job '{record.name}-7qkzc' submitted successfully"
    yield from lines


KIND = Kind(
    *("ray.io", "v1", "rayjobs", "RayJob"),
    schema="rayjobs",
    template=lambda manifest: manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"],
    command=_command,
    status=_status,
    labels=lambda record: {"job-name": record.name, "ray.io/node-type": "head"},
    log=_log,
    env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
)


@contextlib.contextmanager
def backend(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    pytest.importorskip("kubernetes")
    pytest.importorskip("jsonschema")
    cluster = Cluster(engine, KIND)
    with tempfile.TemporaryDirectory() as folder:
        usual = {
            "kubeconfig": str(cluster.kubeconfig(Path(folder))),
            "namespace": NAMESPACE,
            "image": "registry/ray:1",
        }
        try:
            yield Backend(
                engine,
                make=lambda **more: KubeRayExecutor(**{**usual, **more}),
                container=lambda job_id: cluster.containers[job_id],
                bad_settings=[
                    ({"image": None}, "needs an image"),
                    ({"submission_mode": "K8SJobMode"}, "Did you mean 'K8sJobMode'"),
                    ({"service_account": "trainr"}, "Did you mean 'trainer'"),
                    ({"secret_name": "absent"}, "secret_name 'absent' isn't known"),
                    ({"volumes": {"/data": "checkpoint"}}, "Did you mean 'checkpoints'"),
                    ({"memory": "a lot"}, "memory"),
                ],
                unknown=cluster.service.unknown,
            )
        finally:
            cluster.service.close()
