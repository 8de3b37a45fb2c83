"""Starting: who may hold an id, what must be equal, and from which state a replica goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.object_store import ObjectStoreCollective, fleet, keys
from composer_replication.collective.object_store.fleet import Process, claim_replica, numerics_probe, this_process
from composer_replication.errors import (
    Fenced,
    FleetMismatch,
    ReplicaTaken,
    RoundError,
    RoundTimeout,
    StoreError,
    StoreUnavailable,
)
from composer_replication.store import MemoryStore
from tests.collective.conformance import MIXED, SCALAR, begin, contribution, digest, snapshot
from tests.collective.object_store.helpers import Fleet, attempt, join, scalar
from tests.collective.object_store.toy import Toy, run_toy
from tests.support.threads import run_threads

SETTINGS = {"outer_lr": 1.0}


# -- claims


def test_an_id_that_a_live_process_holds() -> None:
    store = MemoryStore()
    first = join(store, 0, 1)
    begin(first, SCALAR)
    with pytest.raises(ReplicaTaken, match=rf"replica 0 is held by process {os.getpid()} on .*choose another id"):
        begin(join(store, 0, 1), SCALAR)
    first.close()
    second = join(store, 0, 1)
    begin(second, SCALAR)
    second.close()
    assert [key for key in store.list("claims/0/") if not key.endswith("closed")] == ["claims/0/1", "claims/0/2"]


class FakeTime:
    def __init__(self, during: Callable[[float], None] = lambda now: None) -> None:
        self.now, self.during = 0.0, during

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.during(self.now)


def claim(store: MemoryStore, fake: FakeTime) -> int:
    return claim_replica(store, 0, heartbeat_seconds=5.0, clock=fake.clock, pause=fake.sleep, trace=lambda step: None)


def held_by(store: MemoryStore, process: Process, counter: int) -> None:
    content = {name: getattr(process, name) for name in ("host", "boot", "namespace", "pid", "started")}
    store.put(keys.claim(0, 1), json.dumps({"wire": 1, "replica": 0, **content}).encode())
    beat = {"incarnation": 1, "counter": counter, "heartbeat_seconds": 8.0}
    store.put(keys.member(0), json.dumps(beat).encode())


def test_a_dead_process_of_this_machine_is_seen_at_once() -> None:
    store, fake = MemoryStore(), FakeTime()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=30)
    held_by(store, replace(this_process(), pid=child.pid, started="1"), 1)
    assert claim(store, fake) == 2 and fake.now == 0.0


def test_a_process_id_that_was_given_out_again_is_not_taken_for_the_holder() -> None:
    store, fake = MemoryStore(), FakeTime()
    held_by(store, replace(this_process(), started="1"), 1)  # our own pid, another start
    assert claim(store, fake) == 2


def test_a_process_elsewhere_lives_while_its_heart_beats() -> None:
    store = MemoryStore()
    elsewhere = Process("far-away", "boot", "pid:[1]", 7, "99")
    held_by(store, elsewhere, 1)
    beating = FakeTime(lambda now: held_by(store, elsewhere, 1 + int(now // 8)))
    with pytest.raises(ReplicaTaken, match="process 7 on far-away"):
        claim(store, beating)
    still = FakeTime()
    assert claim(store, still) == 2
    assert still.now == pytest.approx(16.0), "two of its heartbeats were waited for"


def test_a_heartbeat_that_cannot_be_read_for_a_moment_is_no_sign_of_life() -> None:
    class Shaky(MemoryStore):
        reads = 0

        def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
            self.reads += key == keys.member(0)
            if key == keys.member(0) and self.reads == 2:
                raise StoreUnavailable("try later")
            return super().get(key, max_bytes=max_bytes)

    store = Shaky()
    held_by(store, Process("far-away", "boot", "pid:[1]", 7, "99"), 1)
    assert claim(store, FakeTime()) == 2 and store.reads > 2
    store.reads, fake = 0, FakeTime()
    held_by(store, Process("far-away", "boot", "pid:[1]", 7, "99"), 1)
    assert fleet.live_replicas(store, [0], clock=fake.clock, pause=fake.sleep) == []


def test_two_that_start_at_once_under_one_id() -> None:
    store = MemoryStore()
    results = run_threads([lambda: attempt(lambda: begin(join(store, 0, 1), SCALAR)) for _ in range(4)])
    assert sum(isinstance(result, ReplicaTaken) for result in results) == 3


def test_a_claim_whose_answer_was_lost_is_one_s_own() -> None:
    class Lossy(MemoryStore):
        lost = False

        def put_if_absent(self, key: str, data: Any) -> None:
            super().put_if_absent(key, data)
            if key == keys.claim(0, 1) and not self.lost:
                self.lost = True
                raise StoreError("an input/output error, after the deed")

    store = Lossy()
    one = join(store, 0, 1, sleep=lambda seconds: None)
    begin(one, SCALAR)
    one.close()
    assert [key for key in store.list("claims/0/") if not key.endswith("closed")] == ["claims/0/1"]


def test_an_outclaimed_process_stops() -> None:
    with Fleet(1) as fleet_of_one:
        old = fleet_of_one.all[0]
        fleet_of_one.round(0, {0: 1.0})
        fleet_of_one.store.put_if_absent(keys.claim(0, 2), b"{}")
        assert old._heart is not None
        old._heart.look()
        with pytest.raises(Fenced, match="replica 0"):
            old.average(contribution(0, 1, SCALAR, torch.ones(1)))


# -- what must be equal


@pytest.mark.parametrize(
    ("there", "here", "words"),
    [
        ({"codec": "int8"}, {"codec": "float32"}, ["codec", "'float32' here", "'int8' in the fleet"]),
        ({"failure_policy": "skip"}, {}, ["failure_policy", "'strict' here"]),
        ({"checkpoint_every": 5}, {}, ["checkpoint_every", "10 here", "5 in the fleet"]),
        ({"nonce": "a"}, {"nonce": "b"}, ["another run", "choose another prefix"]),
    ],
)
def test_settings_that_differ_are_named(there: dict[str, Any], here: dict[str, Any], words: list[str]) -> None:
    store = MemoryStore()
    begin(join(store, 0, 2, **there), SCALAR)
    with pytest.raises(FleetMismatch) as caught:
        begin(join(store, 1, 2, **here), SCALAR)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_another_number_of_replicas() -> None:
    store = MemoryStore()
    begin(join(store, 0, 2), SCALAR)
    with pytest.raises(FleetMismatch, match="replicas: 3 here, 2 in the fleet"):
        begin(join(store, 1, 3), SCALAR)


def test_tensors_that_differ_are_named() -> None:
    store = MemoryStore()
    begin(join(store, 0, 2), Layout((Slot("head.weight", (2, 3), "torch.float32"),)))
    with pytest.raises(FleetMismatch, match=r"head.weight: torch.bfloat16\[2, 4\] here, torch.float32\[2, 3\] there"):
        begin(join(store, 1, 2), Layout((Slot("head.weight", (2, 4), "torch.bfloat16"),)))


def test_arithmetic_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    begin(join(store, 0, 2), SCALAR)
    probe = numerics_probe()
    assert probe == numerics_probe()
    monkeypatch.setattr(fleet, "numerics_probe", lambda: {**probe, "exp": "0x1p+0"})
    with pytest.raises(FleetMismatch, match="numerics.exp: '0x1p[+]0' here"):
        begin(join(store, 1, 2), SCALAR)


def test_the_numerics_probe_knows_no_threads() -> None:
    torch.set_num_threads(2)
    try:
        two = numerics_probe()
    finally:
        torch.set_num_threads(1)
    assert two == numerics_probe()


@pytest.mark.parametrize(
    "settings",
    [
        {"replica": 2},
        {"replica": -1},
        {"failure_policy": "lenient"},
        {"codec": "int4"},
        {"min_replicas": 3},
        {"timeout_seconds": 0.0},
        {"poll_seconds": -1.0},
        {"checkpoint_every": 0},
        {"tolerated_misses": -1},
        {"mode": "tree"},
    ],
)
def test_settings_out_of_range_name_themselves(settings: dict[str, Any]) -> None:
    (name, value), *_ = settings.items()
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        ObjectStoreCollective(MemoryStore(), **{"replica": 0, "replicas": 2, **settings})


def test_a_replica_with_a_wrong_setting_never_shuts_the_others_out() -> None:
    """It may come first: the lowest id says what the fleet is."""
    store = MemoryStore()
    results = run_threads(
        [
            lambda: attempt(lambda: (time.sleep(0.1), begin(join(store, 0, 2), SCALAR))),
            lambda: attempt(lambda: begin(join(store, 1, 2, codec="int8"), SCALAR)),
        ]
    )
    assert not isinstance(results[0], Exception)
    assert isinstance(results[1], FleetMismatch) and "codec" in str(results[1])


# -- from where


def test_waiting_for_first_weights_that_do_not_come() -> None:
    with pytest.raises(RoundTimeout, match="replica 0 has not published the first weights"):
        begin(join(MemoryStore(), 1, 2, start_timeout_seconds=0.1), SCALAR)


def test_the_lowest_id_comes_back_with_other_weights_before_round_0() -> None:
    store = MemoryStore()
    first = join(store, 0, 1)
    first.start(snapshot(SCALAR, 0, torch.tensor([1.0])), settings={}, resumed=False)
    first.close()
    again = join(store, 0, 1).start(snapshot(SCALAR, 0, torch.tensor([2.0])), settings={}, resumed=False)
    assert again.anchor[0].item() == 1.0, "the fleet may have begun with those"


def test_resuming_where_there_is_nothing_to_resume() -> None:
    with pytest.raises(FleetMismatch, match=r"no run that could be resumed.*start afresh"):
        join(MemoryStore(), 0, 1).start(snapshot(SCALAR, 3), settings={}, resumed=True)


def test_resuming_from_a_round_that_the_store_does_not_know() -> None:
    with Fleet(1) as one:
        one.round(0, {0: 1.0})
        one.all[0].close()
        with pytest.raises(FleetMismatch, match="of round 3, but round 2 isn't closed"):
            join(one.store, 0, 1).start(snapshot(SCALAR, 3), settings=SETTINGS, resumed=True)


def test_resuming_from_a_state_that_is_not_the_fleets() -> None:
    with Fleet(2) as two:
        two.round(0, {0: 1.0, 1: 1.0})
        two.all[1].close()
        for round in (0, 1):
            if round == 1:
                two.store.put_if_absent(keys.ready(1, 0, 0), two.store.get(keys.ready(0, 0, 0)))
            foreign = replace(snapshot(SCALAR, 0), digest="foreign")
            with pytest.raises(FleetMismatch, match="isn't the fleet's"):
                join(two.store, 1, 2).start(foreign, settings=SETTINGS, resumed=True)


def test_a_run_that_has_finished_gives_its_last_state() -> None:
    """Whoever comes back without a checkpoint, or for the first time."""
    store = MemoryStore()
    with Fleet(1, store) as one:
        outcome = one.round(0, {0: 1.0}, leaving=True)[0]
        assert outcome.expected_next == ()
        one.all[0].applied(lambda: snapshot(SCALAR, 1, torch.tensor([7.0])))
        one.all[0].finish(digest(1), {"loss": 1.0})
    assert json.loads(store.get("final.json"))["digest"] == digest(1)
    for _ in range(2):
        back = join(store, 0, 1)
        got = back.start(snapshot(SCALAR, 0), settings=SETTINGS, resumed=False)
        assert got.ended and got.round == 1 and got.anchor[0].item() == 7.0
        with pytest.raises(RoundError, match="has left the run"):
            back.average(contribution(0, 1, SCALAR, torch.ones(1)))
        back.finish(digest(1), {})
        back.close()
    with pytest.raises(FleetMismatch, match="codec"):
        begin(join(store, 0, 1, codec="int8"), SCALAR)


def test_the_last_checkpoint_is_for_a_unanimous_end() -> None:
    with Fleet(2) as two:
        two.round(0, {0: 1.0, 1: 1.0}, leaving=True)
        for collective, end in zip(two.all, (digest(1), "other"), strict=True):
            collective.applied(lambda end=end: replace(snapshot(SCALAR, 1), digest=end))
            collective.finish(end, {})
        assert keys.manifest(1) not in two.store.list("checkpoints/")
        # Whoever comes now applies the last round itself.
        back = Fleet(2, two.store).all[0]
        two.all[0].close()
        got = back.start(snapshot(SCALAR, 0), settings=SETTINGS, resumed=False)
        assert not got.ended and got.round == 0
        back.close()


def test_final_is_for_a_unanimous_end() -> None:
    with Fleet(2) as two:
        two.round(0, {0: 1.0, 1: 1.0}, leaving=True)
        for collective, end in zip(two.all, ("one", "other"), strict=True):
            collective.finish(end, {})
        assert "final.json" not in two.store.list("")
        two.all[1].finish("one", {})
        assert "final.json" in two.store.list("")


# -- checkpoints and what is deleted


def test_checkpoints_are_for_joiners_and_blobs_are_collected() -> None:
    store = MemoryStore()

    def life(replica: int) -> Toy:
        return run_toy(Toy.fresh(replica), join(store, replica, 3, checkpoint_every=2, mode="sharded"), 14)

    toys = run_threads([lambda r=r: life(r) for r in range(3)])
    every = store.list("")
    pointers = [key for key in every if key.startswith("rounds/") and key.endswith(".json")]
    assert sum(key.endswith("roster.json") for key in pointers) == 14, "pointers stay"
    assert sum("/ready/" in key for key in pointers) == 3 * 14
    blobs = {keys.round_of(key) for key in every if "/in/" in key or "/out/" in key}
    assert min(round for round, _ in blobs) >= 8 and len(blobs) <= 6, blobs  # type: ignore[misc]
    manifests = [keys.manifest_round(key) for key in store.list("checkpoints/")]
    assert [m for m in manifests if m is not None] == [0, 2, 4, 6, 8, 10, 12, 14]
    contents = {key.split("/")[1] for key in store.list("checkpoints/") if keys.manifest_round(key) is None}
    assert contents == {"00000010", "00000012", "00000014"}, "two generations of contents are kept, and the end"
    # A newcomer joins at the newest one and follows to the end, to the same bits; when all is over, at the end itself.
    late = run_toy(Toy.fresh(2), join(store, 2, 3, checkpoint_every=2, mode="sharded"), 14)
    assert late.digest == toys[0].digest and late.applied == []
    store.delete(["final.json", keys.manifest(14)])
    late = run_toy(Toy.fresh(1), join(store, 1, 3, checkpoint_every=2, mode="sharded"), 14)
    assert late.digest == toys[0].digest and late.applied[0][0] == 12


def test_a_checkpoint_that_the_fleet_does_not_confirm_never_exists() -> None:
    with Fleet(2, checkpoint_every=1) as two:
        two.round(0, {0: 1.0, 1: 1.0})
        two.all[0].applied(lambda: replace(snapshot(SCALAR, 1), digest="another state"))
        two.all[1].applied(lambda: snapshot(SCALAR, 1))
        two.round(1, {0: 1.0, 1: 1.0})
        assert keys.manifest(1) not in two.store.list("checkpoints/")
        two.all[0].applied(lambda: snapshot(SCALAR, 2))
        two.round(2, {0: 1.0, 1: 1.0})
        assert keys.manifest(2) in two.store.list("checkpoints/")


# -- requests, and what people see


@pytest.mark.parametrize("mode", ["direct", "sharded"])
def test_the_requests_of_a_round_are_those_of_the_page(mode: str) -> None:
    """docs/protocol.md has these sums. The last one to come never waits for a contribution."""
    members, chunks = 4, len(MIXED.chunks)
    shards = 1 if mode == "direct" else min(8 * members, 64, chunks)
    own = -(-shards // members)
    ones = torch.ones(MIXED.elements)
    with Fleet(members, layout=MIXED, mode=mode) as four:
        last = four.all[3]
        others = threading.Thread(
            target=run_threads,
            args=([lambda c=c: c.average(contribution(c.replica, 0, MIXED, ones)) for c in four.all[:3]],),
        )
        others.start()
        while sum("/ready/" in key for key in four.store.list("rounds/")) < 3:
            time.sleep(0.002)
        naps: list[float] = []
        pause = last._pause
        last._pause = lambda seconds: (naps.append(seconds), pause(seconds))[1]  # type: ignore[method-assign]
        before = dict(last.requests)
        last.average(contribution(3, 0, MIXED, ones))
        spent = {kind: count - before.get(kind, 0) for kind, count in last.requests.items()}
        others.join(timeout=30)
    share = -(-chunks // members)
    assert spent["put"] <= chunks + (share if mode == "sharded" else 0)
    assert spent["create"] <= 2 + own + 1  # and this layout, the first time
    assert spent.get("list", 0) == 0
    blobs = members * chunks if mode == "direct" else (members - 1) * share + chunks
    pointers = members + 6 if mode == "direct" else members + shards + 2 * own + 6
    # A pause is followed by one look at each owner's next mean.
    assert spent["get"] <= blobs + pointers + len(naps) * (1 if mode == "direct" else members), (spent, len(naps))


def test_resumed_replicas_that_are_behind_are_overtaken_at_once() -> None:
    with Fleet(3, failure_policy="skip", timeout_seconds=0.2) as three:
        three.round(0, {0: 1.0, 1: 1.0, 2: 1.0})
        three.all[2].close()
        three.round(1, {0: 3.0, 1: 5.0})
        back = join(three.store, 2, 3, failure_policy="skip", timeout_seconds=0.2)
        back.start(snapshot(SCALAR, 1), settings=SETTINGS, resumed=True)
        assert back.overtaken
        outcome = back.follow(1, SCALAR, digest(1), wait=False)
        assert outcome is not None and scalar(outcome) == 4.0 and not back.overtaken
        back.close()
