"""The seam to whatever runs replicas: start jobs, watch them, stop them, collect how they ended.

Invariant: an executor carries no tensors and no control traffic. One replica is one job that is told its id, how many
there are, and where the store is; everything else goes through the store.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from composer_replication.errors import ExecutorError

__all__ = [
    "ENDED",
    "BaseExecutor",
    "CollectTimeout",
    "ReplicaHandle",
    "ReplicaResult",
    "ReplicaSpec",
    "ServerlessExecutor",
    "entrypoint_arguments",
]

logger = logging.getLogger(__name__)

ENDED = frozenset({"completed", "failed", "preempted", "cancelled"})


class CollectTimeout(ExecutorError, TimeoutError):
    """Replicas were still running when `collect`'s time was over. They go on."""


@dataclass(frozen=True)
class ReplicaSpec:
    """One replica's launch settings: by hand, or with `recipe`, which then says all that isn't identity.

    By hand it is the fixed interval (DiLoCo): `outer_rounds` rounds of `sync_every` inner steps. `model_id` is the
    name of a built-in model, or the import path of a LightningModule (`my_package.my_module.MyModel`) that can be
    constructed without arguments (a ComposerModel with `trainer="composer"`). `inner_optimizer` is e.g.
    `{"name": "AdamW", "lr": 4e-4}`.
    """

    replica_id: int
    num_replicas: int
    rendezvous_uri: str  # file://, memory:// or whatever else a store was registered for
    model_id: str = "byte_gpt"
    inner_optimizer: dict[str, Any] = field(default_factory=dict)
    sync_every: int = 500
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    outer_rounds: int = 100
    extra_env: dict[str, str] | None = field(default=None, repr=False)  # may hold credentials: never shown
    recipe: str | None = None  # path of a recipe file, as the replica sees it
    overrides: tuple[str, ...] = ()  # key=value, put over the recipe
    trainer: str = "lightning"  # or composer, whose own launcher then starts the replica

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, got {self.num_replicas}")
        if not 0 <= self.replica_id < self.num_replicas:
            raise ValueError(
                f"replica_id must be between 0 and num_replicas - 1 = {self.num_replicas - 1}, got {self.replica_id}"
            )
        if not self.rendezvous_uri:
            raise ValueError("rendezvous_uri is empty: give the store's URI, like file:///shared/run1")
        if self.trainer not in ("lightning", "composer"):
            raise ValueError(f"trainer must be 'lightning' or 'composer', got {self.trainer!r}")
        for name in ("sync_every", "outer_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class ReplicaHandle:
    """A submitted job. `poll` gives handles with the present `state`."""

    replica_id: int
    backend: str
    job_id: str  # "" if the back end didn't take the job
    log_url: str | None = None
    state: str = "running"  # running, restarting, or how it ended: completed, failed, preempted, cancelled
    restarts: int = 0
    exit_code: int | None = None

    @property
    def ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True)
class ReplicaResult:
    """How one replica ended."""

    replica_id: int
    status: str  # completed, failed, preempted or cancelled
    final_checkpoint_uri: str | None
    metrics: dict[str, Any]


