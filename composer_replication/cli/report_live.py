"""`status --watch --web`: the page of `report` for a run that goes on.

Invariant: whatever happens to the store, the page stays and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from composer_replication.cli.live import COLUMNS, cells
from composer_replication.cli.report import run_of
from composer_replication.cli.view import RunReader
from composer_replication.errors import ReplicationError
from composer_replication.report import Run, payload
from composer_replication.report.live import LiveServer

__all__ = ["live_look", "serve_live"]


def serve_live(reader: RunReader, source: str, *, port: int, every_seconds: float) -> int:
    """Serve until Ctrl-C. Raises ValueError if the port is taken."""
    try:
        server = LiveServer(live_look(reader, source), port=port, every_seconds=every_seconds)
    except OSError as error:
        raise ValueError(f"--port {port}: {error.strerror or error}") from error
    print(f"{server.url} (Ctrl-C ends it)", flush=True)
    server.serve()
    return 0


def live_look(reader: RunReader, source: str) -> Callable[[], Mapping[str, Any]]:
    """What the page shows, again and again."""

    def look() -> Mapping[str, Any]:
        said: list[str] = []
        runs: list[Run] = []
        rows: list[list[str]] = []
        words = "waiting for the run"
        try:
            runs.append(run_of(reader, source, live=True))
            rows = [list(cells(row, runs[0].steps)) for row in reader.view("").rows]
            words = f"round {len(reader.rounds)} is open"
        except ReplicationError as error:
            said.append(str(error))
        live = {
            "words": words,
            "ended": reader.ended,
            "now": {"columns": list(COLUMNS), "rows": rows} if rows and not reader.ended else None,
        }
        return payload(runs, notices=said, live=live)

    return look
