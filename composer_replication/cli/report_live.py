"""`status --watch --web`: the page of `report` for a run that goes on.

Invariant: whatever happens to the store, the page stays and says what is wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from composer_replication.cli.live import COLUMNS, Row, cells
from composer_replication.cli.report import run_of
from composer_replication.cli.view import RunReader, shows_life
from composer_replication.errors import ObjectCorrupt, ReplicationError
from composer_replication.report import Run, payload
from composer_replication.report.live import LiveServer

__all__ = ["live_look", "serve_live", "tell_end"]

_CHECKS = 5  # pauses of the page between two looks for the run's end
_WORDS = {
    "waiting": "waiting for the run",
    "running": "running: round {} is open",
    "silent": "not ended, and no replica shows life: round {} is open",
    "lost": "the store does not answer",
    "ended": "the run has ended",
}


def serve_live(reader: RunReader, source: str, *, port: int, every_seconds: float) -> int:
    """Serve until Ctrl-C, beyond the run's end too: someone may be reading. Raises ValueError if the port is taken."""
    try:
        server = LiveServer(live_look(reader, source), port=port, every_seconds=every_seconds)
    except OSError as error:
        raise ValueError(f"--port {port}: {error.strerror or error}") from error
    print(f"{server.url} (Ctrl-C ends it)", flush=True)
    over = threading.Event()
    threading.Thread(target=tell_end, args=(server.values, over, _CHECKS * every_seconds, source), daemon=True).start()
    try:
        server.serve()
    finally:
        over.set()
    return 0


def tell_end(values: Callable[[], Mapping[str, Any]], over: threading.Event, pause: float, source: str) -> None:
    """Say once that the run has ended, whether or not a browser is there to see it. Until `over`, which others set."""
    while not over.is_set():
        if values()["live"]["state"] == "ended":
            keep = f"composer-replication report {source}"
            print(f"the run has ended; its page stays here until Ctrl-C ({keep} makes one to keep)", flush=True)
            return
        over.wait(pause)


def live_look(reader: RunReader, source: str) -> Callable[[], Mapping[str, Any]]:
    """What the page shows, again and again."""

    kept: list[Run] = []  # as it was when the store last answered

    def look() -> Mapping[str, Any]:
        said: list[str] = []
        runs: list[Run] = []
        rows: Sequence[Row] = []
        lost = False
        try:
            try:
                runs.append(run_of(reader, source, live=True))
            except ObjectCorrupt as error:  # the store answers
                said.append(str(error))
            rows = reader.view("").rows
            said += [f"replica {row.replica}: {row.note}" for row in rows if row.state == "unreadable"]
        except ReplicationError as error:
            said.append(str(error))
            lost = True
        runs = runs or (kept[:] if reader.fleet is not None else [])
        kept[:] = runs
        state = "lost" if lost and runs else "ended" if reader.ended else _state(rows)
        steps = runs[0].steps if runs else None
        now = {"columns": list(COLUMNS), "rows": [list(cells(row, steps)) for row in rows]}
        live = {
            "state": state,
            "words": _WORDS[state].format(len(reader.rounds)),
            "now": now if rows and state != "ended" else None,
        }
        return payload(runs, notices=said, live=live)

    return look


def _state(rows: Sequence[Row]) -> str:
    return {True: "running", False: "silent", None: "waiting"}[shows_life(rows)]
