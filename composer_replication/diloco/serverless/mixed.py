"""One fleet in several places: an executor over executors, each with its share of the replicas.

Invariant: what one place does or fails to do is told of its own replicas only. Only what can't work anywhere, a wrong
setting, stops a launch, and then before any place is asked to start anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from composer_replication.diloco.serverless.executor import (
    BackendUnavailable,
    BaseExecutor,
    QuotaExceeded,
    ServerlessExecutor,
)
from composer_replication.diloco.serverless.handle import ReplicaHandle, ReplicaResult
from composer_replication.diloco.serverless.spec import ReplicaSpec, check_fleet
from composer_replication.errors import ExecutorError, ReplicationError

__all__ = ["MixedExecutor"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


class MixedExecutor(BaseExecutor):
    """The first executor has the first replicas, and so on: `MixedExecutor([(modal, 2), (hf, 2)])` has 0 and 1 on the
    first and 2 and 3 on the second. All meet in one store.

    Args:
        groups: executors with their number of replicas.
    """

    def __init__(self, groups: Sequence[tuple[ServerlessExecutor, int]]) -> None:
        self.groups: list[tuple[ServerlessExecutor, range]] = []
        first = 0
        for executor, count in groups:
            if count < 1:
                raise ValueError(f"a group must have at least 1 replica, got {count} of {executor.backend_name}")
            self.groups.append((executor, range(first, first + count)))
            first += count
        if not self.groups:
            raise ValueError("groups is empty: give executors with their number of replicas")
        self.replicas = first
        # As patient as the slowest of them: asking it more often would be told off.
        self.poll_seconds = max(getattr(executor, "poll_seconds", 1.0) for executor, _ in self.groups)

    @property
    def backend_name(self) -> str:
        return "mixed"

    @property
    def backend_names(self) -> tuple[str, ...]:
        """Of the groups, in order."""
        return tuple(executor.backend_name for executor, _ in self.groups)

    def executor_of(self, replica: int) -> ServerlessExecutor:
        """Whose replica it is."""
        for executor, replicas in self.groups:
            if replica in replicas:
                return executor
        raise ValueError(f"replica {replica} belongs to no group: they have replicas 0 to {self.replicas - 1}")

    # -- launching -----------------------------------------------------------------------------------------------------

    def check_specs(self, specs: list[ReplicaSpec]) -> None:
        """Raise what a launch would raise before it starts anything, and what a place that doesn't answer says."""
        self._refusals(specs, outages=True)

    def launch_replicas(self, specs: list[ReplicaSpec]) -> list[ReplicaHandle]:
        """Check all groups, then start them side by side. A place that doesn't answer gives failed handles."""
        refused = self._refusals(specs, outages=False)

        def launch(number: int) -> list[ReplicaHandle]:
            executor, mine = self.groups[number][0], self._share(number, specs)
            try:
                if number in refused:
                    raise refused[number]
                return executor.launch_replicas(mine) if mine else []
            except (OSError, ReplicationError, ValueError) as error:
                logger.warning("%s did not start its replicas: %s", executor.backend_name, error)
                failed = ReplicaHandle(0, executor.backend_name, "", state="failed", reason=str(error))
                return [replace(failed, replica_id=spec.replica_id) for spec in mine]

        started = {handle.replica_id: handle for one in self._each(launch) for handle in one}
        return [started[spec.replica_id] for spec in specs]

    def _refusals(self, specs: list[ReplicaSpec], *, outages: bool) -> dict[int, Exception]:
        """By group, why its place can't be asked now. Raises what will never work (and outages, if told to)."""
        check_fleet(specs)
        for spec in specs:
            self.executor_of(spec.replica_id)
        refused: dict[int, Exception] = {}
        for number, (executor, _) in enumerate(self.groups):
            mine, check = self._share(number, specs), getattr(executor, "check_specs", None)
            try:
                if mine and check is not None:
                    check(mine)
            except (OSError, QuotaExceeded, BackendUnavailable) as error:
                if outages:
                    raise
                refused[number] = error
        return refused

    def _share(self, number: int, specs: list[ReplicaSpec]) -> list[ReplicaSpec]:
        replicas = self.groups[number][1]
        return [spec for spec in specs if spec.replica_id in replicas]

    def _each(self, work: Callable[[int], _T]) -> list[_T]:
        with ThreadPoolExecutor(len(self.groups)) as pool:
            return list(pool.map(work, range(len(self.groups))))

    def _submit(self, spec: ReplicaSpec) -> ReplicaHandle:
        return self.executor_of(spec.replica_id).launch_replicas([spec])[0]

    # -- watching ------------------------------------------------------------------------------------------------------

    def attach(self, rendezvous_uri: str) -> list[ReplicaHandle]:
        """The handles of the replicas that some launcher started on any of these."""
        found: list[ReplicaHandle] = []
        for number, (executor, _) in enumerate(self.groups):
            attach = getattr(executor, "attach", None)  # processes of another machine can't be attached to
            found += [one for one in (attach(rendezvous_uri) if attach else ()) if self._group(one) == number]
        return sorted(found, key=lambda handle: handle.replica_id)

    def poll(self, handles: list[ReplicaHandle]) -> list[ReplicaHandle]:
        def look(number: int) -> list[ReplicaHandle]:
            executor, mine = self.groups[number][0], self._handles(number, handles)
            try:
                return executor.poll(mine) if mine else []
            except (OSError, ReplicationError) as error:
                logger.warning("%s: %s", executor.backend_name, error)
                reason = f"{executor.backend_name} doesn't answer: {error}"
                return [one if one.ended else replace(one, reason=reason) for one in mine]

        present = {handle.replica_id: handle for one in self._each(look) for handle in one}
        return [present[handle.replica_id] for handle in handles]

    def _handles(self, number: int, handles: list[ReplicaHandle]) -> list[ReplicaHandle]:
        return [handle for handle in handles if self._group(handle) == number]

    def _group(self, handle: ReplicaHandle) -> int:
        """Whose handle it is: by the replica's number, unless it was started when the groups were others."""
        own = [n for n, (_, replicas) in enumerate(self.groups) if handle.replica_id in replicas]
        same = [n for n, name in enumerate(self.backend_names) if name == handle.backend]
        found = [n for n in own if n in same] or same or own
        if not found:
            raise ExecutorError(f"replica {handle.replica_id} ({handle.backend}) belongs to no group")
        return found[0]

    def _owner(self, handle: ReplicaHandle) -> ServerlessExecutor:
        return self.groups[self._group(handle)][0]

    def stream_logs(self, handle: ReplicaHandle, *, after: int = 0) -> Iterator[str]:
        lines = self._owner(handle).stream_logs
        return lines(handle, after=after) if after else lines(handle)  # type: ignore[call-arg]

    def last_lines(self, handle: ReplicaHandle, count: int = 20) -> list[str]:
        executor = self._owner(handle)
        return executor.last_lines(handle, count) if isinstance(executor, BaseExecutor) else []

    def cancel(self, handles: list[ReplicaHandle]) -> None:
        """Ask all of them to stop; then ExecutorError that names the places which could not be asked, if any."""

        def stop(number: int) -> str:
            executor, mine = self.groups[number][0], self._handles(number, handles)
            try:
                if mine:
                    executor.cancel(mine)
            except (OSError, ReplicationError) as error:
                return str(error)
            return ""

        problems = [problem for problem in self._each(stop) if problem]
        if problems:
            raise ExecutorError("; ".join(problems))

    def _result(self, handle: ReplicaHandle) -> ReplicaResult:
        return self._owner(handle).collect([handle])[0]  # it has ended: nothing to wait for
