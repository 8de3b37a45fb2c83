"""Replicas of two ranks under Composer: DDP inside each, rounds between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("composer")

from tests.composer import split
from tests.composer.launching import RUN, all_hold, ended, launched, results, states, stopped
from tests.support.ranks import World

PRELOAD = ["tests.composer.split"]
pytestmark = pytest.mark.processes


def start(out: Path, batches: int = 8) -> World:
    out.mkdir(exist_ok=True)
    return World(PRELOAD, split.train, (out, batches), size=4, **RUN)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two replicas of two ranks, 8 batches, rounds of 3."""
    return list(start(tmp_path_factory.mktemp("undisturbed")).end().values())


def pattern(ends: list[dict[str, Any]]) -> list[tuple[bool, bool]]:
    """For each batch: the ranks of each replica agree; the replicas do."""
    return [(a == b and c == d, a == c) for a, b, c, d in zip(*(one["weights"] for one in ends), strict=True)]


def went_on(straight: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> None:
    """From the checkpoint after batch 4 on, inside the second round, batch by batch."""
    for one, again in zip(straight, resumed, strict=True):
        assert again["weights"] == one["weights"][4:]
        assert again["samples"] == one["samples"][4 * 2 :]
        assert (again["digest"], again["rounds"]) == (one["digest"], one["rounds"][1:])


APART, TOGETHER = (True, False), (True, True)


def test_two_by_two_ddp(undisturbed: list[dict[str, Any]]) -> None:
    assert pattern(undisturbed) == [APART, APART, TOGETHER, APART, APART, TOGETHER, APART, TOGETHER]
    assert [one["world"] for one in undisturbed] == [[rank, "2", rank, "2"] for rank in "0101"]
    assert [one["run_name"] for one in undisturbed] == [f"job7-replica{index}" for index in (0, 0, 1, 1)]
    assert len({one["digest"] for one in undisturbed}) == 1
    samples = [sample for one in undisturbed for sample in one["samples"]]
    assert len(samples) == len(set(samples)) == 4 * 8 * 2  # every process its own share


def test_stopped_inside_an_interval_and_started_again_they_end_alike(
    undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    """SIGTERM to all of them, as Composer's launcher sends it."""
    (tmp_path / "hold").touch()
    world = start(tmp_path)
    all_hold(tmp_path, 4, lambda: all(process.is_alive() for process in world.processes.values()))
    for process in world.processes.values():
        process.terminate()
    assert list(world.end().values()) == [143] * 4
    (tmp_path / "hold").unlink()
    went_on(undisturbed, list(start(tmp_path).end().values()))


@pytest.mark.slow
@pytest.mark.timeout(900)  # starting processes is slow on a busy machine
def test_composer_s_launcher_stopped_and_started_again(undisturbed: list[dict[str, Any]], tmp_path: Path) -> None:
    """The same under the launcher itself, with an unmodified script."""

    def launch() -> Any:
        return launched(tmp_path, 8, launcher=("-n", "4"), runner=("--ranks-per-replica", "2"))

    (tmp_path / "hold").touch()
    with launch() as process:
        all_hold(tmp_path, 4, lambda: process.poll() is None)
        stopped(process)
    assert states(tmp_path, 2) == ["preempted"] * 2
    (tmp_path / "hold").unlink()
    with launch() as process:
        ended(process)
    went_on(undisturbed, results(tmp_path, 2, ranks=2))
