"""What `launch` says while replicas start, which may take minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.live import FleetView, Row, Screen
from composer_replication.cli.watch import Watch
from composer_replication.diloco.serverless.handle import ReplicaHandle
from composer_replication.diloco.serverless.local_process import LocalProcessExecutor
from composer_replication.recipe import load_recipe
from composer_replication.store import open_store

RECIPE = str(Path(__file__).parents[2] / "recipes" / "quickstart.yaml")


class Logs(LocalProcessExecutor):
    """No processes; replica 0 has written a log."""

    lines: list[str] = []

    def last_lines(self, handle: ReplicaHandle, count: int = 20) -> list[str]:
        return self.lines[-count:] if handle.replica_id == 0 else []


def test_a_long_start_says_how_long_who_and_how_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = Logs(output=tmp_path)
    watch = Watch(load_recipe(RECIPE, ()), tmp_path, open_store("memory://starting"), executor)
    watch.handles = [ReplicaHandle(replica_id=replica, backend="local", job_id="1") for replica in range(2)]
    now = watch.began
    monkeypatch.setattr("composer_replication.cli.watch.time.monotonic", lambda: now)

    def said(at: float, *states: str, round: int | None = None) -> str:
        nonlocal now
        now = watch.began + at
        rows = [Row(replica=replica, state=state) for replica, state in enumerate(states)]
        rows.append(Row(replica=7, state="not seen"))  # started elsewhere: not ours to tell about
        view: Any = FleetView(title="", rows=rows, round=round)
        watch._tell_start(Screen(plain=True), view)
        return capsys.readouterr().out.strip()

    assert said(1, "starting", "starting") == ""
    words = "2 replicas are starting: imports, the model and the data come before the first step"
    assert said(6, "starting", "starting") == f"after 6.0 s {words} (replica 0's log: nothing yet)"
    assert said(11, "starting", "starting") == ""  # not again so soon
    executor.lines = ["replica 0 of 2 on here", "store memory://starting: ok", ""]
    assert said(13, "starting", "not seen").endswith(f"{words} (replica 0's log: store memory://starting: ok)")
    assert said(70, "training", "not seen", round=0).startswith("after 1 min 10 s replica 1 is starting")
    assert said(200, "training", "training", round=0) == ""
    assert said(2000, "training", "not seen", round=1) == ""  # the table says it from now on
