"""Averaging over torch.distributed, for replicas that have a network between them.

Invariant: with `exact`, every rank gets every member's encoded bytes and reduces them in replica order with the same
code as any other collective: equal contributions give equal bits. Without it the sum is the group's own all-reduce,
right to float32 rounding only.

A group's membership is fixed and its operations are collective. A replica that has left therefore goes on answering
with empty contributions (`follow(wait=True)`, which the outer loop's `finish` calls) until all have left; one that
just stops leaves the others to the group's own time limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer_replication.collective.agreement import Closing, Offer, check_offers, close_round, without_mean
from composer_replication.collective.base import Contribution, Report, RoundOutcome, Snapshot
from composer_replication.collective.codec import check_codec, chunk_bytes, decode_chunk, encode_chunk
from composer_replication.collective.guards import Guards
from composer_replication.collective.layout import Chunk, Layout
from composer_replication.collective.norms import all_finite
from composer_replication.collective.object_store.wire import report_from_json, report_to_json
from composer_replication.collective.reduce import (
    factors,
    parameter_parts,
    parameter_square_norm,
    part_sizes,
    reduce_chunk,
    shares,
)
from composer_replication.errors import ObjectCorrupt, RoundAborted, RoundError

__all__ = ["ProcessGroupCollective"]

_torch_dist: Any = dist  # parts of it are untyped


@dataclass(slots=True)
class _Exchange:
    """One round under way: what it costs here, and the norm so far."""

    number: int
    layout: Layout
    closing: Closing
    contribution: Contribution | None  # None if this rank isn't averaged
    encode_seconds: float = 0.0
    reduce_seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    square_norm: float = 0.0


class ProcessGroupCollective:
    """One rank's side of a process group; its rank in the group is its replica id. Satisfies `Collective`.

    Args:
        group: an initialised group; None for the default one, which must be initialised (this class never does it).
        codec: "float32", "bfloat16" or "int8"; without `exact` only "float32".
        exact: pass encoded bytes and add them in replica order; False: all-reduce float32.
        guards: how outliers are treated, and what kind of mean is taken; without `exact` only the plain one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        codec: str = "float32",
        exact: bool = True,
        guards: Guards | None = None,
    ) -> None:
        guards = guards or Guards()
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("group: torch.distributed is not initialised; call init_process_group first")
        if check_codec(codec) != "float32" and not exact:
            raise ValueError(f"codec must be 'float32' when exact is False, got {codec!r}")
        if guards.robust and not exact:
            raise ValueError(
                f"aggregation must be 'mean' when exact is False, got {guards.aggregation!r}: an all-reduce only adds"
            )
        self._group = group
        self._codec = codec
        self._exact = exact
        self._replica = dist.get_rank(group)
        if self._replica < 0:
            raise ValueError("group: this process is not in it")
        self._fleet = tuple(range(dist.get_world_size(group)))
        guards.check_fleet(len(self._fleet))
        self._guards = guards
        # NCCL moves tensors of the GPU only; the other backends move those of the CPU.
        backend = str(dist.get_backend(group))
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")

    @property
    def replica(self) -> int:
        return self._replica

    @property
    def fleet(self) -> tuple[int, ...]:
        return self._fleet

    @property
    def overtaken(self) -> bool:
        """Always False: a group decides nothing without any of its ranks."""
        return False

    def start(self, offered: Snapshot, *, settings: Mapping[str, Any], resumed: bool) -> Snapshot:
        self._guards.check_settings(settings)
        said = self._exchange(self._offer(offered, settings, resumed))
        return self._begin(offered, resumed, said)

    def _offer(self, offered: Snapshot, settings: Mapping[str, Any], resumed: bool) -> dict[str, Any]:
        own = {**settings, "collective": {"codec": self._codec, "exact": self._exact, **self._guards.to_json()}}
        return {
            "replica": self._replica,
            "round": offered.round,
            "digest": offered.digest,
            "layout": offered.layout.to_json(),
            "settings": own,
            "resumed": resumed,
            "momentum": bool(offered.momentum),
            "state": dict(offered.state),
        }

    def _begin(self, offered: Snapshot, resumed: bool, answers: list[dict[str, Any]]) -> Snapshot:
        """Agree on whose state to begin with, and pass it round."""
        said = {answer["replica"]: answer for answer in answers}
        offers = [
            Offer(i, s["round"], s["digest"], Layout.from_json(s["layout"]), s["settings"], s["resumed"])
            for i, s in said.items()
        ]
        source = check_offers(offers)
        if all(offer.resumed for offer in offers):
            return offered
        return self._passed(offered, said[source], keep=resumed)

    def _passed(self, offered: Snapshot, source: Mapping[str, Any], *, keep: bool) -> Snapshot:
        """The state of the replica that said `source`; everybody's own where `keep` is set."""
        layout, replica = Layout.from_json(source["layout"]), source["replica"]
        anchor = [self._spread(replica, tensor) for tensor in self._tensors(replica, layout, offered.anchor)]
        momentum: list[Tensor] = []
        if source["momentum"]:
            momentum = [self._spread(replica, tensor) for tensor in self._tensors(replica, layout, offered.momentum)]
        if keep or self._replica == replica:
            return offered
        return Snapshot(
            round=source["round"],
            layout=layout,
            anchor=anchor,
            momentum=momentum,
            state=source["state"],
            digest=source["digest"],
        )

    def average(self, contribution: Contribution) -> RoundOutcome:
        return self._round(contribution.round, contribution.layout, contribution.report, contribution)

    def follow(self, round: int, layout: Layout, base: str, *, wait: bool) -> RoundOutcome | None:
        """Answers in a round with nothing to average. None if `wait` is False: a group keeps no past rounds."""
        return self._round(round, layout, None, None) if wait else None

    def applied(self, take: Callable[[], Snapshot]) -> None:
        """Keeps nothing: replicas of a group resume from their own checkpoints."""

    def publish(self, status: Mapping[str, Any]) -> None:
        """A group has nobody to show it to."""

    def finish(self, digest: str, result: Mapping[str, Any]) -> None:
        """A group has no place to record it in."""

    def close(self) -> None:
        """Lets go of nothing: the group belongs to its caller."""

    # -- one round ---------------------------------------------------------------------------------------------------

    def _round(
        self, number: int, layout: Layout, report: Report | None, contribution: Contribution | None
    ) -> RoundOutcome:
        began = time.monotonic()
        told = None if report is None else report_to_json(report)
        said = self._exchange({"replica": self._replica, "round": number, "report": told, "layout": layout.to_json()})
        return self._close(number, said, contribution, waited=time.monotonic() - began)

    def _close(
        self, number: int, said: list[dict[str, Any]], contribution: Contribution | None, *, waited: float
    ) -> RoundOutcome:
        """Decide a round in which all have spoken, and average."""
        rounds = [entry["round"] for entry in said]
        if len(set(rounds)) > 1:
            raise RoundError(f"the ranks are at different rounds: {rounds}")
        # A rank that only follows has no say: it trained nothing.
        present = {entry["replica"]: entry for entry in said if entry["report"] is not None}
        if not present:
            raise RoundError(f"the run is over: nobody is expected in round {number}")
        layouts = {i: Layout.from_json(entry["layout"]) for i, entry in present.items()}
        reports = [report_from_json(entry["report"]) for entry in present.values()]
        closing = close_round(reports, layouts, self._guards)
        averaged = any(member.replica == self._replica for member in closing.members)
        state = _Exchange(number, layouts[min(layouts)], closing, contribution if averaged else None)
        chunks = state.layout.chunks if closing.members else ()
        try:
            if self._exact:
                payloads = [self._reduce_exactly(state, index, chunk) for index, chunk in enumerate(chunks)]
                decode = self._decode_payloads(state, payloads)
            else:
                sums = [self._reduce_by_group(state, index, chunk) for index, chunk in enumerate(chunks)]
                decode = self._copy_sums(state, sums)
        except _Overflow:  # at the same chunk on every rank
            closing = state.closing = without_mean(closing)
            state.square_norm, decode = 0.0, self._copy_sums(state, [])
        return RoundOutcome(
            round=number,
            members=closing.members,
            absent=closing.absent,
            others=closing.others,
            outliers=closing.treatment.outliers,
            drift=closing.treatment.drift,
            expected_next=closing.expected_next,
            mean_square_norm=state.square_norm,
            mean=decode,
            wait_seconds=waited,
            phase_seconds={"encode": state.encode_seconds, "reduce": state.reduce_seconds},
            bytes_sent=state.bytes_sent,
            bytes_received=state.bytes_received,
        )

    def _reduce_exactly(self, state: _Exchange, index: int, chunk: Chunk) -> bytearray:
        """Pass one chunk round, member by member, and average it: one chunk is held, whatever the group's size."""
        sizes = part_sizes(chunk)
        size = chunk_bytes(self._codec, sizes)
        members = [member.replica for member in state.closing.members]
        began = time.monotonic()
        own: bytearray | None = None
        problem: Exception | None = None
        if state.contribution is not None:
            try:
                own = encode_chunk(self._codec, sizes, state.contribution.chunk(index))
            except Exception as error:
                # The others get zeros, which no rank takes for a chunk: all raise at the same place, none waits.
                own, problem = bytearray(size), error
            state.bytes_sent += size
        state.bytes_received += size * sum(member != self._replica for member in members)
        encoded = time.monotonic()
        try:
            reduced = reduce_chunk(
                self._codec,
                sizes,
                (self._pass_round(member, own, size) for member in members),
                [member.weight for member in state.closing.members],
                scales=state.closing.treatment.scales,
                trim=self._guards.trim(len(members)),
                parameters=parameter_parts(state.layout, chunk),
            )
        except ObjectCorrupt as error:
            raise RoundAborted(
                f"round {state.number}: a replica gave no chunk {index} ({problem or error})"
            ) from problem
        if not reduced.finite:
            raise _Overflow
        state.square_norm += reduced.square_norm
        state.encode_seconds += encoded - began
        state.reduce_seconds += time.monotonic() - encoded
        return reduced.payload

    def _pass_round(self, member: int, own: bytearray | None, size: int) -> memoryview:
        mine = own is not None and member == self._replica
        data = torch.frombuffer(own, dtype=torch.uint8) if mine else torch.empty(size, dtype=torch.uint8)
        return _bytes_of(self._spread(member, data))

    def _reduce_by_group(self, state: _Exchange, index: int, chunk: Chunk) -> Tensor:
        """Average one chunk by the group's all-reduce. Ranks that aren't averaged add zeros."""
        sizes, weights = part_sizes(chunk), [member.weight for member in state.closing.members]
        began = time.monotonic()
        total = torch.zeros(chunk.elements, dtype=torch.float32)
        problem: Exception | None = None
        if state.contribution is not None:
            try:
                total.copy_(state.contribution.chunk(index))
            except Exception as error:
                total.fill_(torch.nan)  # spreads to all ranks: all raise, none waits
                problem = error
            parts = factors(weights, state.closing.treatment.scales)
            if parts is not None:
                members = [member.replica for member in state.closing.members]
                total.mul_(torch.tensor(parts[members.index(self._replica)]))
        moved = total.to(self._device)
        _torch_dist.all_reduce(moved, group=self._group)
        total = moved.to("cpu")
        if shares(weights) is None:
            total.div_(torch.tensor(float(len(weights))))
        if problem is not None or bool(torch.isnan(total).any()):
            raise _not_finite(state, index) from problem
        if not all_finite(total):
            raise _Overflow
        state.square_norm += parameter_square_norm(total, sizes, parameter_parts(state.layout, chunk))
        state.reduce_seconds += time.monotonic() - began
        state.bytes_sent += 4 * chunk.elements
        state.bytes_received += 4 * chunk.elements
        return total

    def _decode_payloads(self, state: _Exchange, payloads: Sequence[bytearray]) -> Callable[[int, Tensor], None]:
        def mean(index: int, out: Tensor) -> None:
            _check_mean(state)
            decode_chunk(self._codec, part_sizes(state.layout.chunks[index]), payloads[index], out=out)

        return mean

    @staticmethod
    def _copy_sums(state: _Exchange, sums: Sequence[Tensor]) -> Callable[[int, Tensor], None]:
        def mean(index: int, out: Tensor) -> None:
            _check_mean(state)
            out.copy_(sums[index])

        return mean

    # -- moving bytes ------------------------------------------------------------------------------------------------

    def _exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every rank's message, in rank order. JSON, never pickled objects."""
        data = json.dumps(message).encode("ascii")
        world = len(self._fleet)
        lengths = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(world)]
        _torch_dist.all_gather(lengths, torch.tensor([len(data)], device=self._device), group=self._group)
        sizes = [int(length.item()) for length in lengths]
        padded = torch.frombuffer(bytearray(data.ljust(max(sizes), b" ")), dtype=torch.uint8).to(self._device)
        texts = [torch.empty_like(padded) for _ in range(world)]
        _torch_dist.all_gather(texts, padded, group=self._group)
        return [json.loads(bytes(_bytes_of(text.cpu()))) for text in texts]

    def _tensors(self, source: int, layout: Layout, own: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._replica == source:
            return own
        return [torch.empty(slot.elements, dtype=torch.float32) for slot in layout.slots]

    def _spread(self, source: int, tensor: Tensor) -> Tensor:
        """`tensor` of rank `source`, on every rank, on the CPU."""
        moved = tensor.detach().to(self._device)
        origin = source if self._group is None else dist.get_global_rank(self._group, source)
        dist.broadcast(moved, src=origin, group=self._group)
        return moved.to("cpu")


def _bytes_of(tensor: Tensor) -> memoryview:
    data: Any = tensor
    return memoryview(data.numpy())


def _check_mean(state: _Exchange) -> None:
    if not state.closing.members:
        raise RoundError(f"round {state.number} averaged nobody: there is no mean")


class _Overflow(Exception):
    """The sum of finite contributions isn't finite: the round averages nobody."""


def _not_finite(state: _Exchange, index: int) -> RoundAborted:
    names = sorted({state.layout.slots[part.slot].name for part in state.layout.chunks[index].parts})
    return RoundAborted(f"round {state.number}: the mean isn't finite in chunk {index} ({', '.join(names[:4])})")
