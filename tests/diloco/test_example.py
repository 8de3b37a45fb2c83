"""The example of a hand-written loop runs as it stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.processes
def test_two_replicas_by_hand(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / "plain_loop.py"), f"file://{tmp_path / 'run'}"]
    replicas = [subprocess.Popen([*command, str(i), "2"], env=env, stdout=subprocess.PIPE, text=True) for i in range(2)]
    outputs = [replica.communicate(timeout=120)[0].splitlines() for replica in replicas]
    assert [replica.returncode for replica in replicas] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1] and outputs[0][-1].startswith("final weights ")
    assert [line.split(",")[0] for line in outputs[0][:-1]] == [f"round {i}: 10 steps" for i in range(6)]
