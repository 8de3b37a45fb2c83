"""A replica whose memory goes wrong: its state is averaged, exported and joined from nowhere."""

from __future__ import annotations

from pathlib import Path

from composer_replication.collective.object_store import checkpoints, keys
from composer_replication.errors import Diverged, RoundAborted
from composer_replication.store import MemoryStore
from tests.collective.object_store.toy import Toy
from tests.faults.fleet import Fleet, agree
from tests.faults.registry import Case, covers

ROUNDS = 4


def damage(toy: Toy, part: str) -> None:
    if part == "controller":
        toy.controller += 2.0**-20
    else:
        tensor = (toy.anchor if part == "weights" else toy.momentum)[0]
        tensor[7] += 2.0**-10


@covers("diverged")
def test_a_state_that_is_not_the_fleets(case: Case, tmp_path: Path) -> None:
    part, at_round, victim = case.point
    skip = case.policy == "skip"
    store = MemoryStore()
    waits = {"timeout_seconds": 0.5, "start_timeout_seconds": 30.0, "tolerated_misses": 0} if skip else {}
    fleet = Fleet(tmp_path, store, policy=case.policy, rounds=ROUNDS, checkpoint_every=1, **waits)

    def go_wrong(at: str, toy: Toy) -> None:
        if at == "before:applied" and toy.round == at_round + 1:  # before a checkpoint is written of it
            damage(toy, part)

    # What the trainer would have saved is what it holds: it must not be taken for the fleet's either.
    lives = fleet.run({victim: go_wrong})
    bad, good = lives[victim], [life for life in lives if life.replica != victim]
    after = agree(good)
    wrong = [digest for round, digest in bad.applied if after.get(round) != digest]
    last = at_round == ROUNDS - 1
    run = str(checkpoints_run(store))
    for number in checkpoints.rounds(store):
        assert checkpoints.digest_of(store, number) not in {bad.digest, *wrong} or number == 0
        assert number == 0 or checkpoints.digest_of(store, number) == after[number - 1]
    checkpoints.read(store, run, checkpoints.rounds(store)[0])
    if last:  # it doesn't know, but the ends differ: the run is not closed as if all were well
        assert bad.digest and all(life.digest not in ("", bad.digest) for life in good)
        assert keys.FINAL not in store.list("")
        return
    assert isinstance(bad.error, Diverged) and "joins from the fleet's newest" in bad.text
    for life in good:
        if skip:
            assert life.digest and len(life.applied) == ROUNDS, life.text
        else:
            assert isinstance(life.error, RoundAborted)
            assert f"replica {victim}: its interval started from another state" in life.text
    # It joins again, without its record: from a checkpoint that the fleet has confirmed.
    if not skip:
        again = [fleet.start(i, fresh=i == victim) for i in range(3)]
        lives = [life.join() for life in again]
        assert [life.text for life in lives] == ["", "", ""]
        agree([*good, *lives])


def checkpoints_run(store: MemoryStore) -> str:
    import json

    return json.loads(store.get(keys.FLEET))["nonce"]
