"""Replicas of two ranks: one launcher's world of four processes is cut into two, with DDP or FSDP2 inside each."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.lightning import split
from tests.lightning.helpers import Numbered, Tiny, callback, in_threads, trainer
from tests.support.ranks import World, free_port

pytestmark = pytest.mark.processes
PRELOAD = ["tests.lightning.split"]
KINDS = ["ddp", "fsdp"]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


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


@pytest.mark.parametrize(("kind", "rank", "batch"), [slow("ddp", 1, 5), slow("ddp", 0, 3), pytest.param("fsdp", 1, 3)])
def test_sigterm_to_one_rank_stops_its_replica_which_goes_on_bit_for_bit(
    tmp_path: Path, kind: str, rank: int, batch: int
) -> None:
    straight = run(kind, tmp_path / "straight", batches=(9, 9), resume=True)
    script = partial(split.train, batches=(9, 9), stop=(rank, batch), stopped_replica=1)
    first = World(PRELOAD, script, (kind, tmp_path / "cut"), size=4)
    stopped = first.end(ranks=(2, 3))
    assert [one["stopped"] for one in stopped.values()] == [143, 143]
    # The ranks agree on it at the end of the next batch: inside an interval, or at its end, where they wait for others.
    assert [len(one["losses"]) for one in stopped.values()] == [batch + 1, batch + 1]
    script = partial(split.train, batches=(9, 9), resume=True)
    went_on = World(PRELOAD, script, (kind, tmp_path / "cut"), size=4, ranks=(2, 3)).end()
    others = first.end(ranks=(0, 1))
    for one, end in went_on.items():
        assert stopped[one]["losses"] + end["losses"] == straight[one]["losses"]
        assert stopped[one]["seen"] + end["seen"] == straight[one]["seen"]
        assert end["hashes"] == straight[one]["hashes"][-len(end["hashes"]) :]
        assert end["digest"] == straight[0]["digest"] == others[0]["digest"]
    assert os.path.isdir(went_on[2]["checkpoint"]) == (kind == "fsdp")


@pytest.mark.parametrize(("kind", "rank"), [slow("ddp", 0), pytest.param("ddp", 1), slow("fsdp", 1)])
def test_what_one_rank_alone_finds_bad_the_whole_replica_drops(tmp_path: Path, kind: str, rank: int) -> None:
    ends = run(kind, tmp_path, batches=(6, 6), spoil=("nan", 1, rank, 3))
    assert [[members for _, _, members, _ in one["rounds"]] for one in ends.values()] == [[(0,), (0, 1)]] * 4
    assert [any("weren't finite" in line for line in one["said"]) for one in ends.values()] == [
        False,
        False,
        True,
        True,
    ]
    assert pattern(ends, 6)[2:] == [(True, True), (True, False), (True, False), (True, True)]
    assert all(torch.isfinite(torch.tensor(flat)).all() for flat in ends[2]["weights"].values())


def test_a_rank_that_dies_ends_its_replica_at_once_and_the_others_at_the_deadline(tmp_path: Path) -> None:
    # In the second round: the first waits for as long as replicas may take to start.
    script = partial(split.train, batches=(9, 9), spoil=("dies", 0, 1, 6), timeout=3.0)
    world = World(PRELOAD, script, ("ddp", tmp_path), size=4)
    ends = world.end(ranks=(0, 2, 3))
    assert ends[0]["error"] == "RankLost", ends[0]["text"]
    assert ends[2]["error"] == ends[3]["error"] == "RoundAborted" and ends[2]["text"] == ends[3]["text"]


def test_an_error_of_rank_0_is_everybody_s(tmp_path: Path) -> None:
    blocked = tmp_path / "run"
    blocked.mkdir()
    (blocked / "store").write_text("a file where the store's folder should be")
    ends = run("ddp", blocked, batches=(3, 3))
    assert {one["error"] for one in ends.values()} == {"StoreError"}
    assert len({one["text"] for one in ends.values()}) == 1


def test_two_ranks_are_one_process_with_the_same_batch(tmp_path: Path) -> None:
    """To rounding: the mean of two gradients of one sample each against the gradient of the mean over both."""
    ends = run("ddp", tmp_path, batches=(9, 9), resume=True, optimizer="sgd")

    def replica(index: int, collective: Any) -> dict[str, Any]:
        ids = [[4 * step + 2 * index, 4 * step + 2 * index + 1] for step in range(9)]
        samples = Numbered(160)
        batches = [{name: torch.stack([samples[i][name] for i in pair]) for name in ("id", "x", "y")} for pair in ids]
        module = Tiny(seed=index, scheduler=True, lr=0.02)
        ours = callback(collective, base_horizon=3)
        trainer(ours, max_epochs=1, strategy="auto").fit(module, DataLoader(batches, batch_size=None))
        return {name: tensor.tolist() for name, tensor in module.named_parameters()}

    plain = in_threads(2, replica)[0]
    for name, values in plain.items():
        # Nine steps at a rate of 0.02 on values below 1: some units of 2**-24 each.
        torch.testing.assert_close(torch.tensor(ends[0]["weights"][name]), torch.tensor(values), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_over_a_process_group_the_same_bits_as_through_a_store(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    group = run("fsdp", tmp_path / "group", batches=(5, 5), resume=True, address=address)
    store = run("fsdp", tmp_path / "store", batches=(5, 5), resume=True)
    assert pattern(group, 5) == [(True, False), (True, False), (True, True), (True, False), (True, True)]
    assert {one["digest"] for one in (*group.values(), *store.values())} == {group[0]["digest"]}
