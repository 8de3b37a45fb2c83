"""A manager of torchft's shape over any `Collective`, so that torchft's DiLoCo and LocalSGD run over our rounds.

torchft's own needs its Lighthouse and a network between the replicas; this one needs neither.

Invariants: the tensors that are given between two waits travel in one round, so that all replicas, which make the same
calls in the same order, cut their rounds alike; whether an exchange is committed is a function of its rounds' members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from composer_replication.collective.base import Collective, RoundOutcome
from composer_replication.collective.codec import content_hash
from composer_replication.diloco.serverless.averager import Averager, Exchange, real_values
from composer_replication.diloco.serverless.background import Background
from composer_replication.errors import RoundError

__all__ = ["MockManager", "ObjectStoreManager"]


class _Batch:
    """Tensors that travel in one round. Filled, then launched, then finished by whoever waits first."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.futures: list[torch.futures.Future[Tensor]] = []
        self.exchange: Exchange | None = None
        self.task: Future[RoundOutcome | None] | None = None
        self.finished = False


class _Work:
    """An all-reduce under way, in the shape of torch.distributed's."""

    def __init__(self, manager: ObjectStoreManager, batch: _Batch, index: int) -> None:
        self._manager = manager
        self._batch = batch
        self._index = index

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the tensor holds its mean; the collective's own time limit counts. Raises what rounds raise."""
        self._manager._finish(self._batch)
        return True

    def get_future(self) -> torch.futures.Future[Tensor]:
        """A future that is done. This waits: torchft's buckets copy, in callbacks, from buffers that a loop goes on to
        change, which is right only if a callback runs as soon as it is added."""
        self.wait()
        return self._batch.futures[self._index]

    def is_completed(self) -> bool:
        self._manager.launch()
        return self._batch.task is None or self._batch.task.done()

    def is_success(self) -> bool:
        task = self._batch.task
        return self._batch.finished or (task is not None and task.done() and task.exception() is None)

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self, timeout: timedelta | None = None) -> None:
        self.wait()


class ObjectStoreManager:
    """`torchft.Manager` as its DiLoCo and LocalSGD use it, over a `Collective` (which `shutdown` closes).

    All-reduces run in the background, in order: those since the last wait as one round, which begins when one of them
    is waited for, at the next optimizer step, or with `launch`. `current_step` counts commits, as torchft's does.
    """

    _use_async_quorum = False  # torchft's DiLoCo asks for it

    def __init__(self, collective: Collective) -> None:
        self._averager = Averager(collective)
        self._background = Background(f"replica {collective.replica}'s rounds")
        self._open: _Batch | None = None  # filled, not yet launched
        self._launched: list[_Batch] = []
        self._step = 0
        self._batches_committed = 0
        self._usable = True  # every round since the last commit had a mean
        self._error: Exception | None = None
        self._state_fns: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}

    # -- exchanges

    def share(self, tensors: Mapping[str, Tensor]) -> None:
        """Join the fleet, and begin with the lowest replica id's values of these tensors.

        A manager that has loaded a state keeps its own. Raises FleetMismatch if the tensors differ in name or shape.
        """
        self._background.run(lambda: self._averager.start(tensors))

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """A new exchange begins. Who takes part is agreed in its rounds. There is no healing: see `state_dict`."""
        self._finish_all()
        if self._averager.round == 0 and not self._averager.mark:
            self._averager.mark = self._anchors()
        self._background.run(self._averager.start)
        self._usable, self._error = True, None

    def wait_quorum(self) -> None:
        """There is nothing to wait for before the rounds themselves."""

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, reduce_op: Any = None) -> _Work:
        """Replace `tensor` by its mean over the replicas, once `wait` of what this returns has returned.

        Raises ValueError for a dtype that can't be averaged, another `reduce_op`, or `should_quantize`: how values
        travel is the collective's setting.
        """
        if reduce_op is not None and "AVG" not in str(reduce_op):
            raise ValueError(f"replicas are averaged, reduce_op {reduce_op} isn't possible")
        if should_quantize:
            raise ValueError(
                "should_quantize: how values travel is the collective's codec (codec='int8' takes a byte an element); "
                "leave should_quantize out"
            )
        elements = real_values(tensor).numel()
        batch = self._open
        if batch is None:
            batch = self._open = _Batch()
        batch.futures.append(torch.futures.Future())
        batch.tensors.append(tensor)
        if not elements and len(batch.tensors) == 1:
            self._open, batch.finished = None, True
            batch.futures[0].set_result(tensor)
        return _Work(self, batch, len(batch.tensors) - 1)

    def launch(self) -> None:
        """Begin the round of the all-reduces so far, in the background."""
        batch, self._open = self._open, None
        if batch is None:
            return
        exchange = Exchange([tensor for tensor in batch.tensors if tensor.numel()])
        batch.exchange = exchange
        batch.task = self._background.submit(lambda: self._averager.run(exchange))
        self._launched.append(batch)

    def _finish(self, batch: _Batch) -> None:
        """Wait for a batch's round, and bring its means to its tensors: in the thread, and stream, of the caller."""
        if batch.finished:
            return
        if batch is self._open:
            self.launch()
        assert batch.task is not None and batch.exchange is not None, "launched"
        outcome = batch.task.result()
        batch.exchange.store()
        batch.finished = True
        self._launched.remove(batch)
        self._usable = self._usable and (outcome is None or bool(outcome.members))
        for future, tensor in zip(batch.futures, batch.tensors, strict=True):
            future.set_result(tensor)

    def _finish_all(self) -> None:
        self.launch()
        for batch in list(self._launched):
            self._finish(batch)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Whether the exchange gave means for all its tensors: the same answer on every replica.

        Raises RoundError if this replica reported an error of its own: the others know nothing of it and will commit.
        """
        self._finish_all()
        if self._error is not None:
            raise RoundError("this replica reported an error during the exchange, the others go on") from self._error
        usable, self._usable = self._usable, True
        if usable:
            self._step += 1
            self._batches_committed += self.num_participants()
        return usable

    # -- what is known

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

    # -- state

    def allow_state_dict_read(self) -> None:
        """Nobody reads another replica's state here."""

    def disallow_state_dict_read(self) -> None:
        """torchft calls this before each optimizer step: training goes on, so what was given to average can set out."""
        self.launch()

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
        """For a checkpoint after a commit, beside `user_state_dict`, the model's and the inner optimizer's state."""
        return {"step": self._step, "batches_committed": self._batches_committed, "round": self._averager.round}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken. Before the first exchange; rounds missed since then are made up for, one
        at each exchange, as far as the fleet still has them."""
        self._averager.resume(state_dict["round"])
        self._step = state_dict["step"]
        self._batches_committed = state_dict["batches_committed"]

    def _anchors(self) -> str:
        """Digest of where torchft's fragments begin: a fleet that begins from unequal weights never becomes one."""
        marks = [
            f"{key} {name} {content_hash(memoryview(anchor.cpu().reshape(-1).view(torch.uint8).numpy()))}"
            for key, state in sorted(self.user_state_dict().items())
            if key.startswith("StreamingDiLoCoFragment_")
            for name, anchor in state["original_parameters"].items()
        ]
        return content_hash("\n".join(marks).encode()) if marks else ""

    def shutdown(self, wait: bool = True) -> None:
        """Close the collective, after a round under way. Harmless when called again."""
        self._background.run(self._averager.collective.close)
        self._background.stop()


MockManager = ObjectStoreManager
"""The name that it has in the first design; nothing about it is a mock."""