@runtime_checkable
class ServerlessExecutor(Protocol):
    """What a back end offers to host a fleet. Implement these to add your own."""

    def launch_replicas(self, specs: list[ReplicaSpec]) -> list[ReplicaHandle]:
        """Submit one job for each spec, in order. A job that isn't taken comes back with `job_id=""`."""
        ...

    def poll(self, handles: list[ReplicaHandle]) -> list[ReplicaHandle]:
        """The same handles with their present state. Never waits for a job."""
        ...

    def stream_logs(self, handle: ReplicaHandle) -> Iterator[str]:
        """The replica's log lines from the first one, as they come, until it has ended."""
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

    submit_attempts: int = 1
    poll_seconds: float = 1.0

    @property
    @abstractmethod
    def backend_name(self) -> str: ...

    @property
    def supports_inter_replica_network(self) -> bool:
        return False

    @abstractmethod
    def _submit(self, spec: ReplicaSpec) -> ReplicaHandle:
        """Start one job. Raises OSError or ExecutorError if the back end doesn't take it."""

    @abstractmethod
    def _result(self, handle: ReplicaHandle) -> ReplicaResult:
        """How an ended job ended."""

    @abstractmethod
    def poll(self, handles: list[ReplicaHandle]) -> list[ReplicaHandle]: ...

    @abstractmethod
    def stream_logs(self, handle: ReplicaHandle) -> Iterator[str]: ...

    @abstractmethod
    def cancel(self, handles: list[ReplicaHandle]) -> None: ...

    def launch_replicas(self, specs: list[ReplicaSpec]) -> list[ReplicaHandle]:
        """Submit the specs in order; ValueError for specs that can't be one fleet, before anything starts."""
        check_fleet(specs)
        handles: list[ReplicaHandle] = []
        for spec in specs:
            try:
                handles.append(self._submit_with_retries(spec))
            except (OSError, ExecutorError) as error:
                logger.warning("%s did not take replica %d: %s", self.backend_name, spec.replica_id, error)
                handles.append(ReplicaHandle(spec.replica_id, self.backend_name, "", state="failed"))
        return handles

    def _submit_with_retries(self, spec: ReplicaSpec) -> ReplicaHandle:
        for attempt in range(1, self.submit_attempts):
            try:
                return self._submit(spec)
            except (OSError, ExecutorError) as error:
                logger.warning("replica %d, attempt %d: %s; trying again", spec.replica_id, attempt, error)
                time.sleep(min(30.0, 2.0 ** (attempt - 1)))
        return self._submit(spec)

    def collect(self, handles: list[ReplicaHandle], *, timeout: float | None = None) -> list[ReplicaResult]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            present = self.poll(handles)
            running = [handle.replica_id for handle in present if not handle.ended]
            if not running:
                return [
                    self._result(handle) if handle.job_id else ReplicaResult(handle.replica_id, "failed", None, {})
                    for handle in present
                ]
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise CollectTimeout(f"replicas {running} are still running after {timeout:g} s")
            self.wait(present, self.poll_seconds if left is None else min(left, self.poll_seconds))

    def wait(self, handles: list[ReplicaHandle], seconds: float) -> None:
        """Pause for at most `seconds`; executors that hear of an end sooner return sooner."""
        time.sleep(seconds)


def check_fleet(specs: Sequence[ReplicaSpec]) -> None:
    """Refuse specs that can't be one fleet: ids given twice, or differing counts or stores. ValueError."""
    seen: set[int] = set()
    for spec in specs:
        if spec.replica_id in seen:
            raise ValueError(f"replica_id {spec.replica_id} is given twice")
        seen.add(spec.replica_id)
        for name in ("num_replicas", "rendezvous_uri"):
            mine, first = getattr(spec, name), getattr(specs[0], name)
            if mine != first:
                raise ValueError(
                    f"{name} must be the same for the whole fleet: replica {specs[0].replica_id} has {first!r}, "
                    f"replica {spec.replica_id} has {mine!r}"
                )


def entrypoint_arguments(spec: ReplicaSpec) -> list[str]:
    """The arguments of `replica_entrypoint` that say what the spec says (`extra_env` apart)."""
    arguments = [f"--replica-id={spec.replica_id}", f"--num-replicas={spec.num_replicas}"]
    arguments.append(f"--rendezvous-uri={spec.rendezvous_uri}")
    if spec.recipe is not None:
        arguments.append(f"--recipe={spec.recipe}")
    else:
        arguments += [
            f"--trainer={spec.trainer}",
            f"--model-id={spec.model_id}",
            f"--inner-optimizer={json.dumps(spec.inner_optimizer)}",
            f"--sync-every={spec.sync_every}",
            f"--outer-rounds={spec.outer_rounds}",
            f"--outer-lr={spec.outer_lr!r}",
            f"--outer-momentum={spec.outer_momentum!r}",
        ]
    return [*arguments, *spec.overrides]


def entrypoint_command(spec: ReplicaSpec, python: str | None = None) -> list[str]:
    """The command that runs one replica on a machine where this package is installed.

    Under Composer each replica has a launcher of its own: that of several processes ends them all when one fails.
    """
    module = "composer_replication.diloco.serverless.replica_entrypoint"
    launcher = ["composer.cli", "-n", "1", "-m"] if spec.trainer == "composer" else []
    return [python or sys.executable, "-m", *launcher, module, *entrypoint_arguments(spec)]


def merged_environment(spec: ReplicaSpec, base: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment, the executor's, then the spec's. Output isn't held back."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", **(base or {}), **(spec.extra_env or {})}
