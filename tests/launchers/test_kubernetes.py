"""Volcano and KubeRay without a cluster: exact manifests, published schemas, settings."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("kubernetes")
pytest.importorskip("jsonschema")

from composer_replication.diloco.serverless.backends.kuberay import KubeRayExecutor
from composer_replication.diloco.serverless.backends.volcano import K8sExecutor, VolcanoExecutor
from composer_replication.diloco.serverless.jobs.encoded import decoded
from composer_replication.diloco.serverless.jobs.job import Job
from tests.launchers import kuberay, volcano
from tests.launchers.kubernetes_api import NAMESPACE
from tests.launchers.kubernetes_schema import problems

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning")]

KINDS = {"volcano": (volcano.KIND, VolcanoExecutor), "kuberay": (kuberay.KIND, KubeRayExecutor)}
FULL: dict[str, Any] = {
    "namespace": NAMESPACE,
    "image": "registry/image:1",
    "gpus": 8,
    "cpus": 16,
    "memory": "200Gi",
    "shm": "16Gi",
    "node_selector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "service_account": "trainer",
    "secret_name": "store",
    "image_pull_secrets": ["registry"],
    "volumes": {"/checkpoints": "checkpoints", "/cache": {"emptyDir": {"sizeLimit": "100Gi"}}},
    "time_limit_hours": 2.0,
}
JOB = Job(
    name="run-0123abcd-r1-0",
    run="run-0123abcd",
    replica=1,
    submission=0,
    command=("python", "-m", "container", "--job=run-0123abcd-r1-0", "--", "python", "-c", "print('$HOME')"),
    env={"PRICE": "5$"},
    secrets={"API_TOKEN": "s3cr3t"},
    time_limit_seconds=7200,
)


# -- manifests ---------------------------------------------------------------------------------------------------------

LABELS = {"composer-replication-run": "run-0123abcd", "composer-replication-job": "run-0123abcd-r1-0"}
CONTAINER = {
    "name": "replica",
    "image": "registry/image:1",
    "env": [
        {"name": "PRICE", "value": "5$$"},
        {"name": "API_TOKEN", "valueFrom": {"secretKeyRef": {"name": "run-0123abcd-r1-0", "key": "API_TOKEN"}}},
    ],
    "envFrom": [{"secretRef": {"name": "store"}}],
    "resources": {
        "requests": {"cpu": "16", "memory": "200Gi"},
        "limits": {"memory": "200Gi", "nvidia.com/gpu": "8"},
    },
    "volumeMounts": [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "volume-0", "mountPath": "/checkpoints"},
        {"name": "volume-1", "mountPath": "/cache"},
    ],
}
POD = {
    "terminationGracePeriodSeconds": 120,
    "volumes": [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}},
        {"name": "volume-0", "persistentVolumeClaim": {"claimName": "checkpoints"}},
        {"name": "volume-1", "emptyDir": {"sizeLimit": "100Gi"}},
    ],
    "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "serviceAccountName": "trainer",
    "imagePullSecrets": [{"name": "registry"}],
}


def test_the_manifest_of_a_volcano_job() -> None:
    executor = VolcanoExecutor(queue="research", priority_class="high", max_retry=2, keep_seconds=3600, **FULL)
    command = ["python", "-m", "container", "--job=run-0123abcd-r1-0", "--", "python", "-c", "print('$$HOME')"]
    assert executor.payload(JOB) == {
        "apiVersion": "batch.volcano.sh/v1alpha1",
        "kind": "Job",
        "metadata": {"name": "run-0123abcd-r1-0", "namespace": NAMESPACE, "labels": LABELS},
        "spec": {
            "schedulerName": "volcano",
            "queue": "research",
            "priorityClassName": "high",
            "minAvailable": 1,
            "maxRetry": 2,
            "ttlSecondsAfterFinished": 3600,
            "policies": [{"event": "PodEvicted", "action": "RestartTask"}],
            "tasks": [
                {
                    "name": "replica",
                    "replicas": 1,
                    "template": {
                        "metadata": {"labels": LABELS},
                        "spec": {
                            "restartPolicy": "Never",
                            "activeDeadlineSeconds": 7200,
                            "priorityClassName": "high",
                            "containers": [{**CONTAINER, "command": command}],
                            **POD,
                        },
                    },
                }
            ],
        },
    }


def test_the_manifest_of_a_ray_job() -> None:
    executor = KubeRayExecutor(submission_mode="SidecarMode", backoff_limit=2, ray_version="2.50.0", **FULL)
    manifest = executor.payload(JOB)
    entrypoint = manifest["spec"].pop("entrypoint").split(" ")
    assert entrypoint[:3] == ["python", "-m", "container"] and decoded(entrypoint[3:]) == list(JOB.command[3:])
    env = [*CONTAINER["env"], {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "120"}]  # type: ignore[misc]
    assert manifest == {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": "run-0123abcd-r1-0", "namespace": NAMESPACE, "labels": LABELS},
        "spec": {
            "submissionMode": "SidecarMode",
            "shutdownAfterJobFinishes": True,
            "activeDeadlineSeconds": 7200,
            "backoffLimit": 2,
            "rayClusterSpec": {
                "rayVersion": "2.50.0",
                "headGroupSpec": {
                    "rayStartParams": {"dashboard-host": "0.0.0.0"},
                    "template": {
                        "metadata": {"labels": LABELS},
                        "spec": {"containers": [{**CONTAINER, "env": env}], **POD},
                    },
                },
            },
        },
    }


def test_k8s_is_the_common_name_of_volcano() -> None:
    assert K8sExecutor is VolcanoExecutor


@pytest.mark.parametrize(
    "settings", [FULL, {"image": "registry/image:1", "gpus": 0, "shm": None}], ids=["full", "bare"]
)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_manifests_pass_the_published_schemas(kind: str, settings: dict[str, Any]) -> None:
    assert problems(KINDS[kind][0].schema, KINDS[kind][1](**settings).payload(JOB)) == []


MISSPELT = {
    "volcano": [
        ("spec", "minAvailble"),
        ("spec", "tasks", 0, "replica"),
        ("spec", "policies", 0, "evnt"),
        ("spec", "tasks", 0, "template", "spec", "nodeSelecter"),
        ("spec", "tasks", 0, "template", "spec", "containers", 0, "enviroment"),
        ("statuss",),
    ],
    "kuberay": [
        ("spec", "entryPoint"),
        ("spec", "activeDeadlineSecond"),
        ("spec", "rayClusterSpec", "headGroup"),
        ("spec", "rayClusterSpec", "headGroupSpec", "rayStartParam"),
        ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "tolerations", 0, "efect"),
    ],
}


@pytest.mark.parametrize(("kind", "path"), [(kind, path) for kind, paths in MISSPELT.items() for path in paths])
def test_a_misspelt_field_fails_the_schema(kind: str, path: tuple[Any, ...]) -> None:
    manifest = copy.deepcopy(KINDS[kind][1](**FULL).payload(JOB))
    place: Any = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "x"
    (problem,) = problems(KINDS[kind][0].schema, manifest)
    assert path[-1] in problem


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("volcano", ("minAvailable",), "1"),
        ("volcano", ("policies", 0, "event"), "PodEvict"),
        ("volcano", ("tasks", 0, "template", "spec", "containers", 0, "resources", "limits", "memory"), "a lot"),
        ("kuberay", ("backoffLimit",), 0.5),
        ("kuberay", ("rayClusterSpec", "headGroupSpec", "rayStartParams", "num-gpus"), 8),
    ],
)
def test_a_wrong_value_fails_the_schema(kind: str, path: tuple[Any, ...], value: Any) -> None:
    manifest = copy.deepcopy(KINDS[kind][1](**FULL).payload(JOB))
    place = manifest["spec"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert len(problems(KINDS[kind][0].schema, manifest)) == 1


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpus": -1}, "gpus must be 0 or more, got -1"),
        ({"grace_seconds": 0}, "grace_seconds must be at least 1"),
        ({"volumes": {"data": "claim"}}, "must be an absolute path"),
    ],
)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_settings_that_cannot_be(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KINDS[kind][1](**settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: VolcanoExecutor(max_retry=-1), "max_retry must be 0 or more"),
        (lambda: VolcanoExecutor(keep_seconds=-1), "keep_seconds must be 0 or more"),
        (lambda: KubeRayExecutor(backoff_limit=-1), "backoff_limit must be 0 or more"),
        (lambda: KubeRayExecutor(submission_mode="InteractiveMode"), "submission_mode 'InteractiveMode' isn't known"),
    ],
)
def test_settings_of_one_kind_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
