"""Volcano and KubeRay in a cluster, beyond the contract: Secrets, what runs, logs, bad input."""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes")
pytest.importorskip("jsonschema")

from composer_replication.diloco.serverless import ReplicaSpec
from composer_replication.diloco.serverless.backends.kuberay import KubeRayExecutor
from composer_replication.diloco.serverless.backends.kubernetes import KubernetesExecutor
from composer_replication.diloco.serverless.backends.pods import literal
from composer_replication.diloco.serverless.backends.volcano import VolcanoExecutor
from composer_replication.diloco.serverless.executor import BackendUnavailable, QuotaExceeded
from composer_replication.diloco.serverless.jobs.verdict import SILENT_SECONDS
from composer_replication.errors import ExecutorError
from tests.launchers import kuberay, volcano
from tests.launchers.engine import Engine
from tests.launchers.kubernetes_api import FOUND, GPU, GPU_LABEL, NAMESPACE, Cluster, expanded

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

KINDS = {"volcano": (volcano.KIND, VolcanoExecutor), "kuberay": (kuberay.KIND, KubeRayExecutor)}


class World:
    """A cluster of one kind, and executors for it."""

    def __init__(self, kind: str, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.executor = KINDS[kind][1]
        self.cluster = Cluster(engine, copy.copy(KINDS[kind][0]))
        self.usual = {
            "kubeconfig": str(self.cluster.kubeconfig(folder)),
            "namespace": NAMESPACE,
            "image": "registry/image:1",
            "backoff_seconds": 0.0,
        }

    def make(self, **settings: Any) -> KubernetesExecutor:
        made = self.executor(**{**self.usual, **settings})
        made.poll_seconds = made.log_pause_seconds = made.submit_backoff_seconds = 0.02
        return made

    def spec(self, script: str, **more: Any) -> ReplicaSpec:
        return ReplicaSpec(0, 1, (self.folder / "store").as_uri(), command=("python", "-u", "-c", script), **more)


@pytest.fixture(params=sorted(KINDS))
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    engine = Engine()
    made = World(request.param, engine, tmp_path)
    try:
        yield made
        assert made.cluster.service.unknown == []
    finally:
        made.cluster.service.close()
        engine.close()


# -- Secrets -----------------------------------------------------------------------------------------------------------


WAITING = "import sys; print('ready'); sys.stdout.flush(); import threading; threading.Event().wait()"


def test_secrets_are_in_a_secret_that_goes_with_its_job(world: World) -> None:
    executor = world.make()
    spec = world.spec(WAITING, extra_env={"API_TOKEN": "s3cr3t"})
    (handle,) = executor.launch_replicas([spec])
    secret = world.cluster.secrets[handle.job_id]
    assert secret["stringData"] == {"API_TOKEN": "s3cr3t"}
    assert [one["name"] for one in secret["metadata"]["ownerReferences"]] == [handle.job_id]
    assert "s3cr3t" not in json.dumps(world.cluster.jobs[handle.job_id].manifest)
    shown = executor.shown_payload(spec)
    assert [one["kind"] for one in shown["items"]] == ["Secret", world.cluster.kind.kind]
    assert shown["items"][0]["stringData"] == {"API_TOKEN": "***"} and "s3cr3t" not in json.dumps(shown)
    executor.cancel([handle])
    executor.collect([handle], timeout=60)
    assert world.cluster.secrets == {}


def test_without_secrets_the_shown_payload_is_the_manifest(world: World) -> None:
    executor, spec = world.make(), world.spec("pass")
    assert executor.shown_payload(spec) == executor.payload(executor.job(spec))


def test_a_secret_that_a_dead_launcher_left_is_written_anew(world: World) -> None:
    executor, spec = world.make(), world.spec("pass", extra_env={"API_TOKEN": "new"})
    name = executor.job(spec).name
    left = {"metadata": {"name": name}, "stringData": {"API_TOKEN": "old"}}
    world.cluster.secrets[name] = left
    handles = executor.launch_replicas([spec])
    assert world.cluster.secrets[name]["stringData"] == {"API_TOKEN": "new"}
    executor.collect(handles, timeout=60)


def test_a_job_that_is_not_taken_leaves_no_secret(world: World) -> None:
    executor = world.make()
    executor.submit_attempts = 1
    world.engine.refuse("quota")
    (handle,) = executor.launch_replicas([world.spec("pass", extra_env={"API_TOKEN": "s3cr3t"})])
    assert handle.job_id == "" and "exceeded quota" in handle.reason and world.cluster.secrets == {}


def test_a_secret_that_is_there_becomes_variables(world: World) -> None:
    world.cluster.secrets["store"] = {"metadata": {"name": "store"}, "stringData": {"KEY": "k3y"}}
    executor = world.make(secret_name="store")
    (handle,) = executor.launch_replicas([world.spec("import os; print(os.environ['KEY'])")])
    assert "k3y" in list(executor.stream_logs(handle))


# -- what runs ---------------------------------------------------------------------------------------------------------


def test_what_kubernetes_would_replace_arrives_as_it_is(world: World) -> None:
    awkward = "$(COLOUR) $$ $$(COLOUR) $ $(NOT_SET)"
    script = f"import os; print(os.environ['AWKWARD'] == {awkward!r}, os.environ['COLOUR'])"
    executor = world.make(env={"COLOUR": "red", "AWKWARD": awkward})
    (handle,) = executor.launch_replicas([world.spec(script)])
    assert "True red" in list(executor.stream_logs(handle))
    assert expanded(awkward, {"COLOUR": "red"}) != awkward == expanded(literal(awkward), {"COLOUR": "red"})


@pytest.mark.parametrize("world", ["kuberay"], indirect=True)
@pytest.mark.parametrize("mode", ["SidecarMode", "HTTPMode"])
def test_other_ways_of_submitting_a_ray_job(world: World, mode: str) -> None:
    executor = world.make(submission_mode=mode)
    (handle,) = executor.launch_replicas([world.spec("print('quotes \" and $(date)')")])
    assert 'quotes " and $(date)' in list(executor.stream_logs(handle))
    assert executor.collect([handle], timeout=60)[0].status == "completed"


def test_a_job_that_others_deleted_is_a_preemption(world: World) -> None:
    executor = world.make()
    script = (
        f"import pathlib, threading\nseen = pathlib.Path({str(world.folder / 'seen')!r})\n"
        "if not seen.exists():\n    seen.touch(); print('ready'); threading.Event().wait()\nprint('second')"
    )
    (handle,) = executor.launch_replicas([world.spec(script)])
    record = world.cluster.jobs[handle.job_id]
    assert record.container is not None
    world.engine.wait_for(lambda: "ready" in record.container.lines)
    record.deleting = True
    world.engine.take_machine(record.container)
    world.engine.wait_for(lambda: record.container is not None and bool(record.container.ended))
    (present,) = executor.poll([handle])
    assert not present.ended and "was it deleted, or is it another cluster's?" in present.reason  # alive just now
    executor.clock = lambda: time.time() + SILENT_SECONDS + 1
    (result,) = executor.collect([handle], timeout=60)
    assert (result.status, result.metrics["preemptions"]) == ("completed", 1)


def test_another_cluster_s_job_is_not_taken_for_deleted(world: World) -> None:
    executor = world.make()
    (handle,) = executor.launch_replicas([world.spec(WAITING)])
    record = world.cluster.jobs[handle.job_id]
    world.engine.wait_for(lambda: record.container is not None and "ready" in record.container.lines)
    other = Cluster(world.engine, copy.copy(world.cluster.kind))
    (world.folder / "other").mkdir()
    try:
        elsewhere = world.make(kubeconfig=str(other.kubeconfig(world.folder / "other")))
        (there,) = elsewhere.attach((world.folder / "store").as_uri())
        (present,) = elsewhere.poll([there])
        assert not present.ended and "another cluster's?" in present.reason
        with pytest.raises(ExecutorError, match="its replica was alive .* ago: another account's"):
            elsewhere.cancel([present])
    finally:
        other.service.close()
    executor.cancel([handle])
    assert executor.collect([handle], timeout=60)[0].status == "cancelled"


def test_an_ended_job_that_was_tidied_away_keeps_its_end(world: World) -> None:
    executor = world.make()
    (handle,) = executor.launch_replicas([world.spec("raise SystemExit(1)")])
    record = world.cluster.jobs[handle.job_id]
    world.engine.wait_for(lambda: record.container is not None and bool(record.container.ended))
    record.deleting = True
    (result,) = executor.collect([handle], timeout=60)
    assert (result.status, result.metrics["exit_code"], result.metrics["attempts"]) == ("failed", 1, 1)


def test_a_submission_whose_answer_was_lost_is_found(world: World) -> None:
    executor, spec = world.make(), world.spec("pass")
    job = executor.job(spec)
    assert executor.submit_job(job) == executor.submit_job(job) == executor.find_job(job) == job.name
    assert len(world.engine.containers) == 1


def test_a_broken_log_goes_on_where_it_was(world: World) -> None:
    whole = world.cluster.kind.log
    broken: list[str] = []

    def breaks(record: Any, lines: Iterator[str]) -> Iterator[str]:
        for line in whole(record, lines):
            yield line
            if line == "one" and not broken:
                broken.append(line)
                raise OSError("the connection is gone")

    world.cluster.kind.log = breaks
    executor = world.make()
    (handle,) = executor.launch_replicas([world.spec("print('one')\nprint('two')")])
    lines = list(executor.stream_logs(handle))
    assert broken == ["one"] and [one for one in lines if one in ("one", "two")] == ["one", "two"]


def test_the_log_of_a_pod_that_takes_anothers_place_follows_it(world: World) -> None:
    script = (
        f"import pathlib, threading\nseen = pathlib.Path({str(world.folder / 'seen')!r})\n"
        "if not seen.exists():\n    seen.touch(); print('first'); threading.Event().wait()\nprint('second')"
    )
    executor = world.make()
    (handle,) = executor.launch_replicas([world.spec(script)])
    lines = executor.stream_logs(handle)
    before = []
    for line in lines:
        before.append(line)
        if line == "first":
            world.engine.take_machine(world.cluster.containers[handle.job_id], retried=True)
            break
    after = list(lines)
    assert "second" not in before and "first" not in after and after[-2:-1] == ["second"]
    assert [line for line in after if line == ""] == [] and after[0].startswith(f"job {handle.name}: replica 0 of 1")


def test_lines_of_a_pod_that_has_gone_keep_their_place(world: World) -> None:
    executor = world.make()
    (handle,) = executor.launch_replicas([world.spec("print('here')")])
    executor.collect([handle], timeout=60)
    executor._told[handle.job_id] = {"a pod of before": 3}
    lines = list(executor.follow(handle.job_id))
    assert lines[lines.index("here") - 1].startswith("store file://")
    whole = list(world.make().follow(handle.job_id))
    assert len(lines) == len(whole) + 3


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_credentials_that_are_refused_are_told_before_anything_starts(world: World) -> None:
    path = world.folder / "expired.json"
    path.write_text(Path(world.usual["kubeconfig"]).read_text().replace("a-token-of-the-tests", "an-old-one"))
    with pytest.raises(ExecutorError, match="refuses the credentials, which may be missing or expired: Unauthorized"):
        world.make(kubeconfig=str(path)).launch_replicas([world.spec("pass")])
    assert world.engine.containers == []


def test_without_a_cluster_in_reach(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(world.folder))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    for name in ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    for _ in range(2):
        with pytest.raises(ExecutorError, match="no way to a Kubernetes cluster through ~/.kube/config: "):
            world.make(kubeconfig=None).launch_replicas([world.spec("pass")])
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")  # now inside one, but without a token
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")


def test_a_missing_client_names_the_extra(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes.client", None)
    with pytest.raises(ExecutorError, match=r"pip install 'composer-replication\[kubernetes\]'"):
        world.make().launch_replicas([world.spec("pass")])


def test_what_may_not_be_looked_at_does_not_stop_a_launch(world: World) -> None:
    world.cluster.forbidden = {"/api/v1/nodes", "/api/v1/namespaces/training/serviceaccounts", "/apis/scheduling"}
    executor = world.make(service_account="unseen")
    handles = executor.launch_replicas([world.spec("pass")])
    assert executor.collect(handles, timeout=60)[0].status == "completed" and world.cluster.dry_runs == 1


def test_devices_are_not_asked_for_where_nodes_come_on_demand(world: World) -> None:
    world.cluster.nodes = [{"cpu": "4"}]
    world.make(gpu_resource="amd.com/gpu").check_specs([world.spec("pass")])
    world.make(gpu_resource="nvidia.com/gpux", gpus=0).check_specs([world.spec("pass")])


@pytest.mark.parametrize("name", ["42 Ünïcode!", "-", "UPPER_case.dots", "a" * 200])
def test_any_name_of_a_run_makes_names_that_a_cluster_takes(world: World, name: str) -> None:
    world.make(run_name=name).check_specs([world.spec("pass")])
    assert world.cluster.dry_runs == 1


def test_a_gpu_that_no_node_has_now_is_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.make(node_selector={GPU_LABEL: GPU}).check_specs([world.spec("pass")])
    assert caplog.text == ""
    world.make(node_selector={GPU_LABEL: "NVIDIA-H100"}).check_specs([world.spec("pass")])
    assert f"no node has {GPU_LABEL}=NVIDIA-H100 now; there are {GPU}" in caplog.text


def test_an_operator_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FOUND, "/apis/scheduling.volcano.sh/v1beta1/queues")
    engine = Engine()
    world = World("volcano", engine, tmp_path)
    try:
        for executor, name in ((KubeRayExecutor, "KubeRay"), (VolcanoExecutor, "Volcano")):
            with pytest.raises(ExecutorError, match=f"{name} isn't installed in this cluster"):
                executor(**world.usual).check_specs([world.spec("pass")])
    finally:
        world.cluster.service.close()


def test_errors_of_the_server_are_told_apart(world: World) -> None:
    executor, job = world.make(), world.make().job(world.spec("pass"))
    world.engine.refuse("quota", "outage")
    with pytest.raises(QuotaExceeded):
        executor.submit_job(job)
    with pytest.raises(BackendUnavailable):
        executor.submit_job(job)
    path = world.folder / "nobody.json"
    path.write_text(
        Path(world.usual["kubeconfig"]).read_text().replace(world.cluster.service.url, "http://127.0.0.1:9")
    )
    with pytest.raises(BackendUnavailable):
        world.make(kubeconfig=str(path)).look(job.name)
