"""A submitted replica, as values: what a launcher keeps, and what another one needs to take over.

Invariant: a handle holds no credentials and nothing that only this process knows, and is the same after JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from composer_replication.diloco.serverless.plain_values import from_values
from composer_replication.errors import ExecutorError

__all__ = ["ENDED", "STATES", "ReplicaHandle", "ReplicaResult", "preemption_metrics"]

STATES = ("pending", "running", "completed", "failed", "preempted", "cancelled")
ENDED = frozenset({"completed", "failed", "preempted", "cancelled"})


@dataclass(frozen=True)
class ReplicaHandle:
    """A submitted job. `poll` gives handles with the present `state`."""

    replica_id: int
    backend: str
    job_id: str  # the back end's own; "" if it didn't take the job
    log_url: str | None = None
    state: str = "running"  # one of STATES
    attempt: int = 1  # which start of the replica this is, those by the back end itself included
    exit_code: int | None = None
    will_retry: bool = False  # it has failed or was preempted, and will be started again
    native: str = ""  # the back end's own word for the state
    reason: str = ""  # why it is so, or why it wasn't taken
    name: str = ""  # of the job, chosen here: the same for whoever launches this run
    submission: int = 0  # which job of this replica it is, from 0
    preemptions: int = 0  # how many times it was started again because its machine was taken or it was killed
    errors: int = 0  # and because its own code had failed
    retry_at: float | None = None  # no new job before this time (seconds since 1970)

    @property
    def ended(self) -> bool:
        return self.state in ENDED and not self.will_retry

    @property
    def restarts(self) -> int:
        return self.attempt - 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ReplicaHandle:
        """Raises ExecutorError for what isn't a handle. Unknown keys, of later versions, are passed over."""
        try:
            return from_values(cls, values)
        except TypeError as error:
            raise ExecutorError(f"not a replica's handle: {error}") from error


@dataclass(frozen=True)
class ReplicaResult:
    """How one replica ended. `metrics` has what the replica wrote, and attempts, preemptions and their rate."""

    replica_id: int
    status: str  # completed, failed, preempted or cancelled
    final_checkpoint_uri: str | None
    metrics: dict[str, Any]


def preemption_metrics(handle: ReplicaHandle) -> dict[str, Any]:
    """For `ReplicaResult.metrics`: attempts, preemptions, and preemptions per attempt."""
    return {
        "attempts": handle.attempt,
        "preemptions": handle.preemptions,
        "preemption_rate": handle.preemptions / handle.attempt,
    }
