"""How the ranks of one replica speak with each other, beside the trainer's own process group.

Invariant: rank 0 says what is done and the others answer before anything moves, so that a rank that can't, or was asked
to stop, ends the work of all of them. Every rank calls the same methods in the same order.

Messages are torch's object collectives: they never leave the replica, whose processes run one program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer_replication.errors import RankLost, ReplicationError

__all__ = ["Handler", "Ranks"]

_torch_dist: Any = dist  # parts of it are untyped

# Between two words to the others rank 0 encodes or uploads a chunk, at most. In its waits it asks every second.
_SILENCE = timedelta(minutes=30)
_ASK_SECONDS = 1.0

_WELL, _STOP, _FAILED = 0, 1, 2  # the worst answer counts

Handler = Callable[..., Callable[[], None]]  # arguments of a command -> what is left to do once all have agreed


def _never() -> bool:
    return False


class Ranks:
    """One process's side. Made, used and closed by all processes of the replica together.

    Args:
        told_to_stop: whether this process was asked to stop (SIGTERM).
    """

    def __init__(self, *, told_to_stop: Callable[[], bool] = _never) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.told_to_stop = told_to_stop
        # gloo whatever the trainer uses: it moves plain bytes, and notices at once when a process has died.
        self._group: Any = _torch_dist.new_group(backend="gloo", timeout=_SILENCE)
        self._asked = 0.0

    @property
    def leads(self) -> bool:
        return self.rank == 0

    # -- all alike ---------------------------------------------------------------------------------------------------

    def collect(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        values: list[Any] = [None] * self.size
        self._do(lambda: _torch_dist.all_gather_object(values, value, group=self._group))
        return values

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value, in rank order, on rank 0; None elsewhere."""
        values: list[Any] | None = [None] * self.size if self.leads else None
        self._do(lambda: _torch_dist.gather_object(value, values, dst=0, group=self._group))
        return values

    def agree(self, flags: int) -> int:
        """The greatest flags of any rank. Waits for all: nothing may be under way when a rank's own program fails."""
        return self._answer(flags)

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def lead(self, work: Callable[[], Any], told: Callable[[Any], Any]) -> Any:
        """Do `work`, which may `command` the others; then tell them `told(result)`, or the error that it raised."""
        try:
            result = work()
            self._tell("done", told(result))
        except RankLost as error:
            self._try_to_tell(error)
            raise
        except BaseException as error:
            self._try_to_tell(_alike(error))
            raise
        return result

    def on_first(self, work: Callable[[], Any]) -> None:
        """Rank 0 does `work`, and the others wait for it; all raise what it raises."""
        if self.leads:
            self.lead(work, lambda result: None)
        else:
            self.serve({})

    def command(self, name: str, *arguments: Any) -> None:
        """Have all others prepare `name`; when this returns they have, and go on with it. Raises RankLost."""
        self._tell(name, arguments)
        if self._answer(_WELL) == _FAILED:
            raise RankLost("another rank of this replica failed (its own error says why)")

    def any_told_to_stop(self) -> bool:
        """Whether any rank was asked to stop, as of a second ago. For rank 0, inside `lead`."""
        mine = self.told_to_stop()
        now = time.monotonic()
        if mine or now - self._asked < _ASK_SECONDS:
            return mine
        self._asked = now
        self._tell("ask", ())
        answer = self._answer(_WELL)
        if answer == _FAILED:
            raise RankLost("another rank of this replica failed (its own error says why)")
        return answer == _STOP

    # -- the others ----------------------------------------------------------------------------------------------------

    def serve(self, handlers: Mapping[str, Handler]) -> Any:
        """Do what rank 0 commands until it is done; what it told. Raises what it raised, or this rank's own error."""
        failed: BaseException | None = None
        while True:
            name, content = self._hear()
            if name == "done":
                if failed is not None:
                    raise failed
                return content
            if name == "error":
                raise failed if failed is not None else content
            go: Callable[[], None] | None = None
            try:
                if failed is None and name != "ask":
                    go = handlers[name](*content)
            except BaseException as error:  # told to rank 0, which ends the work
                failed = error
            stop = _STOP if self.told_to_stop() else _WELL
            self._answer(_FAILED if failed is not None else stop)
            if go is not None:
                go()

    # -- moving --------------------------------------------------------------------------------------------------------

    def send(self, values: Tensor, to: int) -> None:
        data = _bytes(values)
        self._do(lambda: dist.send(data, to, group=self._group))

    def receive(self, values: Tensor, source: int) -> None:
        """Fill `values`, contiguous and on the CPU."""
        data = _bytes(values)
        self._do(lambda: dist.recv(data, source, group=self._group))

    def spread(self, values: Tensor) -> None:
        """Rank 0's `values` (contiguous, on the CPU) into every rank's."""
        data = _bytes(values)
        self._do(lambda: dist.broadcast(data, 0, group=self._group))

    def close(self) -> None:
        """Let go of the group. Harmless when called again, and where the trainer's own is gone."""
        group, self._group = self._group, None
        if group is None or not dist.is_initialized():
            return
        # The backend ends by joining its threads, which may still need the interpreter to let go of the last message:
        # torch before 2.8 holds on to it when the backend goes with its group, and hangs; not when it goes after it.
        backend = group._get_backend(torch.device("cpu"))
        dist.destroy_process_group(group)
        del group
        del backend

    # -- inside --------------------------------------------------------------------------------------------------------

    def _tell(self, name: str, content: Any) -> None:
        self._do(lambda: _torch_dist.broadcast_object_list([(name, content)], src=0, group=self._group))

    def _try_to_tell(self, error: BaseException) -> None:
        try:
            self._tell("error", error)
        except RankLost:
            pass  # it is what was lost; the error that is under way says more

    def _hear(self) -> tuple[str, Any]:
        box: list[Any] = [None]
        self._do(lambda: _torch_dist.broadcast_object_list(box, src=0, group=self._group))
        return box[0]

    def _answer(self, mine: int) -> int:
        answer = torch.tensor([mine], dtype=torch.int64)
        self._do(lambda: _torch_dist.all_reduce(answer, dist.ReduceOp.MAX, group=self._group))
        return int(answer.item())

    def _do(self, call: Callable[[], Any]) -> Any:
        if self._group is None:
            raise RankLost("this replica's ranks have parted already")
        try:
            return call()
        except RuntimeError as error:  # gloo's, whatever happened
            cause = error.with_traceback(None)  # whose frames would hold the group beyond `close`
            raise RankLost(f"another rank of this replica has died or gone silent: {error}") from cause


def _alike(error: BaseException) -> BaseException:
    """What the other ranks raise: the same where it is ours, or plain; else words."""
    text = str(error)
    if isinstance(error, ReplicationError) or type(error) in (ValueError, TypeError, KeyError, OSError):
        return type(error)(text)
    return RankLost(f"rank 0 of this replica ended with {type(error).__name__}: {text}")


def _bytes(values: Tensor) -> Tensor:
    # Some types, such as bfloat16, aren't every backend's; bytes are.
    return values.detach().view(torch.uint8)
