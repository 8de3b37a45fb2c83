"""How an Azure ML job stands, from its status and what the run history knows of it.

Invariant: pure. The status alone doesn't say whether a queued job has run before, nor why a cancelled one ended.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from composer_replication.diloco.serverless.jobs.job import Seen

__all__ = ["STATES", "explained"]

STATES = {
    **dict.fromkeys(("NotStarted", "Queued", "Preparing", "Provisioning", "Starting", "Paused"), "pending"),
    **dict.fromkeys(("Running", "Finalizing", "CancelRequested", "NotResponding"), "running"),
    "Completed": "completed",
    "Failed": "failed",
    "Canceled": "cancelled",
}
_EXIT_CODE = re.compile(r"(?:exit|status) code:? (\d+)|exited with code (\d+)", re.IGNORECASE)
_THE_SERVICES_OWN = ("SystemError", "ServiceError")


def explained(seen: Seen, details: Mapping[str, Any], limit: float) -> Seen:
    """With the run's details, for a job that is queued, failed or cancelled. `limit` is its time limit, seconds."""
    began = _seconds(details.get("lastStartTimeUtc") or details.get("startTimeUtc"))
    ended = _seconds(details.get("endTimeUtc"))
    if seen.native == "Queued":
        if began is None:
            return seen
        return replace(seen, state="preempted", will_retry=True, reason="its machine was taken; it is queued again")
    error = (details.get("error") or {}).get("error") or {}
    why = " ".join(str(error.get("message", "")).split())
    if seen.native == "Canceled":
        late = bool(limit) and began is not None and ended is not None and ended - began >= limit
        return replace(seen, timed_out=late, reason=why)
    lost, code = error.get("code") in _THE_SERVICES_OWN, _EXIT_CODE.search(why)
    return replace(
        seen,
        state="preempted" if lost else seen.state,
        reason=why,
        exit_code=int(code[1] or code[2]) if code else None,
    )


def _seconds(text: str | None) -> float | None:
    """Of a time like 2026-11-01T00:00:00.1234567+00:00 or with Z."""
    if not text:
        return None
    whole = re.sub(r"\.\d+", "", text).replace("Z", "+00:00")
    return datetime.fromisoformat(whole).timestamp()
