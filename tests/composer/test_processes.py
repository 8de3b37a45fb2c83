"""A user's script under Composer's own launcher: each of its processes is a replica."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("composer")

from composer.utils import get_free_tcp_port

from tests.composer.launching import all_hold, ended, launched, results, states, stopped

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]  # starting replicas is slow on a busy machine
FOUR = ("-n", "4")


def train(out: Path, batches: int) -> None:
    with launched(out, batches, launcher=FOUR) as process:
        ended(process)


def equal_after(ends: list[dict[str, Any]]) -> list[bool]:
    return [len(set(weights)) == 1 for weights in zip(*(one["weights"] for one in ends), strict=True)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four replicas, 8 batches, rounds of 3."""
    out = tmp_path_factory.mktemp("undisturbed")
    train(out, 8)
    return out


def test_four_processes_of_composer_are_four_replicas(undisturbed: Path) -> None:
    ends = results(undisturbed, 4)
    # Apart inside the intervals, one model at their ends: after batches 3, 6 and the last.
    assert equal_after(ends) == [False, False, True, False, False, True, False, True]
    everyone = [0, 1, 2, 3]
    for index, one in enumerate(ends):
        assert one["rounds"] == [[0, 3, everyone], [1, 3, everyone], [2, 2, everyone]]
        assert (one["world"], one["group"]) == (["0", "1", "0", "1"], False)
        assert one["run_name"] == f"job7-replica{index}"
        assert (undisturbed / f"job7-replica{index}" / "ep0-ba4-rank0.pt").is_file()
    assert len({one["digest"] for one in ends}) == 1


@pytest.mark.slow
def test_stopped_inside_an_interval_and_started_again_they_end_alike(undisturbed: Path, tmp_path: Path) -> None:
    """SIGTERM to the launcher after batch 5 of rounds of 3; the same command again, with the script's autoresume."""
    (tmp_path / "hold").touch()
    with launched(tmp_path, 8, launcher=FOUR) as process:
        all_hold(tmp_path, 4, lambda: process.poll() is None)
        stopped(process)
    assert states(tmp_path, 4) == ["preempted"] * 4
    assert not list(tmp_path.glob("replica-*.json"))
    (tmp_path / "hold").unlink()
    train(tmp_path, 8)
    for straight, resumed in zip(results(undisturbed, 4), results(tmp_path, 4), strict=True):
        assert resumed["digest"] == straight["digest"]
        # From the checkpoint after batch 4 on, batch by batch.
        assert resumed["weights"] == straight["weights"][4:]
        assert resumed["rounds"] == straight["rounds"][1:]


@pytest.mark.slow
def test_two_nodes_are_one_fleet(tmp_path: Path) -> None:
    where = ("-n", "1", "--world_size", "2", "--master_addr", "127.0.0.1", "--master_port", str(get_free_tcp_port()))
    with (
        launched(tmp_path, 4, launcher=(*where, "--node_rank", "0")) as first,
        launched(tmp_path, 4, launcher=(*where, "--node_rank", "1")) as second,
    ):
        ended(first)
        ended(second)
    ends = results(tmp_path, 2)
    assert equal_after(ends) == [False, False, True, True]
    assert [one["run_name"] for one in ends] == ["job7-replica0", "job7-replica1"]
