"""A manager of torchft's shape over any `Collective`, so that torchft's DiLoCo and LocalSGD run over our rounds.

torchft's own needs its Lighthouse and a network between the replicas; this one needs neither.

Invariant: whether an exchange is committed is a function of its rounds' members, so that all replicas decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from torch import Tensor

from composer_replication.collective.base import Collective
from composer_replication.diloco.serverless.averager import Averager, Done
from composer_replication.errors import RoundError

__all__ = ["MockManager"]


class MockManager:
    """`torchft.Manager` as its DiLoCo and LocalSGD use it, over a `Collective` (which `shutdown` closes).

    `current_step` counts commits, as torchft's does. With several model fragments, use `use_bucketization=True` or few
    tensors: each all-reduce is a round of its own.
    """

    _use_async_quorum = False  # torchft's DiLoCo asks for it

    def __init__(self, collective: Collective) -> None:
        self._averager = Averager(collective)
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

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, reduce_op: Any = None) -> Done:
        """Replace `tensor` by its mean over the replicas; done when this returns.

        Quantisation is the collective's codec; `should_quantize` is taken for torchft's sake. Only averages: ValueError
        for another `reduce_op`. Raises what the collective's rounds raise.
        """
        if reduce_op is not None and "AVG" not in str(reduce_op):
            raise ValueError(f"replicas are averaged, reduce_op {reduce_op} isn't possible")
        outcome = self._averager.average(tensor)
        self._usable = self._usable and (outcome is None or bool(outcome.members))
        return Done(tensor)

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
