"""A stand-in for a cluster with Volcano."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.diloco.serverless.backends.volcano import VolcanoExecutor
from tests.launchers.backend import Backend
from tests.launchers.engine import Engine
from tests.launchers.kubernetes_api import NAMESPACE, Cluster, Kind, Record


def _status(record: Record) -> dict[str, Any]:
    container = record.container
    if container is None:
        return {"state": {"phase": "Pending"}}
    phase = "Running"
    if container.ended:
        phase = "Completed" if container.ended == "exited" and container.exit_code == 0 else "Failed"
    if record.deleting:
        phase = "Terminating"
    return {"state": {"phase": phase}, "retryCount": container.starts - 1, "minAvailable": 1}


def _command(manifest: dict[str, Any], command: list[str]) -> list[str]:
    spec = manifest["spec"]
    (task,) = spec["tasks"]
    # Anything else would place the replicas together, or not start them again.
    assert spec["minAvailable"] == task["replicas"] == 1 and spec["schedulerName"] == "volcano"
    assert task["template"]["spec"]["restartPolicy"] == "Never"
    return command


KIND = Kind(
    *("batch.volcano.sh", "v1alpha1", "jobs", "Job"),
    schema="volcano_jobs",
    template=lambda manifest: manifest["spec"]["tasks"][0]["template"],
    command=_command,
    status=_status,
    labels=lambda record: {"volcano.sh/job-name": record.name},
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
            "image": "registry/image:1",
        }
        try:
            yield Backend(
                engine,
                make=lambda **more: VolcanoExecutor(**{**usual, **more}),
                container=lambda job_id: cluster.containers[job_id],
                bad_settings=[
                    ({"image": None}, "needs an image"),
                    ({"queue": "reserch"}, "queue 'reserch' isn't known. Did you mean 'research'"),
                    ({"namespace": "trainin"}, "namespace 'trainin' isn't known. Did you mean"),
                    ({"gpu_resource": "nvidia.com/gpus"}, "Did you mean 'nvidia.com/gpu'"),
                    ({"priority_class": "hihg"}, "Did you mean 'high'"),
                    ({"kubeconfig": "/nowhere"}, "no way to a Kubernetes cluster through /nowhere"),
                    ({"context": "elsewhere"}, "context 'elsewhere'"),
                    ({"time_limit_hours": 9000.0}, "runs a job for 8760 hours at most"),
                    ({"run_name": "x" * 200, "memory": "a lot"}, "memory"),
                ],
                unknown=cluster.service.unknown,
                retries_itself=True,
            )
        finally:
            cluster.service.close()
