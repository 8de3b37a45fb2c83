"""How often a replica must save itself so that the rounds which lead on from there are kept."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from composer_replication.collective.retention import KEEP_ROUNDS, check_own_checkpoints
from composer_replication.store import MemoryStore
from tests.collective.object_store.toy import Toy
from tests.faults.fleet import Fleet, Killed

NAMES = {"own_name": "own", "shared_name": "shared"}


def test_what_is_refused_is_what_would_be_too_old() -> None:
    for own, shared in itertools.product(range(1, 13), repeat=2):
        newest = [shared * n for n in range(1, own + 1)]
        enough = all(at - at % own >= at - KEEP_ROUNDS for at in newest)
        if enough:
            check_own_checkpoints(own, shared, **NAMES)
            continue
        with pytest.raises(ValueError, match=f"own={own} doesn't go with shared={shared}") as caught:
            check_own_checkpoints(own, shared, **NAMES)
        check_own_checkpoints(own, int(str(caught.value).rpartition(" ")[2]), **NAMES)  # its remedy is one


@pytest.mark.parametrize(("own", "shared", "fine"), [(3, 7, True), (4, 8, True), (6, 4, False)])
def test_a_fleet_says_the_same(tmp_path: Path, own: int, shared: int, fine: bool) -> None:
    """Killed when the fleet has just written a checkpoint and tidied, at the worst of its multiples."""

    class Rare(Toy):
        def save(self, path: Path) -> None:
            if self.round and self.round % own == 0:
                super().save(path)

    multiples = (shared * n for n in range(1, 2 * own + 1) if shared * n >= own)
    at = max(multiples, key=lambda round: (round % own, -round)) + 1
    store = MemoryStore()
    fleet = Fleet(tmp_path, store, replicas=2, rounds=at + 3, checkpoint_every=shared)
    fleet.make = Rare

    def die(step: str, toy: Toy) -> None:
        if step == "before:ready" and toy.round == at:
            raise Killed

    lives = fleet.run({0: die, 1: die})
    assert all(life.killed for life in lives)
    again = fleet.run(timeout_seconds=1.0, start_timeout_seconds=1.0)
    assert [life.text == "" for life in again] == [fine, fine], [life.text for life in again]
