"""Replicas of two ranks under Composer: DDP inside each, rounds between them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("composer")

from tests.composer import split
from tests.support.ranks import World

PRELOAD = ["tests.composer.split"]
pytestmark = pytest.mark.processes


def pattern(weights: list[list[str]]) -> list[tuple[bool, bool]]:
    """For each batch: the ranks of each replica agree; the replicas do."""
    return [(a == b and c == d, a == c) for a, b, c, d in zip(*weights, strict=True)]


APART, TOGETHER = (True, False), (True, True)


def test_two_by_two_ddp(tmp_path: Path) -> None:
    straight = World(PRELOAD, split.train, (tmp_path / "straight", 8), size=4).end()
    assert pattern([one["weights"] for one in straight.values()]) == [
        *[APART, APART, TOGETHER, APART, APART, TOGETHER, APART, TOGETHER]
    ]
    assert [one["world"] for one in straight.values()] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert len({one["digest"] for one in straight.values()}) == 1
    samples = [sample for one in straight.values() for sample in one["samples"]]
    assert len(samples) == len(set(samples)) == 4 * 8 * 2  # every process its own share
