"""What the design document has users write, as it stands there, against stand-ins for Modal and Hugging Face Jobs.

Only the numbers of rounds and steps are smaller. The bucket is on a real S3 server; the model of that name is a tiny
one in the Hub's cache.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer_replication.diloco.serverless.jobs.job_executor import JobExecutor
from composer_replication.store import open_store
from tests.launchers import hf_jobs, modal
from tests.launchers.engine import Engine
from tests.support.language_model import save_language_model
from tests.support.servers import s3_client

pytestmark = [
    *(pytest.mark.processes, pytest.mark.servers, pytest.mark.timeout(600)),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

BUCKET = "my-diloco-runs"

SPECS = """
from composer_replication.diloco.serverless import (
    ModalExecutor, HFJobsExecutor, ReplicaSpec
)

specs = [
    ReplicaSpec(replica_id=i, num_replicas=4,
                rendezvous_uri="s3://my-diloco-runs/2026-05-26/",
                model_id="Qwen/Qwen2.5-7B",
                inner_optimizer={"name": "AdamW", "lr": 4e-4},
                sync_every=500, outer_rounds=100)
    for i in range(4)
]
"""

ONE_BACK_END = """
# Option A: all four replicas on Modal A100s
executor = ModalExecutor(gpu="A100-40GB", region=None, preemptible=True)
handles = executor.launch_replicas(specs)
results = executor.collect(handles)
"""

TWO_BACK_ENDS = """
# Option B: heterogeneous fleet — 2 on Modal, 2 on HF Jobs
modal_ex = ModalExecutor(gpu="A100-40GB")
hf_ex = HFJobsExecutor(flavor="a100-large")
modal_handles = modal_ex.launch_replicas(specs[:2])
hf_handles = hf_ex.launch_replicas(specs[2:])
# both groups read+write the SAME s3://... rendezvous URI — they DiLoCo together.
results = modal_ex.collect(modal_handles) + hf_ex.collect(hf_handles)
"""


@pytest.fixture
def services(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seaweedfs: str, s3_credentials: dict[str, str]
) -> Iterator[Engine]:
    """Both services, an image that has what replicas need, and the run's bucket."""
    pytest.importorskip("modal")
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweedfs)
    if BUCKET not in [bucket["Name"] for bucket in s3_client(seaweedfs).list_buckets()["Buckets"]]:
        s3_client(seaweedfs).create_bucket(Bucket=BUCKET)
    store = open_store("s3://my-diloco-runs/2026-05-26/")
    store.delete(store.list(""))  # of another test here
    text = [{"text": f"Line {i}: {i} and {i + 1} are {2 * i + 1}."} for i in range(400)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in text))
    engine = Engine()
    engine.image_env = {
        **s3_credentials,
        "AWS_ENDPOINT_URL": seaweedfs,
        "DATA_URI": str(tmp_path / "text.jsonl"),
        "HF_HOME": str(cache_of("Qwen/Qwen2.5-7B", tmp_path)),
        "HF_HUB_OFFLINE": "1",
    }
    monkeypatch.setenv("COMPOSER_REPLICATION_IMAGE", "registry/image:1")
    monkeypatch.setattr(JobExecutor, "poll_seconds", 0.2)
    hub = hf_jobs.Hub(engine)
    monkeypatch.setenv("HF_TOKEN", hf_jobs.TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", hub.service.url)
    try:
        with modal.served(engine, monkeypatch):
            yield engine
    finally:
        engine.close()
        hub.service.close()


def cache_of(name: str, folder: Path) -> Path:
    """A home of the Hub's client that holds a tiny model under this name."""
    repository = folder / "home" / "hub" / f"models--{name.replace('/', '--')}"
    commit = "0123456789" * 4
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    model = save_language_model(folder / "model")
    shutil.copytree(model, repository / "snapshots" / commit)
    return folder / "home"


def run(code: str) -> dict[str, Any]:
    smaller = SPECS.replace("sync_every=500, outer_rounds=100", "sync_every=2, outer_rounds=2")
    assert smaller != SPECS
    names: dict[str, Any] = {}
    exec(compile(smaller + code, "<the document>", "exec"), names)
    return names


def assert_trained_together(names: dict[str, Any], engine: Engine) -> None:
    results = names["results"]
    logs = [container.lines for container in engine.containers]
    assert [(one.replica_id, one.status) for one in results] == [(i, "completed") for i in range(4)], logs
    assert len({one.metrics["digest"] for one in results}) == 1
    assert {(one.metrics["rounds"], one.metrics["steps"]) for one in results} == {(2, 4)}
    assert all("--model-id=Qwen/Qwen2.5-7B" in container.command for container in engine.containers)


@pytest.mark.slow
def test_four_replicas_on_modal(services: Engine) -> None:
    names = run(ONE_BACK_END)
    assert_trained_together(names, services)
    assert {handle.backend for handle in names["handles"]} == {"modal"}


@pytest.mark.slow
def test_two_on_modal_and_two_on_hugging_face_are_one_fleet(services: Engine) -> None:
    names = run(TWO_BACK_ENDS)
    assert_trained_together(names, services)
    assert {handle.backend for handle in names["modal_handles"]} == {"modal"}
    assert {handle.backend for handle in names["hf_handles"]} == {"hf_jobs"}
