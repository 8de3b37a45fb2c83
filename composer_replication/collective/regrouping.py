"""A process group of the replicas' own, which forms again without those that have gone between two rounds.

Invariant: those who go on together have applied the same rounds. A round begins with everybody's report; who doesn't
get them all tries again, in a new group. Gathering isn't atomic: where some have got all reports and others haven't,
the former have begun the round, and can't go on with it: they miss the others' payloads and raise RoundAborted, or have
needed none and come too late for the group that the others form without them. A loss after that ends the run for all.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from composer_replication.collective.base import Contribution, Report, RoundOutcome, Snapshot
from composer_replication.collective.codec import check_codec
from composer_replication.collective.guards import Guards
from composer_replication.collective.layout import Layout
from composer_replication.collective.object_store.wire import report_to_json
from composer_replication.collective.process_group import ProcessGroupCollective
from composer_replication.collective.rendezvous import Rendezvous
from composer_replication.errors import RoundAborted

__all__ = ["RegroupingCollective"]

_torch_dist: Any = dist  # parts of it are untyped


class RegroupingCollective(ProcessGroupCollective):
    """One replica's side. Needs no default group: a Trainer's own stays its own. Satisfies `Collective`.

    Args:
        meeting: where the replicas' processes find each other.
        codec: "float32", "bfloat16" or "int8".
        guards: how outliers are treated, and what kind of mean is taken.
        failure_policy: "strict": a replica whose process is gone ends the run for all; "skip": those that come to the
            round within the meeting's time limit go on without it.
        min_replicas: under skip, how many a round needs; more than half unless given.
    """

    def __init__(
        self,
        meeting: Rendezvous,
        *,
        codec: str = "float32",
        guards: Guards | None = None,
        failure_policy: Literal["strict", "skip"] = "strict",
        min_replicas: int | None = None,
    ) -> None:
        if failure_policy not in ("strict", "skip"):
            raise ValueError(f"failure_policy must be 'strict' or 'skip', got {failure_policy!r}")
        fleet = meeting.ids
        if min_replicas is not None and not 1 <= min_replicas <= len(fleet):
            raise ValueError(f"min_replicas must be from 1 to {len(fleet)}, got {min_replicas}")
        self._codec, self._exact = check_codec(codec), True
        self._guards = guards or Guards()
        self._guards.check_fleet(len(fleet))
        self._replica, self._fleet = meeting.replica, fleet
        self._device = torch.device("cuda", torch.cuda.current_device()) if meeting.backend == "nccl" else _CPU
        self._meeting, self._skips = meeting, failure_policy == "skip"
        self._fewest = min_replicas if min_replicas is not None else len(fleet) // 2 + 1
        self._own: Any = None  # the present group

    def start(self, offered: Snapshot, *, settings: Mapping[str, Any], resumed: bool) -> Snapshot:
        """As the contract says. Raises RoundTimeout if the fleet isn't complete in time."""
        self._own = self._meeting.form()
        return super().start(offered, settings=settings, resumed=resumed)

    def _round(
        self, number: int, layout: Layout, report: Report | None, contribution: Contribution | None
    ) -> RoundOutcome:
        began, before = time.monotonic(), self._meeting.ids
        told = None if report is None else report_to_json(report)
        message = {"replica": self._replica, "round": number, "report": told, "layout": layout.to_json()}
        said: list[dict[str, Any]] | None = None
        while said is None:
            try:
                said = self._exchange(message)
            except RoundAborted:
                if not self._skips:
                    raise
                self._own = None  # closes its connections, so that all others find out at once
                self._own = self._meeting.regroup(self._fewest)
        outcome = self._close(number, said, contribution, waited=time.monotonic() - began)
        gone = {replica: "its process is gone" for replica in before if replica not in self._meeting.ids}
        return dataclasses.replace(outcome, absent={**outcome.absent, **gone})

    def close(self) -> None:
        """Lets go of the group: whoever is still in a round with this replica finds out."""
        self._own = None

    def _exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every member's message, in the order of their ids."""
        data = json.dumps(message).encode("ascii")
        size = torch.tensor([len(data)], device=self._device)
        sizes = [int(one.item()) for one in self._gather(size)]
        padded = torch.frombuffer(bytearray(data.ljust(max(sizes), b" ")), dtype=torch.uint8).to(self._device)
        texts: list[Any] = [*self._gather(padded)]
        return [json.loads(text.cpu().numpy().tobytes()) for text in texts]

    def _gather(self, mine: Tensor) -> list[Tensor]:
        every = [torch.empty_like(mine) for _ in self._meeting.ids]
        self._wait(lambda group: group.allgather([every], [mine]))
        return every

    def _spread(self, source: int, tensor: Tensor) -> Tensor:
        """`tensor` of replica `source`, on every member, on the CPU."""
        moved = tensor.detach().to(self._device)
        options = _torch_dist.BroadcastOptions()
        options.rootRank = self._meeting.ids.index(source)
        self._wait(lambda group: group.broadcast([moved], options))
        return moved.to("cpu")

    def _wait(self, begin: Callable[[Any], Any]) -> None:
        if self._own is None:
            raise RoundAborted("this replica's group is closed")
        try:
            begin(self._own).wait()
        except RuntimeError as error:  # the backends' own
            text = str(error).partition("\n")[0]
            raise RoundAborted(f"a replica of the group has died or gone silent: {text}") from error


_CPU = torch.device("cpu")
