"""`launch --resume` and the replicas' own checkpoints: those that the run can't go on from are out of the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_replication.cli.resume import prepare_resume
from composer_replication.collective.object_store.sealing import begin_epoch, reach
from composer_replication.diloco.serverless.own_checkpoints import set_aside_behind
from composer_replication.errors import ReplicaTaken
from composer_replication.store import MemoryStore
from tests.collective.object_store.helpers import Fleet
from tests.collective.object_store.test_epochs import killed


def own_checkpoints(folder: Path, rounds: dict[int, list[int]]) -> None:
    for replica, which in rounds.items():
        place = folder / f"replica-{replica}" / "checkpoints" / f"replica-{replica}"
        place.mkdir(parents=True, exist_ok=True)
        for round in which:
            (place / f"round-{round:06d}-step-{10 * round:09d}.ckpt").write_bytes(b"")


def left(folder: Path, replica: int) -> list[str]:
    """Rounds of the replica's own checkpoints; those that were set aside with the folder's name before them."""
    place = folder / f"replica-{replica}" / "checkpoints" / f"replica-{replica}"
    names = (path.relative_to(place).as_posix() for path in place.rglob("*.ckpt"))
    return sorted(name.replace("round-0000", "").partition("-step")[0] for name in names)


def lose(store: MemoryStore, round: int) -> None:
    store.delete([key for key in store.list(f"rounds/{round:08d}/") if "/in/" in key or "/out/" in key])


@pytest.fixture
def run(tmp_path: Path) -> tuple[MemoryStore, Path]:
    """Killed in round 8, after checkpoint 6, and what round 6 came to is lost: round 6 is where it can go on."""
    store, records = MemoryStore(), tmp_path / "records"
    records.mkdir()
    killed(store, records, 2, 8)
    lose(store, 6)
    return store, tmp_path / "run"


def test_stopped_when_the_epoch_had_begun_and_before_they_were_set_aside(run: tuple[MemoryStore, Path]) -> None:
    store, folder = run
    own_checkpoints(folder, {0: [6, 7], 1: [6, 8]})
    begin_epoch(store, 3)
    assert prepare_resume(store, folder, 3) == (
        "2 checkpoints of later rounds, which the store can't give any more, are set aside"
    )
    assert left(folder, 0) == ["06", "before-epoch-1/07"] and left(folder, 1) == ["06", "before-epoch-1/08"]
    assert prepare_resume(store, folder, 3) == ""


def test_those_of_replicas_that_take_no_part_now_are_out_of_the_way_of_a_larger_fleet(
    run: tuple[MemoryStore, Path],
) -> None:
    store, folder = run
    own_checkpoints(folder, {0: [6, 7], 1: [7]})
    assert "2 checkpoints of later rounds" in prepare_resume(store, folder, 1)
    assert left(folder, 1) == ["before-epoch-1/07"]


def test_one_that_is_too_old_to_be_followed_from(run: tuple[MemoryStore, Path]) -> None:
    """Its replica took no part for a while: in a smaller fleet, or because it was dead under skip."""
    store, folder = run
    own_checkpoints(folder, {0: [6], 1: [2, 4], 2: [1, 2]})
    lose(store, 2)
    found = reach(store)
    assert found is not None and found.checkpoint == 6
    assert prepare_resume(store, folder, 3) == (
        "resumed from round 6 as epoch 1: 3 replicas instead of 2; replica 2 begins at the store's newest checkpoint: "
        "the rounds since its own are gone (which is set aside, in behind-round-6)"
    )
    assert left(folder, 1) == ["02", "04"], "rounds 4 and 5 are there"
    assert left(folder, 2) == ["behind-round-6/01", "behind-round-6/02"]


def test_nothing_of_a_run_that_is_being_trained_is_touched(tmp_path: Path) -> None:
    with Fleet(2) as two:
        two.round(0, {0: 1.0, 1: 1.0})
    store = two.store
    begin_epoch(store, 2)
    with Fleet(2, store):
        with pytest.raises(ReplicaTaken, match="is being trained"):
            prepare_resume(store, tmp_path, 2)
        own_checkpoints(tmp_path, {0: [5]})
        with pytest.raises(ReplicaTaken, match="is being trained"):
            prepare_resume(store, tmp_path, 2)
        assert left(tmp_path, 0) == ["05"]
    assert "a checkpoint of a later round, which" in prepare_resume(store, tmp_path, 2)


def test_a_replica_that_was_away_for_long_begins_without_its_own(run: tuple[MemoryStore, Path]) -> None:
    store, folder = run
    own_checkpoints(folder, {0: [1, 2], 1: [4]})
    lose(store, 3)
    places = [folder / f"replica-{replica}" / "checkpoints" for replica in (0, 1, 2)]
    assert "round 2, and the rounds from there to the fleet's checkpoint of round 6 are gone" in set_aside_behind(
        store, places[0], 0
    )
    assert left(folder, 0) == ["behind-round-6/01", "behind-round-6/02"]
    assert set_aside_behind(store, places[1], 1) == "" == set_aside_behind(store, places[2], 2)
    own_checkpoints(folder, {0: [2]})
    assert set_aside_behind(MemoryStore(), places[0], 0) == "", "another store: the replica tells"
