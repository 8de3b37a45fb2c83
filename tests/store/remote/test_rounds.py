"""Whole rounds, a launched recipe and the commands over S3: the same bits as over files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from composer_replication.cli import main
from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.store import LocalStore, ObjectStore, open_store
from tests.collective.object_store.toy import Toy, run_toy
from tests.support.fault_proxy import FaultProxy
from tests.support.threads import run_threads

pytestmark = pytest.mark.servers


def fleet(stores: list[ObjectStore], *, rounds: int = 3, mode: str = "sharded") -> list[Toy]:
    def life(replica: int) -> Toy:
        collective = ObjectStoreCollective(
            stores[replica],
            replica=replica,
            replicas=len(stores),
            codec="int8",
            mode=mode,  # type: ignore[arg-type]
            poll_seconds=0.02,
            max_poll_seconds=0.2,
            heartbeat_seconds=1.0,
            timeout_seconds=60.0,
        )
        return run_toy(Toy.fresh(replica), collective, rounds)

    return run_threads([lambda r=r: life(r) for r in range(len(stores))], timeout_seconds=120.0)


@pytest.mark.parametrize("mode", ["direct", "sharded"])
def test_same_bits_as_over_files(tmp_path: Path, s3_uri: str, mode: str) -> None:
    reference = fleet([LocalStore(tmp_path / "s") for _ in range(3)], mode=mode)
    toys = fleet([open_store(s3_uri) for _ in range(3)], mode=mode)
    assert len({toy.digest for toy in (*reference, *toys)}) == 1
    assert [toy.applied for toy in toys] == [reference[0].applied] * 3


def test_same_bits_over_every_kind_of_store(tmp_path: Path, uri: str) -> None:
    reference = fleet([LocalStore(tmp_path / "s") for _ in range(2)], rounds=2)
    toys = fleet([open_store(uri) for _ in range(2)], rounds=2)
    assert len({toy.digest for toy in (*reference, *toys)}) == 1


def test_same_bits_through_a_bad_network(tmp_path: Path, s3_uri: str, seaweedfs: str) -> None:
    """Throttled, cut and unheard requests all along: nothing is lost, nothing counted twice."""
    reference = fleet([LocalStore(tmp_path / "s") for _ in range(2)], rounds=2)
    with FaultProxy(seaweedfs) as proxy:
        through = s3_uri.replace(seaweedfs, proxy.endpoint)
        for where in ("ready", "roster", "mean", "claims", "fleet.json"):
            proxy.add("lose answer", method="PUT", target=where)
            proxy.add("cut request", method="PUT", target=where)
            proxy.add("status", method="GET", target=where, status=429)
            proxy.add("cut answer", method="GET", target=where)
        toys = fleet([open_store(through) for _ in range(2)], rounds=2)
        assert sum(fault.hits for fault in proxy.faults) >= 18
    assert len({toy.digest for toy in (*reference, *toys)}) == 1


RECIPE = """\
name: small
model: {name: byte_gpt, args: {width: 32, layers: 1, heads: 2, context: 32}}
data: {name: text_bytes, args: {context: 32, batch_size: 4, max_bytes: 100000, validation_bytes: 2000}}
optimizer: {lr: 3e-3}
training: {steps: 16, log_every: 8, accelerator: cpu, threads: 1}
autoloco: {base_horizon: 8, policy: fixed}
codec: int8
fleet: {replicas: 2, timeout_seconds: 100}
"""


def launch(folder: Path, *overrides: str) -> str:
    """A launch to its end; gives the digest that all replicas ended with."""
    folder.mkdir()
    recipe = folder / "small.yaml"
    recipe.write_text(RECIPE)
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "composer_replication.cli",
            "launch",
            str(recipe),
            f"output={folder / 'run'}",
            *overrides,
        ],
        capture_output=True,
        text=True,
        timeout=220,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (digest,) = set(json.loads((folder / "run" / "summary.json").read_text())["digests"])
    return digest


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, seaweedfs: str) -> Iterator[tuple[str, str]]:
    """A launch over S3, the endpoint from the environment as with the store's own tools: its URI and digest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", seaweedfs)
        uri = f"s3://rounds/launched-{os.getpid()}"
        yield uri, launch(tmp_path_factory.mktemp("launch") / "s3", f"store.uri={uri}")


@pytest.mark.processes
def test_a_recipe_is_launched_over_s3(
    launched: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri, _ = launched
    assert main(["status", uri]) == 0
    assert uri in capsys.readouterr().out
    # The same store again, without --resume: refused, and nothing touched.
    (tmp_path / "small.yaml").write_text(RECIPE)
    before = open_store(uri).list("")
    assert len(before) > 10
    assert main(["launch", str(tmp_path / "small.yaml"), f"store.uri={uri}", f"output={tmp_path / 'again'}"]) == 2
    assert "there is a run in" in capsys.readouterr().err
    assert open_store(uri).list("") == before


@pytest.mark.slow
@pytest.mark.processes
def test_a_recipe_ends_with_the_same_bits_over_s3_and_over_files(launched: tuple[str, str], tmp_path: Path) -> None:
    assert launch(tmp_path / "files") == launched[1]


def test_status_of_a_store_that_is_not_there_says_why(
    s3_uri: str, seaweedfs: str, moto: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", s3_uri]) != 0
    assert "no fleet.json" in capsys.readouterr().err
    # SeaweedFS takes a bucket that isn't there for an empty one.
    assert main(["status", s3_uri.replace("s3://rounds", "s3://nosuchbucket").replace(seaweedfs, moto)]) != 0
    assert "bucket, container or repository isn't there" in capsys.readouterr().err
