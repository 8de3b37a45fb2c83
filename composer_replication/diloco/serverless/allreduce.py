"""An all-reduce through a store, and a manager of torchft's shape: our rounds for code that averages by itself.

`ObjectStoreAllReduce` averages one tensor over the replicas, in place. `MockManager` offers the part of
`torchft.Manager` that torchft's DiLoCo and LocalSGD use, over any `Collective`; a real one needs torchft's Lighthouse
and a network between the replicas, this one needs neither.

Invariant: every replica makes the same calls in the same order with tensors of the same shapes; each call is one round,
and its result has the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor

from composer_replication.collective.base import Collective, Contribution, Report, RoundOutcome, Snapshot
from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.norms import all_finite
from composer_replication.errors import RoundError

__all__ = ["MockManager", "ObjectStoreAllReduce"]

_NOTHING = Layout(())


class _Averager:
    """Averages tensors over a collective, a round each. There is no state to share but the count of rounds."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.round = 0
        self.members: tuple[int, ...] = collective.fleet
        self._started = False

    def start(self) -> None:
        """Join the fleet: waits for its first member. Called by the first `average` if not before."""
        if not self._started:
            snapshot = self.collective.start(self._snapshot(0), settings={"use": "all-reduce"}, resumed=False)
            self.round = snapshot.round
            self._started = True

    def average(self, tensor: Tensor) -> RoundOutcome | None:
        """Replace `tensor`'s values by the mean. None if it has no elements; unchanged if nobody's are finite."""
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if not values.is_floating_point():
            raise ValueError(f"only floating-point and complex tensors can be averaged, not {tensor.dtype}")
        if values.layout is not torch.strided:
            raise ValueError(f"only dense tensors can be averaged, not {values.layout}")
        if values.numel() == 0:
            return None
        self.start()
        flat = values.detach().reshape(-1).to("cpu", torch.float32).contiguous()
        layout = Layout((Slot("tensor", tuple(values.shape), str(values.dtype)),))
        report = Report(
            replica=self.collective.replica,
            steps=1,
            tokens=None,
            mass=0.0,
            square_norm=1.0,  # equal for all: an all-reduce takes no tensor for an outlier
            finite=all_finite(flat),
            leaving=False,
            next_lr=0.0,
            preview=(),
            remaining=None,
            base=_digest(self.round),
            layout=layout.fingerprint,
        )
        spans = [(chunk.parts[0].start, chunk.parts[-1].stop) for chunk in layout.chunks]  # of the one slot

        def chunk(index: int) -> Tensor:
            start, stop = spans[index]
            return flat[start:stop]

        outcome = self.collective.average(Contribution(self.round, report, layout, chunk))
        if outcome.members:
            mean = torch.empty_like(flat)
            for index, (start, stop) in enumerate(spans):
                outcome.mean(index, mean[start:stop])
            with torch.no_grad():
                values.copy_(mean.view(values.shape))
        self.round = outcome.round + 1
        self.members = tuple(member.replica for member in outcome.members)
        self.collective.applied(lambda: self._snapshot(self.round))
        return outcome

    def _snapshot(self, round: int) -> Snapshot:
        return Snapshot(round=round, layout=_NOTHING, anchor=(), momentum=(), state={}, digest=_digest(round))


def _digest(round: int) -> str:
    return f"all-reduce-{round}"


class _Done:
    """A finished piece of work, in the shape of torch.distributed's."""

    def __init__(self, tensor: Tensor) -> None:
        self._future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._future.set_result(tensor)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Tensor]:
        return self._future

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def synchronize(self) -> None:
        """There is nothing left to wait for."""

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        """There is nothing left to wait for."""


class _Step(int):
    """An int that may also be called, for torchft asks a manager for `current_step()`."""

    def __call__(self) -> int:
        return int(self)


