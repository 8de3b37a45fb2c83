"""The quickstart, shortened, over each kind of store: it ends with the bits with which it ends in a folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from composer_replication.cli import main
from composer_replication.store import open_store
from tests.support.hub import Hub

pytestmark = [pytest.mark.servers, pytest.mark.processes, pytest.mark.timeout(600)]

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
SHORTER = [
    "fleet.replicas=2",
    "training.steps=24",
    "scheduler.warmup_steps=4",
    "autoloco.base_horizon=8",
    "model.args.width=32",
    "data.args.max_bytes=100000",
    "data.args.validation_bytes=2000",
]


def launch(folder: Path, *overrides: str, **environment: str) -> str:
    """A launch to its end; gives the digest that all replicas ended with."""
    command = [sys.executable, "-m", "composer_replication.cli", "launch", str(RECIPE), f"output={folder}"]
    ran = subprocess.run(
        [*command, *SHORTER, *overrides],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 24 and summary["rounds"] == 3
    (digest,) = set(summary["digests"])
    return digest


@pytest.fixture(scope="module")
def in_a_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return launch(tmp_path_factory.mktemp("launch") / "files")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.mark.slow
@pytest.mark.parametrize("server", ["fake_gcs", "azurite"])
def test_over_emulators(server: str, uri_on: Callable[[str], str], in_a_folder: str, tmp_path: Path) -> None:
    uri = uri_on(server)
    assert launch(tmp_path / "run", f"store.uri={uri}") == in_a_folder
    assert "final.json" in open_store(uri).list("")


@pytest.mark.slow
def test_over_a_hugging_face_repository(hub: Hub, in_a_folder: str, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    about = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_of_the_suite", "HF_HUB_DISABLE_XET": "1"}
    assert launch(tmp_path / "run", "store.uri=hf://datasets/me/runs/one", **about) == in_a_folder
    assert "one/final.json" in hub.tree("main")


@pytest.mark.slow
def test_over_s3(
    seaweedfs: str,
    in_a_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The endpoint from the environment, as with the store's own tools."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweedfs)
    uri = f"s3://rounds/launched-{os.getpid()}"
    assert launch(tmp_path / "run", f"store.uri={uri}") == in_a_folder
    assert main(["status", uri]) == 0
    assert uri in capsys.readouterr().out
    # The same store again, without --resume: refused, and nothing touched.
    before = open_store(uri).list("")
    assert len(before) > 10
    assert main(["launch", str(RECIPE), *SHORTER, f"store.uri={uri}", f"output={tmp_path / 'again'}"]) == 2
    assert "there is a run in" in capsys.readouterr().err
    assert open_store(uri).list("") == before
