"""The seam to whatever runs replicas: start jobs, watch them, stop them, collect how they ended.

Invariant: an executor carries no tensors and no control traffic. One replica is one job that is told its id, how many
there are, and where the store is; everything else goes through the store.
"""

from __future__ import annotations

import logging
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

from composer_replication.diloco.serverless.handle import ReplicaHandle, ReplicaResult
from composer_replication.diloco.serverless.spec import ReplicaSpec, check_fleet
from composer_replication.errors import ExecutorError, ReplicationError

__all__ = [
    "BackendUnavailable",
    "BaseExecutor",
    "CollectTimeout",
    "JobGone",
    "QuotaExceeded",
    "ServerlessExecutor",
]

logger = logging.getLogger(__name__)


class CollectTimeout(ExecutorError, TimeoutError):
    """Replicas were still running when `collect`'s time was over. They go on."""


class QuotaExceeded(ExecutorError):
    """The back end takes no more now: too many requests, or no capacity. Worth another try, later."""


class JobGone(ExecutorError):
    """The back end knows no job of this id: it was deleted, or belongs to another account."""


class BackendUnavailable(ExecutorError):
    """The back end doesn't answer, or fails by itself. What runs there goes on. Worth another try."""


@runtime_checkable
class ServerlessExecutor(Protocol):
    """What a back end offers to host a fleet. Implement these to add your own."""

    def launch_replicas(self, specs: list[ReplicaSpec]) -> list[ReplicaHandle]:
        """Submit one job for each spec, in order. A job that isn't taken comes back with `job_id=""`.

        ValueError or ExecutorError for what can't work, before anything is started. Called again, by this process or
        another, it finds the jobs that are there and submits none twice.
        """
        ...

    def poll(self, handles: list[ReplicaHandle]) -> list[ReplicaHandle]:
        """The same handles with their present state. Never waits for a job; starts replicas again that are due for
        it."""
        ...

    def stream_logs(self, handle: ReplicaHandle, *, after: int = 0) -> Iterator[str]:
        """The replica's log lines as they come, until it has ended; without the first `after` of this handle's job."""
        ...

    def cancel(self, handles: list[ReplicaHandle]) -> None:
        """Ask the jobs to stop; kill those that don't within their grace time. Harmless for ended ones."""
        ...

    def collect(self, handles: list[ReplicaHandle], *, timeout: float | None = None) -> list[ReplicaResult]:
        """Wait until all have ended. Raises CollectTimeout after `timeout` seconds; the jobs go on."""
        ...

    @property
    def backend_name(self) -> str: ...

    @property
    def supports_inter_replica_network(self) -> bool:
        """Whether the back end connects replicas natively. The store is used in any case."""
        ...


class BaseExecutor(ABC):
    """What executors share: submitting with retries, partial failure, waiting with a time-out."""

    default_scheme: str = "file"  # of the store that goes with this back end
    max_concurrent_launches: int = 1
    submit_attempts: int = 1
    submit_backoff_seconds: float = 1.0  # doubles with each attempt, up to a minute, and is spread at random
    poll_seconds: float = 1.0
    clock: Callable[[], float] = staticmethod(time.time)
    sleep: Callable[[float], None] = staticmethod(time.sleep)

    @property
    @abstractmethod
    def backend_name(self) -> str: ...

    @property
    def supports_inter_replica_network(self) -> bool:
        return False

    @abstractmethod
    def _submit(self, spec: ReplicaSpec) -> ReplicaHandle:
        """Start one replica. OSError, QuotaExceeded and BackendUnavailable are worth another try."""

    @abstractmethod
    def _result(self, handle: ReplicaHandle) -> ReplicaResult:
        """How an ended replica ended."""

    @abstractmethod
    def poll(self, handles: list[ReplicaHandle]) -> list[ReplicaHandle]: ...

    @abstractmethod
    def stream_logs(self, handle: ReplicaHandle, *, after: int = 0) -> Iterator[str]: ...

    @abstractmethod
    def cancel(self, handles: list[ReplicaHandle]) -> None: ...

    def launch_replicas(self, specs: list[ReplicaSpec]) -> list[ReplicaHandle]:
        """Submit all; ValueError for specs that can't be one fleet, before anything starts."""
        check_fleet(specs)
        with ThreadPoolExecutor(max(1, min(self.max_concurrent_launches, len(specs)))) as pool:
            return list(pool.map(self._submit_or_tell, specs))

    def check_specs(self, specs: list[ReplicaSpec]) -> None:
        """Raise what `launch_replicas` would raise before it starts anything."""
        check_fleet(specs)

    def last_lines(self, handle: ReplicaHandle, count: int = 20) -> list[str]:
        """The end of an ended replica's log."""
        return list(deque(self.stream_logs(handle), maxlen=count))

    def _submit_or_tell(self, spec: ReplicaSpec) -> ReplicaHandle:
        try:
            return self._patiently(lambda: self._submit(spec), f"replica {spec.replica_id}")
        except (OSError, ReplicationError) as error:
            logger.warning("%s did not take replica %d: %s", self.backend_name, spec.replica_id, error)
            return ReplicaHandle(spec.replica_id, self.backend_name, "", state="failed", reason=str(error))

    def _patiently(self, submit: Callable[[], ReplicaHandle], who: str) -> ReplicaHandle:
        for attempt in range(1, self.submit_attempts):
            try:
                return submit()
            except (OSError, QuotaExceeded, BackendUnavailable) as error:
                longest = min(60.0, self.submit_backoff_seconds * 2.0 ** (attempt - 1))
                pause = longest * random.uniform(0.5, 1.0)  # so that a fleet's launches don't come back together
                logger.warning("%s, attempt %d: %s; trying again in %.1f s", who, attempt, error, pause)
                self.sleep(pause)
        return submit()

    def collect(self, handles: list[ReplicaHandle], *, timeout: float | None = None) -> list[ReplicaResult]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            handles = self.poll(handles)
            running = [handle.replica_id for handle in handles if not handle.ended]
            if not running:
                return [self._result(handle) if handle.job_id else _never_started(handle) for handle in handles]
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise CollectTimeout(f"replicas {running} are still running after {timeout:g} s")
            self.wait(handles, self.poll_seconds if left is None else min(left, self.poll_seconds))

    def wait(self, handles: list[ReplicaHandle], seconds: float) -> None:
        """Pause for at most `seconds`; executors that hear of an end sooner return sooner."""
        self.sleep(seconds)


def _never_started(handle: ReplicaHandle) -> ReplicaResult:
    metrics = {"error": handle.reason} if handle.reason else {}
    return ReplicaResult(handle.replica_id, "failed", None, metrics)
