"""Whole rounds over each kind of store: the same bits as over files."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_replication.cli import main
from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.store import LocalStore, ObjectStore, open_store
from tests.collective.object_store.toy import Toy, run_toy
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


def test_status_of_a_store_that_is_not_there_says_why(
    s3_uri: str, seaweedfs: str, moto: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", s3_uri]) != 0
    assert "no fleet.json" in capsys.readouterr().err
    # SeaweedFS takes a bucket that isn't there for an empty one.
    assert main(["status", s3_uri.replace("s3://rounds", "s3://nosuchbucket").replace(seaweedfs, moto)]) != 0
    assert "bucket, container or repository isn't there" in capsys.readouterr().err
