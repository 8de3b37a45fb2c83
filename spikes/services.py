"""For the spikes: stand-ins for Modal and Hugging Face Jobs, from the tests, with an S3 server, instead of accounts.

The vendors' real clients talk to the stand-ins; containers are processes of this machine.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_model import save_model, save_text

from composer_replication.diloco.serverless.jobs.job_executor import JobExecutor
from tests.launchers import hf_jobs, modal
from tests.launchers.engine import Engine
from tests.support import servers

BUCKET = "spike"


@contextlib.contextmanager
def stand_ins(model: str) -> Iterator[str]:
    """Both services, with `model` in the images' cache as a small one; gives the rendezvous URI on an S3 server."""
    import huggingface_hub.constants

    with (
        tempfile.TemporaryDirectory() as name,
        pytest.MonkeyPatch.context() as patch,
        servers.seaweedfs(BUCKET) as endpoint,
    ):
        folder = Path(name)
        save_text(folder / "text.jsonl", size=400_000)
        _cache(model, folder)
        credentials = {
            "AWS_ACCESS_KEY_ID": servers.ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": servers.SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
        }
        for variable, value in credentials.items():
            patch.setenv(variable, value)
        engine = Engine()
        engine.image_env = {
            **credentials,
            "DATA_URI": str(folder / "text.jsonl"),
            "HF_HOME": str(folder / "home"),
            "HF_HUB_OFFLINE": "1",
        }
        hub = hf_jobs.Hub(engine)
        patch.setenv("HF_TOKEN", hf_jobs.TOKEN)
        patch.setattr(huggingface_hub.constants, "ENDPOINT", hub.service.url)
        patch.setattr(JobExecutor, "poll_seconds", 0.5)
        try:
            with modal.served(engine, patch):
                yield f"s3://{BUCKET}/run"
        finally:
            engine.close()
            hub.service.close()


def _cache(model: str, folder: Path) -> None:
    repository = folder / "home" / "hub" / f"models--{model.replace('/', '--')}"
    commit = "0123456789" * 4
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    save_model(folder / "model", width=32, layers=2)
    shutil.copytree(folder / "model", repository / "snapshots" / commit)


def tell(results: list, seconds: float) -> None:
    """A line for each replica; SystemExit unless they ended together."""
    for result in results:
        shown = {name: result.metrics.get(name) for name in ("steps", "rounds", "validation_loss", "bytes_sent")}
        rest = {name: result.metrics.get(name) for name in ("attempts", "preemption_rate", "job_seconds", "error")}
        print(f"replica {result.replica_id}: {result.status} {json.dumps({**shown, **rest})}")
    digests = {result.metrics.get("digest") for result in results}
    if {result.status for result in results} != {"completed"} or len(digests) != 1:
        raise SystemExit("they did not end together")
    print(f"same weights everywhere ({digests.pop()}), {seconds:.0f} s from launch to end")
