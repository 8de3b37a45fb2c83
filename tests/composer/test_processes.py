"""A user's script under Composer's own launcher: each of its processes is a replica."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("composer")

from composer.utils import get_free_tcp_port

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "tests" / "composer" / "user_script.py"
pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]  # starting replicas is slow on a busy machine


def launch(out: Path, batches: int, *flags: str) -> subprocess.Popen[str]:
    launcher = Path(sys.executable).parent / "composer"
    logs = ("--stdout", f"{out}/{{rank}}.log", "--stderr", f"{out}/{{rank}}.err")
    return subprocess.Popen(
        [str(launcher), *flags, *logs, "-m", "composer_replication.run", str(SCRIPT), str(out), str(batches)],
        cwd=out,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RUN_NAME": "job7"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> None:
    try:
        text = process.communicate(timeout=500)[0]
    finally:
        process.kill()
    assert process.returncode == 0, text


def results(out: Path, replicas: int) -> list[dict[str, Any]]:
    return [json.loads((out / f"replica-{index}.json").read_text()) for index in range(replicas)]


def equal_after(ends: list[dict[str, Any]]) -> list[bool]:
    return [len(set(weights)) == 1 for weights in zip(*(one["weights"] for one in ends), strict=True)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four replicas, 8 batches, rounds of 3."""
    out = tmp_path_factory.mktemp("undisturbed")
    end(launch(out, 8, "-n", "4"))
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
def test_two_nodes_are_one_fleet(tmp_path: Path) -> None:
    port = str(get_free_tcp_port())
    where = ("-n", "1", "--world_size", "2", "--master_addr", "127.0.0.1", "--master_port", port)
    nodes = [launch(tmp_path, 4, *where, "--node_rank", str(node)) for node in (0, 1)]
    for node in nodes:
        end(node)
    ends = results(tmp_path, 2)
    assert equal_after(ends) == [False, False, True, True]
    assert [one["run_name"] for one in ends] == ["job7-replica0", "job7-replica1"]
