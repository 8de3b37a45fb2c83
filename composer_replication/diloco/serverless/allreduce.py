"""An all-reduce through a store, for code that averages by itself.

Invariant: a call returns when the tensor holds the mean; there is no work in the background.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from composer_replication.diloco.serverless.manager import MockManager, ObjectStoreManager
from composer_replication.store import open_store

__all__ = ["MockManager", "ObjectStoreAllReduce", "ObjectStoreManager"]


class _Step(int):
    """The all-reduces so far; called, as torchft calls a manager's `current_step()`, the commits so far."""

    commits: int

    def __call__(self) -> int:
        return self.commits


class ObjectStoreAllReduce(ObjectStoreManager):
    """Averages tensors over replicas that share nothing but a store. A whole manager for torchft's DiLoCo, too.

    Args:
        replica_id, num_replicas: this replica's id, from 0, and how many there are.
        rendezvous_uri: the store, one for each run.
        fsspec_kwargs: options for the fsspec filesystem of a store that is reached through one; there are none for a
            folder. They may hold credentials.
        poll_s: the longest pause between two looks at the store, in seconds.
        timeout_s: how long a round waits for the others.
        codec: how values travel: "float32", "bfloat16" or "int8".
        failure_policy: "strict": a replica that is missing at the deadline ends the run for all, with RoundAborted;
            "skip": the mean is that of the others.
        control: URI of a second store for all but the blobs, where the first can't create an object only once.

    A replica whose tensor isn't finite is not averaged. Values travel as float32 whatever the tensor's dtype.
    """

    def __init__(
        self,
        replica_id: int,
        num_replicas: int,
        rendezvous_uri: str,
        fsspec_kwargs: Mapping[str, Any] | None = None,
        poll_s: float = 2.0,
        timeout_s: float = 600.0,
        *,
        codec: str = "float32",
        failure_policy: Literal["strict", "skip"] = "strict",
        control: str | None = None,
    ) -> None:
        from composer_replication.collective.object_store import ObjectStoreCollective

        if not poll_s > 0:
            raise ValueError(f"poll_s must be more than 0, got {poll_s}")
        super().__init__(
            ObjectStoreCollective(
                open_store(rendezvous_uri, options=fsspec_kwargs),
                control=control,
                replica=replica_id,
                replicas=num_replicas,
                codec=codec,
                failure_policy=failure_policy,
                timeout_seconds=timeout_s,
                poll_seconds=min(0.05, poll_s),
                max_poll_seconds=poll_s,
            )
        )

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, reduce_op: Any = None) -> Any:
        """Replace `tensor` by the mean over the replicas; it is done when this returns.

        Any shape, strides, device and floating-point or complex dtype. Raises ValueError for other dtypes, RoundAborted
        or RoundTimeout when the others don't come, StoreError.
        """
        work = super().allreduce(tensor, should_quantize, reduce_op)
        work.wait()
        return work

    @property
    def current_step(self) -> Any:
        """All-reduces that are done."""
        step = _Step(self._averager.round)
        step.commits = self._step
        return step

    def close(self) -> None:
        """Leave the store alone from now on. Harmless when called again."""
        self.shutdown()

    def __enter__(self) -> ObjectStoreAllReduce:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
