"""Rounds as an all-reduce: some tensors, one round, the means in their places.

Invariant: every replica makes the same calls in the same order with tensors of the same shapes; each call is one round,
and its result has the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from composer_replication.collective.base import Collective, Contribution, Report, RoundOutcome, Snapshot
from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.norms import all_finite
from composer_replication.errors import RoundError

__all__ = ["Averager", "Exchange", "real_values"]


def real_values(tensor: Tensor) -> Tensor:
    """The tensor, or a complex one's real and imaginary parts. ValueError for what can't be averaged."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if not values.is_floating_point():
        raise ValueError(f"only floating-point and complex tensors can be averaged, not {tensor.dtype}")
    if values.layout is not torch.strided:
        raise ValueError(f"only dense tensors can be averaged, not {values.layout}")
    return values.detach()


class Exchange:
    """Tensors that travel together, as 1-D float32 on the CPU: the tensors themselves where they are that already."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._values = [real_values(tensor) for tensor in tensors]
        self._flats = [_flat(values) for values in self._values]
        self.layout = Layout(
            tuple(
                Slot(f"tensor {index}", tuple(values.shape), str(values.dtype))
                for index, values in enumerate(self._values)
            )
        )

    @property
    def finite(self) -> bool:
        return all(all_finite(flat) for flat in self._flats)

    def chunk(self, index: int) -> Tensor:
        parts = self.layout.chunks[index].parts
        pieces = [self._flats[part.slot][part.start : part.stop] for part in parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def take(self, outcome: RoundOutcome) -> None:
        """Decode the means into the flat tensors."""
        for index, chunk in enumerate(self.layout.chunks):
            mean, offset = torch.empty(chunk.elements), 0
            outcome.mean(index, mean)
            for part in chunk.parts:
                self._flats[part.slot][part.start : part.stop].copy_(mean[offset : offset + part.elements])
                offset += part.elements

    def store(self) -> None:
        """Bring the flat tensors' values to those that aren't the same memory."""
        for values, flat in zip(self._values, self._flats, strict=True):
            if values.data_ptr() != flat.data_ptr() or values.dtype != flat.dtype:
                values.copy_(flat.view(values.shape))


def _flat(values: Tensor) -> Tensor:
    return values.reshape(-1).to("cpu", torch.float32).contiguous()


class Averager:
    """Averages tensors over a collective, a round each call. `round` says how many there have been."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective
        self.round = 0
        self.members: tuple[int, ...] = collective.fleet
        self.mark = ""  # of the state that the first round starts from: rounds only average what began alike
        self._resumed = False
        self._started = False

    def resume(self, round: int) -> None:
        """Go on at a round, with the state that this replica had there. Before `start`."""
        if self._started:
            raise RoundError("a state can be loaded before the first exchange only")
        self.round, self._resumed = round, True

    def start(self, shared: Mapping[str, Tensor] | None = None) -> None:
        """Join the fleet: waits for its first member. Called by the first round if not before.

        `shared`: tensors that begin with the values of the lowest replica id. Raises RoundError where the fleet is at
        another round, FleetMismatch where the tensors are others.
        """
        if self._started:
            return
        named = {} if self._resumed else {name: real_values(tensor) for name, tensor in (shared or {}).items()}
        layout = Layout(tuple(Slot(name, tuple(v.shape), str(v.dtype)) for name, v in named.items()))
        anchor = [values.reshape(-1).to("cpu", torch.float32, copy=True) for values in named.values()]
        offered = self._snapshot(layout, anchor)
        settings = {"use": "all-reduce"}
        got = self.collective.start(offered, settings=settings, resumed=self._resumed)
        if got.round != self.round:
            self.collective.close()
            raise RoundError(
                f"the fleet is at round {got.round}, replica {self.collective.replica} would begin at {self.round}: "
                "give it the state of its last checkpoint (load_state_dict), or start all of them in an empty store"
            )
        for values, flat in zip(named.values(), got.anchor, strict=False):
            values.copy_(flat.view(values.shape))
        self._started = True

    def average(self, *tensors: Tensor) -> RoundOutcome | None:
        """Replace the tensors' values by the means. None if there are no elements; unchanged if nobody's are finite."""
        exchange = Exchange([tensor for tensor in tensors if real_values(tensor).numel()])
        outcome = self.run(exchange)
        exchange.store()
        return outcome

    def run(self, exchange: Exchange) -> RoundOutcome | None:
        """One round; None if there is nothing to send. The caller calls `exchange.store()` afterwards."""
        if not exchange.layout.slots:
            return None
        self.start()
        report = Report(
            replica=self.collective.replica,
            steps=1,
            tokens=None,
            mass=0.0,
            square_norm=1.0,  # equal for all: an all-reduce takes no tensor for an outlier
            finite=exchange.finite,
            leaving=False,
            next_lr=0.0,
            preview=(),
            remaining=None,
            base=self._digest(),
            layout=exchange.layout.fingerprint,
        )
        outcome = self.collective.average(Contribution(self.round, report, exchange.layout, exchange.chunk))
        if outcome.members:
            exchange.take(outcome)
        self.round = outcome.round + 1
        self.members = tuple(member.replica for member in outcome.members)
        self.collective.applied(lambda: self._snapshot(Layout(()), ()))
        return outcome

    def _snapshot(self, layout: Layout, anchor: Sequence[Tensor]) -> Snapshot:
        return Snapshot(
            round=self.round,
            layout=layout,
            anchor=anchor,
            momentum=(),
            state={"use": "all-reduce"},
            digest=self._digest(),
        )

    def _digest(self) -> str:
        return f"all-reduce-{self.round}" + (f"-{self.mark}" if not self.round else "")