class ObjectStoreAllReduce:
    """Averages tensors over replicas that share nothing but a store.

    Args:
        replica_id, num_replicas: this replica's id, from 0, and how many there are.
        rendezvous_uri: the store, one for each run.
        fsspec_kwargs: options for a store that is reached through fsspec; there are none for a folder.
        poll_s: the longest pause between two looks at the store, in seconds.
        timeout_s: how long a round waits for the others.
        codec: how values travel: "float32", "bfloat16" or "int8".
        failure_policy: "strict": a replica that is missing at the deadline ends the run for all, with RoundAborted;
            "skip": the mean is that of the others.

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
    ) -> None:
        from composer_replication.collective.object_store import ObjectStoreCollective

        if fsspec_kwargs:
            raise ValueError(
                f"fsspec_kwargs {sorted(fsspec_kwargs)} mean nothing to the store {rendezvous_uri}: leave them out"
            )
        if not poll_s > 0:
            raise ValueError(f"poll_s must be more than 0, got {poll_s}")
        self._averager = _Averager(
            ObjectStoreCollective(
                rendezvous_uri,
                replica=replica_id,
                replicas=num_replicas,
                codec=codec,
                failure_policy=failure_policy,
                timeout_seconds=timeout_s,
                poll_seconds=min(0.05, poll_s),
                max_poll_seconds=poll_s,
            )
        )

    def allreduce(self, tensor: Tensor) -> _Done:
        """Replace `tensor` by the mean over the replicas; it is done when this returns.

        Any shape, strides, device and floating-point or complex dtype. Raises ValueError for other dtypes, RoundAborted
        or RoundTimeout when the others don't come, StoreError.
        """
        self._averager.average(tensor)
        return _Done(tensor)

    def should_commit(self, *_: Any, **__: Any) -> bool:
        """Whether the last mean may be used: not if nobody had a finite tensor."""
        return bool(self._averager.members)

    def start_quorum(self, *_: Any, **__: Any) -> None:
        """Each round agrees on its own members."""

    @property
    def current_step(self) -> int:
        """All-reduces that are done."""
        return _Step(self._averager.round)

    def close(self) -> None:
        """Leave the store alone from now on. Harmless when called again."""
        self._averager.collective.close()

    def __enter__(self) -> ObjectStoreAllReduce:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MockManager:
    """`torchft.Manager` as its DiLoCo and LocalSGD use it, over a `Collective` (which `shutdown` closes).

    `current_step` counts commits, as torchft's does. With several model fragments, use `use_bucketization=True` or few
    tensors: each all-reduce is a round of its own.
    """

    _use_async_quorum = False  # torchft's DiLoCo asks for it

    def __init__(self, collective: Collective) -> None:
        self._averager = _Averager(collective)
        self._step = 0
        self._batches_committed = 0
        self._usable = True  # every all-reduce since the last quorum had a mean
        self._error: Exception | None = None
        self._state_fns: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """A new exchange begins. Who takes part is agreed in its rounds."""
        self._averager.start()
        self._usable, self._error = True, None

    def wait_quorum(self) -> None:
        """There is nothing to wait for before the rounds themselves."""

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, reduce_op: Any = None) -> _Done:
        """Replace `tensor` by its mean over the replicas; done when this returns.

        Quantisation is the collective's codec; `should_quantize` is taken for torchft's sake. Only averages: ValueError
        for another `reduce_op`. Raises what the collective's rounds raise.
        """
        if reduce_op is not None and "AVG" not in str(reduce_op):
            raise ValueError(f"replicas are averaged, reduce_op {reduce_op} isn't possible")
        outcome = self._averager.average(tensor)
        self._usable = self._usable and (outcome is None or bool(outcome.members))
        return _Done(tensor)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Whether the exchange gave means for all its tensors: the same answer on every replica.

        Raises RoundError if this replica reported an error of its own: the others know nothing of it and will commit.
        """
        if self._error is not None:
            raise RoundError("this replica reported an error during the exchange, the others go on") from self._error
        if self._usable:
            self._step += 1
            self._batches_committed += self.num_participants()
        return self._usable

    def current_step(self) -> int:
        return self._step

    def batches_committed(self) -> int:
        return self._batches_committed

    def num_participants(self) -> int:
        return len(self._averager.members)

    def participating_rank(self) -> int | None:
        """This replica's place among those averaged last; None if it wasn't."""
        members, own = self._averager.members, self._averager.collective.replica
        return members.index(own) if own in members else None

    def is_participating(self) -> bool:
        return self.participating_rank() is not None

    def report_error(self, e: Exception) -> None:
        self._error = e

    def errored(self) -> Exception | None:
        return self._error

    def allow_state_dict_read(self) -> None:
        """Nobody reads another replica's state here."""

    def disallow_state_dict_read(self) -> None:
        """Nobody reads another replica's state here."""

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        if key in self._state_fns:
            raise ValueError(f"there are state functions for {key!r} already")
        self._state_fns[key] = (load_state_dict, state_dict)

    def set_state_dict_fns(self, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]) -> None:
        self._state_fns["set_state_dict_fns"] = (load_state_dict, state_dict)

    def user_state_dict(self) -> dict[str, Any]:
        """What the registered functions give, by key: for a checkpoint, beside `state_dict`."""
        return {key: save() for key, (_, save) in self._state_fns.items()}

    def load_user_state_dict(self, state: Mapping[str, Any]) -> None:
        for key, (load, _) in self._state_fns.items():
            load(state[key])

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step, "batches_committed": self._batches_committed}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        self._step = state_dict["step"]
        self._batches_committed = state_dict["batches_committed"]

    def shutdown(self, wait: bool = True) -> None:
        self._averager.collective.close()
