"""Replicas of two ranks: one launcher's world of four processes is cut into two, with DDP or FSDP2 inside each."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.lightning import split
from tests.support.ranks import World

pytestmark = pytest.mark.processes
PRELOAD = ["tests.lightning.split"]
KINDS = ["ddp", "fsdp"]


def run(kind: str, out: Path, *, ranks: Any = None, size: int = 4, **options: Any) -> dict[int, Any]:
    return World(PRELOAD, partial(split.train, **options), (kind, out), size=size, ranks=ranks).end()


def pattern(ends: dict[int, Any], batches: int) -> list[tuple[bool, bool]]:
    """For each batch: the ranks of each replica agree; the replicas do."""
    found = []
    for batch in range(batches):
        hashes = [ends[rank]["hashes"][batch] for rank in range(4)]
        found.append((hashes[0] == hashes[1] and hashes[2] == hashes[3], hashes[0] == hashes[2]))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_of_two_ranks_end_together_however_much_data_each_has(tmp_path: Path, kind: str) -> None:
    ends = run(kind, tmp_path, batches=(8, 5), validate=True, validate_with="shared")
    # One model inside each replica always; one in the fleet at the boundaries: after batches 3 and 6, of the shorter
    # replica after 3 and its last.
    assert pattern(ends, 5) == [(True, False), (True, False), (True, True), (True, False), (True, False)]
    assert len({one["digest"] for one in ends.values()}) == 1
    assert len({tuple(map(str, one["weights"].values())) for one in ends.values()}) == 1
    assert [one["world"] for one in ends.values()] == [(0, 2, 2), (1, 2, 2), (0, 2, 2), (1, 2, 2)]
    for rank, one in ends.items():
        # Each replica's own number, not the fleet's mean; and each replica validates the whole ten samples.
        assert set(one["synced"]) == {float(rank // 2)} and one["validated"] == 10.0
    assert ends[0]["rounds"] == ends[1]["rounds"] and len(ends[0]["rounds"]) == 3
    seen = [[i for batch in one["seen"] for i in batch] for one in ends.values()]
    assert len({i for ids in seen for i in ids}) == sum(map(len, seen)) == 2 * 8 + 2 * 5


@pytest.mark.parametrize(("kind", "rank", "batch"), [("ddp", 1, 4), ("ddp", 0, 2), ("fsdp", 1, 2)])
def test_sigterm_to_one_rank_stops_its_replica_which_goes_on_bit_for_bit(
    tmp_path: Path, kind: str, rank: int, batch: int
) -> None:
    straight = run(kind, tmp_path / "straight", batches=(9, 9), resume=True)
    script = partial(split.train, batches=(9, 9), stop=(rank, batch), stopped_replica=1)
    first = World(PRELOAD, script, (kind, tmp_path / "cut"), size=4)
    stopped = first.end(ranks=(2, 3))
    assert [one["stopped"] for one in stopped.values()] == [143, 143]
    # The ranks agree one batch after the signal, at the end of the next: inside an interval, or while they wait for the
    # other replica at its end.
    assert [len(one["losses"]) for one in stopped.values()] == [batch + 2, batch + 2]
    script = partial(split.train, batches=(9, 9), resume=True)
    went_on = World(PRELOAD, script, (kind, tmp_path / "cut"), size=4, ranks=(2, 3)).end()
    others = first.end(ranks=(0, 1))
    for one, end in went_on.items():
        assert stopped[one]["losses"] + end["losses"] == straight[one]["losses"]
        assert stopped[one]["seen"] + end["seen"] == straight[one]["seen"]
        assert end["hashes"] == straight[one]["hashes"][-len(end["hashes"]) :]
        assert end["digest"] == straight[0]["digest"] == others[0]["digest"]
    assert os.path.isdir(went_on[2]["checkpoint"]) == (kind == "fsdp")
