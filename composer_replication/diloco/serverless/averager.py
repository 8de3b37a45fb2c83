"""Rounds as an all-reduce: one tensor, one round, the mean in its place.

Invariant: every replica makes the same calls in the same order with tensors of the same shapes; each call is one round,
and its result has the same bits everywhere.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor

from composer_replication.collective.base import Collective, Contribution, Report, RoundOutcome, Snapshot
from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.norms import all_finite

__all__ = ["Averager", "Done"]

_NOTHING = Layout(())


class Averager:
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


class Done:
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
