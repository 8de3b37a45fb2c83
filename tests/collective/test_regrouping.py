"""Replicas whose processes go between two rounds, and in the middle of one, over gloo."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch

from composer_replication.collective.regrouping import RegroupingCollective
from composer_replication.collective.rendezvous import Rendezvous
from composer_replication.errors import ReplicationError
from tests.collective import conformance
from tests.support.ranks import World, free_port

pytestmark = pytest.mark.processes
PRELOAD = ["tests.collective.conformance", "composer_replication.collective.regrouping"]
SIZE = 3
LAYOUT = conformance.MIXED


def begin(rank: int, address: str, seconds: float, policy: Any) -> RegroupingCollective:
    torch.set_num_threads(1)
    meeting = Rendezvous(address, replica=rank, ids=range(SIZE), run="r", timeout_seconds=seconds)
    made = RegroupingCollective(meeting, failure_policy=policy)
    conformance.begin(made, LAYOUT)
    return made


def one_goes(rank: int, address: str, policy: str, gone: int, when: str) -> Any:
    """Three rounds; replica `gone` is gone after the first, or in the middle of the second."""
    made = begin(rank, address, 5.0, policy)
    seen = []
    for round in range(3):
        values = torch.full((LAYOUT.elements,), float(10 * round + rank))
        mine = conformance.contribution(rank, round, LAYOUT, values)
        if round == 1 and rank == gone:
            if when == "between":
                os._exit(0)
            mine = type(mine)(mine.round, mine.report, mine.layout, lambda index: os._exit(0))  # type: ignore[arg-type]
        try:
            outcome = made.average(mine)
        except ReplicationError as error:
            return type(error).__name__
        mean = conformance.mean_of(outcome, LAYOUT)
        seen.append((float(mean[0]), [one.replica for one in outcome.members], dict(outcome.absent)))
    return seen


def run(policy: str, gone: int, when: str) -> dict[int, Any]:
    address = f"127.0.0.1:{free_port()}"
    script = partial(one_goes, address=address, policy=policy, gone=gone, when=when)
    return World(PRELOAD, script, size=SIZE).end(40, ranks=[rank for rank in range(SIZE) if rank != gone])


@pytest.mark.parametrize("gone", [1, 2])
def test_those_that_are_left_go_on(gone: int) -> None:
    left = [rank for rank in range(SIZE) if rank != gone]
    mean = sum(left) / 2
    expected = [
        (1.0, [0, 1, 2], {}),
        (10 + mean, left, {gone: "its process is gone"}),
        (20 + mean, left, {}),
    ]
    assert run("skip", gone, "between") == {rank: expected for rank in left}


def test_strict_and_in_the_middle_of_a_round_the_run_ends_for_all() -> None:
    assert run("strict", 2, "between") == {0: "RoundAborted", 1: "RoundAborted"}
    assert run("skip", 2, "inside") == {0: "RoundAborted", 1: "RoundAborted"}


def test_without_the_replica_that_opened_the_store_the_run_ends() -> None:
    assert run("skip", 0, "between") == {1: "RoundAborted", 2: "RoundAborted"}


def too_few(rank: int, address: str) -> str:
    made = begin(rank, address, 4.0, "skip")
    if rank:
        os._exit(0)
    values = torch.zeros(LAYOUT.elements)
    try:
        made.average(conformance.contribution(rank, 0, LAYOUT, values))
    except ReplicationError as error:
        return f"{type(error).__name__}: {error}"
    return "averaged"


def test_fewer_than_half_end_the_run() -> None:
    script = partial(too_few, address=f"127.0.0.1:{free_port()}")
    assert World(PRELOAD, script, size=SIZE).end(40, ranks=[0]) == {
        0: "RoundAborted: only replicas [0] are left, and a round needs 2"
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"address": "here"}, "address must be 'host:port', got 'here'"),
        ({"ids": [1, 0]}, "ids must be ascending and hold replica 0"),
        ({"replica": 3}, "ids must be ascending and hold replica 3"),
        ({"backend": "mpi"}, "backend must be 'gloo' or 'nccl', got 'mpi'"),
        ({"timeout_seconds": 0}, "timeout_seconds must be greater than 0, got 0"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rendezvous(**{"address": "127.0.0.1:1", "replica": 0, "ids": [0, 1], **change})
