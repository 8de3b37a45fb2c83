"""A replica that waits says so, for whom and how long: after 10, 30 and 60 s, and then every minute."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch

from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.object_store import keys
from composer_replication.errors import FleetMismatch, RoundAborted, RoundTimeout
from composer_replication.store import MemoryStore
from tests.collective.conformance import SCALAR, begin, contribution
from tests.collective.object_store.helpers import join
from tests.support.threads import run_threads


class FakeTime:
    def __init__(self) -> None:
        self.now, self.real = 0.0, False

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if self.real:
            time.sleep(0.002)  # lets the other replica's thread run
        else:
            self.now += seconds


def slow(fake: FakeTime) -> dict[str, Any]:
    # Pauses of at most a second: a line comes within a second of when it is due.
    times = {"timeout_seconds": 200.0, "start_timeout_seconds": 200.0, "max_poll_seconds": 1.0, "poll_seconds": 1.0}
    return {**times, "clock": fake.clock, "sleep": fake.sleep}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    records = [record for record in caplog.records if record.name == "composer_replication"]
    assert all(record.levelno == logging.WARNING for record in records)
    return [record.getMessage() for record in records]


def check(said: list[str], before: str, ending: str) -> None:
    starts = [line.rsplit(" in ", 1)[0] for line in said]
    assert starts == [f"{before}; {ending}"] * 5, said
    left = []
    for line in said:
        words = line.rsplit(" in ", 1)[1].split()
        left.append(60 * int(words[0]) + int(words[2]) if "min" in words else int(words[0]))
    # Due after 10, 30, 60, 120 and 180 s of the 200; a pause of up to 1 s, and rounding, may lie between.
    for found, due in zip(left, (190, 170, 140, 80, 20), strict=True):
        assert due - 2 <= found <= due, said


def test_the_wait_for_the_first_weights(caplog: pytest.LogCaptureFixture) -> None:
    store, fake = MemoryStore(), FakeTime()
    with pytest.raises(RoundTimeout):
        begin(join(store, 1, 2, **slow(fake)), SCALAR)
    check(lines(caplog), f"replica 1 waits for replica 0, not seen yet in {store.uri}", "gives up")


@pytest.mark.parametrize("policy", ["strict", "skip"])
def test_the_wait_in_a_round(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    store, fake = MemoryStore(), FakeTime()
    store.put(keys.member(2), b'{"counter": 1}')
    mine = join(store, 0, 3, failure_policy=policy, min_replicas=1, **slow(fake))
    begin(mine, SCALAR)
    try:
        with pytest.raises(RoundAborted):  # under skip, too: the first round asks for everyone
            mine.average(contribution(0, 0, SCALAR, torch.ones(1)))
    finally:
        mine.close()
    who = "replica 2 and for replica 1, not seen yet"
    check(lines(caplog), f"replica 0 waits for {who} in {store.uri}, round 0", "gives up")


def test_a_round_that_will_go_on_without_the_missing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    store, fake = MemoryStore(), FakeTime()
    fake.real = True
    mine = join(store, 0, 2, failure_policy="skip", min_replicas=1, **slow(fake))
    other = join(store, 1, 2, failure_policy="skip", min_replicas=1)
    run_threads([lambda: begin(mine, SCALAR), lambda: begin(other, SCALAR)])
    run_threads([lambda c=c: c.average(contribution(c.replica, 0, SCALAR, torch.ones(1))) for c in (mine, other)])
    other.close()
    fake.real = False
    outcome = mine.average(contribution(0, 1, SCALAR, torch.ones(1)))
    mine.close()
    assert [report.replica for report in outcome.members] == [0]
    check(lines(caplog), f"replica 0 waits for replica 1 in {store.uri}, round 1", "goes on without")


def test_a_short_wait_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeTime()
    with pytest.raises(RoundTimeout):
        begin(join(MemoryStore(), 1, 2, **{**slow(fake), "start_timeout_seconds": 9.0}), SCALAR)
    assert fake.now >= 9.0 and lines(caplog) == []


def test_a_fleet_s_many_other_tensors_are_counted_and_the_way_out_is_told() -> None:
    store = MemoryStore()
    begin(join(store, 0, 2), Layout(tuple(Slot(f"w{i}", (2,), "torch.float32") for i in range(9))))
    with pytest.raises(FleetMismatch) as caught:
        begin(join(store, 1, 2, codec="int8"), Layout(tuple(Slot(f"w{i}", (3,), "torch.float32") for i in range(9))))
    text = str(caught.value)
    assert "w2: " in text and "w3: " not in text and "; and 6 more" in text and "codec: 'int8' here" in text
    assert text.endswith(
        "Start all replicas with the same settings, or use another prefix if the first start was wrong"
    )
