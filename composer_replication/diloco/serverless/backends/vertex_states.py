"""What a Vertex AI custom job's state and error say, in our words.

Facts of the service that this rests on: there is no state for a machine that was taken for good, only an error; the
exit code is in the error's text; a job whose time is over is cancelled by the service.
"""

from __future__ import annotations

import re
from typing import Any

from composer_replication.diloco.serverless.jobs.job import Seen

__all__ = ["STATES", "seen"]

STATES = {
    "JOB_STATE_UNSPECIFIED": "pending",
    "JOB_STATE_QUEUED": "pending",
    "JOB_STATE_PENDING": "pending",
    "JOB_STATE_PAUSED": "pending",
    "JOB_STATE_RUNNING": "running",
    "JOB_STATE_UPDATING": "running",
    "JOB_STATE_CANCELLING": "running",
    "JOB_STATE_SUCCEEDED": "completed",
    "JOB_STATE_FAILED": "failed",
    "JOB_STATE_PARTIALLY_SUCCEEDED": "failed",
    "JOB_STATE_EXPIRED": "failed",
    "JOB_STATE_CANCELLED": "cancelled",
}
_TAKEN_CODES = {8, 14}  # RESOURCE_EXHAUSTED, UNAVAILABLE
_TAKEN = re.compile(r"preempt|resource_?exhausted|unavailable|stockout|insufficient capacity", re.IGNORECASE)
_LATE = re.compile(r"time(d)?[ -]?out|deadline[ _]exceeded|maximum running time", re.IGNORECASE)
_EXIT_CODE = re.compile(r"(?:non-zero status of|exit(?:ed with)? (?:code|status):?) (\d+)(\(SIG)?", re.IGNORECASE)


def seen(job: Any) -> Seen:
    """What a CustomJob says."""
    native, code, words = job.state.name, job.error.code, " ".join(job.error.message.split())
    state, exit_code = STATES.get(native, "pending"), _EXIT_CODE.search(words)
    limit = job.job_spec.scheduling.timeout
    late = bool(job.start_time and job.end_time and limit and job.end_time - job.start_time >= limit)
    if exit_code is None:
        late = late or code == 4 or _LATE.search(words) is not None
    if native == "JOB_STATE_EXPIRED":
        words, late = words or "no machine was free within max_wait_hours", False
    elif state == "failed" and exit_code is None and not late and (code in _TAKEN_CODES or _TAKEN.search(words)):
        state = "preempted"
    _, project, _, location, _, number = job.name.split("/")
    return Seen(
        state,
        native,
        words,
        None if exit_code is None else int(exit_code[1]) + (128 if exit_code[2] else 0),
        timed_out=late and state in ("failed", "cancelled"),
        log_url=f"https://console.cloud.google.com/ai/platform/locations/{location}/training/{number}?project={project}",
    )
