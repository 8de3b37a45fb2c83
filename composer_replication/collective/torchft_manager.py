"""Averaging over torchft: its lighthouse says who is there, its process group moves the bytes.

Invariant: who is averaged, and the mean's bits, are a function of what the quorum's replicas said to one another, so
that all of them see one outcome. torchft agrees on who is there, not on what came of it: a replica that missed the end
of a round finds that out at the next one, and has to start again.

Everything is passed as sums of bytes of which all but one replica's are zero, for that is what a `torchft.Manager`
offers, and a sum with zeros is exact.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from composer_replication.collective.agreement import Offer, check_offers
from composer_replication.collective.base import Contribution, Report, RoundOutcome, Snapshot
from composer_replication.collective.codec import check_codec
from composer_replication.collective.guards import Guards
from composer_replication.collective.layout import Layout
from composer_replication.collective.object_store.wire import report_to_json
from composer_replication.collective.process_group import ProcessGroupCollective
from composer_replication.errors import Diverged, RoundError, RoundTimeout

__all__ = ["TorchftCollective"]

_PAUSE_SECONDS = 0.2  # between two looks at who is there, before the fleet is complete


class _Broken(Exception):
    """A replica went away in the middle: whoever is left forms a new quorum."""


class TorchftCollective(ProcessGroupCollective):
    """One replica's side of a fleet that meets through torchft's lighthouse. Satisfies `Collective`.

    Args:
        manager: a `torchft.Manager` with use_async_quorum=False and rank 0 of world size 1; it stays its caller's. Its
            quorum_timeout must be longer than an interval takes.
        replica, replicas: this replica's id, from 0, and how many the run begins with. The lighthouse's min_replicas is
            how few may go on.
        codec: "float32", "bfloat16" or "int8".
        guards: how outliers are treated, and what kind of mean is taken.
        timeout_seconds: how long `start` waits for the whole fleet, and a round for a quorum that holds until its end.
        device: where the manager's process group wants tensors: "cpu" for gloo, "cuda" for NCCL.

    A round averages the replicas of one quorum; those that are missing are `absent`, and a replica that comes (back)
    joins with the state of the others, if it brings none of its own. There are no checkpoints and no past rounds: a
    replica that resumes does so with all others, or not at all (Diverged).
    """

    def __init__(
        self,
        manager: Any,
        *,
        replica: int,
        replicas: int,
        codec: str = "float32",
        guards: Guards | None = None,
        timeout_seconds: float = 600.0,
        device: str | torch.device = "cpu",
    ) -> None:
        if not 0 <= replica < replicas:
            raise ValueError(f"replica must be from 0 to replicas - 1 = {replicas - 1}, got {replica}")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be more than 0, got {timeout_seconds}")
        if manager._use_async_quorum:
            raise ValueError("manager: a round's quorum comes before its exchange; give it use_async_quorum=False")
        self._group = None
        self._codec = check_codec(codec)
        self._exact = True
        self._replica = replica
        self._fleet = tuple(range(replicas))
        self._guards = guards or Guards()
        self._guards.check_fleet(replicas)
        self._device = torch.device(device)
        self._manager = manager
        self._timeout = timeout_seconds
        self._expected = self._fleet
        self._said_settings: Mapping[str, Any] = {}
        self._take: Callable[[], Snapshot] | None = None  # the state of the present round
        self._joined: RoundOutcome | None = None  # of the round that this replica came into
        # torchft hands a state to replicas whose count of steps is behind: the counts are all that it needs to.
        manager.register_state_dict_fn("composer_replication", _nothing_to_load, dict)

    # -- start

    def start(self, offered: Snapshot, *, settings: Mapping[str, Any], resumed: bool) -> Snapshot:
        """As the contract says. Raises RoundTimeout if the fleet isn't complete in time."""
        self._guards.check_settings(settings)
        offer: dict[str, Any] = {"op": "start", **self._offer(offered, settings, resumed)}
        self._said_settings = offer["settings"]

        def attempt() -> Snapshot | None:
            said = self._exchange(offer)
            if any(answer["op"] == "round" for answer in said):
                return self._join(offered, offer, said)
            if {answer["replica"] for answer in said} != set(self._fleet):
                return None
            snapshot = self._begin(offered, resumed, said)
            self._commit()
            self._take = lambda: snapshot
            return snapshot

        return self._until(attempt, "the fleet to be complete")

    def _join(self, offered: Snapshot, offer: Mapping[str, Any], said: list[dict[str, Any]]) -> Snapshot:
        """Come into a run: take the others' state, and see their round through without a contribution."""
        known = self._shown(said)
        mine = Offer(self._replica, offered.round, offered.digest, offered.layout, offer["settings"], False)
        theirs = Layout.from_json(known["layout"])
        # They are the ones that go on: tensors that have been unfrozen since the start may be unknown here.
        check_offers([mine, Offer(known["replica"], known["round"], known["digest"], theirs, known["settings"], True)])
        if offer["resumed"] and (offered.round, offered.digest) != (known["round"], known["digest"]):
            raise Diverged(
                f"replica {self._replica} resumes at round {offered.round}, the fleet is at round {known['round']} "
                "with another state: start it without its checkpoint, and it gets the fleet's"
            )
        snapshot = self._passed(offered, known, keep=offer["resumed"])
        self._take, self._expected = lambda: snapshot, tuple(known["expected"])
        again = self._exchange(self._message(snapshot.round, snapshot.layout, None))
        self._joined = self._decide(snapshot.round, again, None, waited=0.0)
        return snapshot

    def _shown(self, said: list[dict[str, Any]]) -> dict[str, Any]:
        """What the lowest replica of a run under way has for newcomers; all of the quorum ask for it at once."""
        server = min(answer["replica"] for answer in said if answer["op"] == "round")
        known: dict[str, Any] = {"replica": self._replica}
        if server == self._replica:
            assert self._take is not None, "set by start"
            snapshot = self._take()
            known |= {
                "settings": self._said_settings,
                "expected": self._expected,
                "round": snapshot.round,
                "digest": snapshot.digest,
                "layout": snapshot.layout.to_json(),
                "momentum": bool(snapshot.momentum),
                "state": dict(snapshot.state),
            }
        return next(answer for answer in self._exchange(known) if answer["replica"] == server)

    # -- rounds

    def follow(self, round: int, layout: Layout, base: str, *, wait: bool) -> RoundOutcome | None:
        """As the contract says; without `wait` only the round that this replica came into."""
        joined, self._joined = self._joined, None
        if joined is not None and joined.round == round:
            return joined
        return self._round(round, layout, None, None) if wait else None

    def applied(self, take: Callable[[], Snapshot]) -> None:
        """Keeps the way to the state, for a newcomer of the next round."""
        self._take = take

    def _message(self, number: int, layout: Layout, report: Report | None) -> dict[str, Any]:
        return {
            "op": "round",
            "replica": self._replica,
            "round": number,
            "report": None if report is None else report_to_json(report),
            "layout": layout.to_json(),
        }

    def _round(
        self, number: int, layout: Layout, report: Report | None, contribution: Contribution | None
    ) -> RoundOutcome:
        message = self._message(number, layout, report)

        def attempt() -> RoundOutcome:
            began = time.monotonic()
            said = self._exchange(message)
            if any(answer["op"] == "start" for answer in said):
                assert self._take is not None, "set by start"
                self._passed(self._take(), self._shown(said), keep=True)
                said = self._exchange(message)
            return self._decide(number, said, contribution, waited=time.monotonic() - began)

        return self._until(attempt, f"a quorum that holds for round {number}")

    def _decide(
        self, number: int, said: list[dict[str, Any]], contribution: Contribution | None, *, waited: float
    ) -> RoundOutcome:
        rounds = Counter(answer["round"] for answer in said)
        latest = max(rounds)
        if number < latest:
            raise RoundError(
                f"replica {self._replica} is at round {number}, the fleet at {latest}: it missed the end of a round; "
                "start it again, without a checkpoint, and it joins"
            )
        if len(rounds) > 1:
            raise _Broken(f"a replica is still at round {min(rounds)}, and goes")
        bases = [answer["report"]["base"] for answer in said if answer["report"] is not None]
        if len(set(bases)) > 1:
            base = Counter(bases).most_common(1)[0][0]
            if contribution is not None and contribution.report.base != base:
                raise Diverged(
                    f"replica {self._replica} began round {number} from another state than most: start it again, "
                    "without a checkpoint, and it joins"
                )
            raise _Broken("a replica began from another state, and goes")
        outcome = self._close(number, said, contribution, waited=waited)
        here = {answer["replica"] for answer in said}
        missing = {replica: "not in torchft's quorum" for replica in self._expected if replica not in here}
        self._commit()
        self._expected = outcome.expected_next
        return dataclasses.replace(outcome, absent=dict(sorted({**outcome.absent, **missing}.items())))

    # -- torchft

    def _until(self, attempt: Callable[[], Any], waiting_for: str) -> Any:
        """Try, a quorum each time, until there is a result."""
        deadline, why = time.monotonic() + self._timeout, ""
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._manager.start_quorum(timeout=timedelta(seconds=left))
            except Exception as error:  # torchft raises what its client does
                raise RoundTimeout(f"replica {self._replica}: torchft gave no quorum: {error}") from error
            try:
                self._check()
                result = attempt()
                if result is not None:
                    return result
                why = f"{self._manager.num_participants()} of {len(self._fleet)} replicas are there"
            except _Broken as error:
                why = str(error)
                self._manager.report_error(error)
                self._manager.should_commit()  # tells torchft to set the group up anew
            time.sleep(min(_PAUSE_SECONDS, max(left, 0.0)))
        raise RoundTimeout(f"replica {self._replica} waited {self._timeout:g} s for {waiting_for}: {why}")

    def _commit(self) -> None:
        if not self._manager.should_commit():
            raise _Broken(f"torchft doesn't commit: {self._manager.errored() or 'too few replicas'}")

    def _check(self) -> None:
        if self._manager.errored() is not None:
            raise _Broken(str(self._manager.errored()).partition("\n")[0])
        if self._manager.participating_rank() is None:
            raise RoundError("this replica is a spare: give the manager WorldSizeMode.DYNAMIC")

    def _sum(self, tensor: Tensor) -> Tensor:
        moved = tensor.to(self._device)
        self._manager.allreduce(moved, reduce_op=torch.distributed.ReduceOp.SUM).wait()
        self._check()
        return moved.to("cpu")

    def _exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every replica's message, in the order of their ids."""
        data = json.dumps(message).encode("ascii")
        rank, count = self._manager.participating_rank(), self._manager.num_participants()
        lengths = torch.zeros(count, dtype=torch.int64)
        lengths[rank] = len(data)
        sizes = [int(size.item()) for size in self._sum(lengths)]
        texts = torch.zeros((count, max(sizes)), dtype=torch.uint8)
        texts[rank, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows: Any = self._sum(texts)
        said = [json.loads(bytes(rows[i, : sizes[i]].numpy())) for i in range(count)]
        ids = [answer["replica"] for answer in said]
        if len(set(ids)) < count:
            raise RoundError(f"two replicas have one id: {sorted(ids)}; is an older process still alive?")
        return sorted(said, key=lambda answer: answer["replica"])

    def _spread(self, source: int, tensor: Tensor) -> Tensor:
        """`tensor` of one replica, bit for bit, on all of them."""
        values = tensor.detach().to("cpu").contiguous()
        if self._replica != source:
            values = torch.zeros_like(values)
        return self._sum(values.reshape(-1).view(torch.uint8).clone()).view(values.dtype).view(values.shape)


def _nothing_to_load(state: Any) -> None:
    pass
