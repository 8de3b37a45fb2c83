"""What `status` says of jobs: read from the store, or asked of the back ends.

Invariant: loads no vendor's client unless the back ends are to be asked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from composer_replication.diloco.serverless.jobs.marks import Marks
from composer_replication.store import open_store

__all__ = ["job_lines", "job_rows"]


def job_rows(uri: str, *, ask: bool = False) -> list[dict[str, Any]]:
    """The run's jobs, as the launcher saw them last and the replicas say; `ask`: as the back ends say now."""
    marks = Marks(open_store(uri, create=False))
    handles = list(marks.handles())
    if ask and (handles or marks.jobs()):
        from composer_replication.diloco.serverless.attach import attach

        executor, handles = attach(uri)
        handles = executor.poll(handles)
    rows: list[dict[str, Any]] = []
    for handle in handles:
        mark = marks.read(handle.replica_id, handle.name)
        row = handle.to_dict()
        if mark is not None:
            row |= {"own_state": mark.state, "seen": mark.seen, "host": mark.host}
            if not handle.ended:
                row["attempt"] = max(handle.attempt, handle.submission + mark.starts)
        rows.append(row)
    return rows


def job_lines(rows: Sequence[dict[str, Any]], *, ages: bool = True) -> list[str]:
    """The jobs as a table of plain text; without `ages` it is the same as long as nothing happens."""
    table = [("replica", "back end", "job", "state", "attempt", "last sign of life", "")]
    for row in rows:
        state = row["state"] + (f" ({row['native']})" if row["native"] else "")
        if "own_state" in row and row["state"] in ("pending", "running") and row["own_state"] != row["state"]:
            state += f", by its own word {row['own_state']}"
        if row["will_retry"]:
            state += ", to be started again"
        silent = max(0.0, time.time() - row["seen"]) if "seen" in row else None
        seen = "none" if silent is None else f"{silent:.0f} s ago" if ages else "seen"
        table.append(
            (str(row["replica_id"]), row["backend"], row["job_id"], state, str(row["attempt"]), seen, row["reason"])
        )
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return ["  ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)).rstrip() for line in table]
