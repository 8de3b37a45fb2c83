"""Groups of replicas that form, and form again with whoever is left, over one TCPStore.

Invariant: a generation's members are decided once, by whoever is first to write them; each member forms a group with
exactly those, or learns that it isn't one. The trainer's default process group is neither needed nor touched.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from composer_replication.errors import RoundAborted, RoundTimeout

__all__ = ["Rendezvous"]

_torch_dist: Any = dist  # parts of it are untyped
_POLL_SECONDS = 0.05


class Rendezvous:
    """One replica's side.

    Args:
        address: "host:port" of the store; the replica with the lowest id of the first `ids` opens it, and must outlive
            the others' last meeting.
        replica: this replica's id.
        ids: those of all replicas that the run begins with, ascending.
        run: name of the run: several may use one store.
        backend: "gloo" or "nccl".
        timeout_seconds: how long the others may take to come, and an operation of a group to end.
    """

    def __init__(
        self,
        address: str,
        *,
        replica: int,
        ids: Sequence[int],
        run: str = "",
        backend: str = "gloo",
        timeout_seconds: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"address must be 'host:port', got {address!r}")
        if list(ids) != sorted(set(ids)) or replica not in ids:
            raise ValueError(f"ids must be ascending and hold replica {replica}, got {list(ids)}")
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend must be 'gloo' or 'nccl', got {backend!r}")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be greater than 0, got {timeout_seconds}")
        self.replica, self.ids, self.backend = replica, tuple(ids), backend
        self._timeout, self._clock, self._sleep = timeout_seconds, clock, sleep
        self._generation, self._host = 0, ids[0]
        limit = timedelta(seconds=timeout_seconds)
        store: Any = _torch_dist.TCPStore(host, int(port), None, replica == self.ids[0], limit, wait_for_workers=False)
        self._store = _torch_dist.PrefixStore(f"composer-replication/{run}", store)

    def form(self) -> Any:
        """The group of the present `ids`. Waits for all of them; raises RoundTimeout."""
        try:
            return self._make(self.ids.index(self.replica), len(self.ids))
        except RuntimeError as error:  # DistNetworkError, DistStoreError and gloo's own
            raise RoundTimeout(f"the group of replicas {list(self.ids)} didn't form: {error}") from error

    def _make(self, rank: int, size: int) -> Any:
        store = _torch_dist.PrefixStore(f"generation-{self._generation}/group", self._store)
        if self.backend == "nccl":
            return _torch_dist.ProcessGroupNCCL(store, rank, size, _torch_dist.ProcessGroupNCCL.Options())
        return _torch_dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=self._timeout))

    def regroup(self, fewest: int) -> Any:
        """A new group of those that come within the time limit; afterwards `ids` are theirs.

        Raises RoundAborted, on all that came, if they are fewer than `fewest`, or if the store is gone with the replica
        that opened it; RoundTimeout on one that came too late.
        """
        try:
            members = self._gathered()
        except RuntimeError as error:  # DistNetworkError, DistStoreError
            text = str(error).partition("\n")[0]
            raise RoundAborted(
                f"replica {self._host} is gone, and with it the store of this meeting: {text}"
            ) from error
        if self.replica not in members:
            raise RoundTimeout(f"replica {self.replica} came too late: the others went on as {list(members)}")
        if len(members) < fewest:
            raise RoundAborted(f"only replicas {list(members)} are left, and a round needs {fewest}")
        self.ids = members
        return self.form()

    def _gathered(self) -> tuple[int, ...]:
        """Who is in the next generation."""
        self._generation += 1
        place = f"generation-{self._generation}"
        self._store.set(f"{place}/here/{self.replica}", "1")
        until = self._clock() + self._timeout
        while not self._store.check([f"{place}/members"]):
            here = [one for one in self.ids if self._store.check([f"{place}/here/{one}"])]
            if len(here) == len(self.ids) or self._clock() >= until:
                self._store.compare_set(f"{place}/members", "", json.dumps(here))
                break
            self._sleep(_POLL_SECONDS)
        return tuple(json.loads(self._store.get(f"{place}/members")))
