"""The fits of one adapter, one after another: each is a run of its own.

Invariant: a fit that failed to begin leaves no trace, so that the newest checkpoint stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from composer_replication.adapter.driver import Closed, Driver, final_of
from composer_replication.adapter.options import Options
from composer_replication.adapter.ranks import check_one_replica, meet_with
from composer_replication.collective.base import Collective
from composer_replication.diloco.ranks.channel import Ranks
from composer_replication.diloco.summary import FinalSummary, RoundSummary
from composer_replication.errors import FleetMismatch

__all__ = ["Session"]

_STATE_VERSION = 1
D = TypeVar("D", bound=Driver)


class Session(Generic[D]):
    """`rounds` and `final` are those of the present or last fit; `stash` is a loaded checkpoint that waits for it."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.rounds: list[RoundSummary] = []
        self.final: FinalSummary | None = None
        self.fit: D | None = None
        self.ranks: Ranks | None = None
        self.stash: dict[str, Any] | None = None
        self._fits = 0  # begun so far
        self._abandoned = False

    @property
    def number(self) -> int:
        """Of the present or last fit, from 0: each is a run of its own."""
        return self._fits

    @property
    def running(self) -> D | None:
        return self.fit if self.fit is not None and self.final is None and not self._abandoned else None

    @property
    def skipped(self) -> int:
        return self.fit.skipped if self.fit is not None else 0

    @property
    def stashed_end(self) -> FinalSummary | None:
        """How the run of the loaded checkpoint ended, if it had."""
        if self.stash is None or not self.stash["fit_state"]["loop"]["ended"]:
            return None
        return final_of(self.stash["fit_state"]["loop"])

    def asked_to_stop(self, own: bool) -> bool:
        """Whether this process was (`own`), or another rank of its replica: for rank 0, in its waits for the fleet."""
        ranks = self.ranks
        return own if ranks is None or not ranks.leads else ranks.any_told_to_stop()

    def begin(self, make: Callable[[Collective, Closed], D], closed: Closed, *, ranks: Ranks | None = None) -> None:
        """Make this fit's driver and start it, from the loaded checkpoint if there is one.

        `ranks`: the processes of this replica, if it is several; all of them begin together.
        """
        stash = self.stash
        saved = stash["fit_state"] if stash is not None else None
        if stash is not None:
            # A checkpoint of a run that has ended is where the next run starts.
            self._fits = stash["fit"] + int(stash["fit_state"]["loop"]["ended"])
            saved = None if stash["fit_state"]["loop"]["ended"] else saved
        elif self.final is not None:
            self._fits += 1
        self.rounds, self.final, self._abandoned = [], None, False

        def round_closed(summary: RoundSummary, metrics: Mapping[str, float]) -> None:
            self.rounds.append(summary)
            closed(summary, metrics)

        self.ranks = ranks
        met: Collective | None = None
        fit: D | None = None
        try:
            if ranks is not None:
                check_one_replica(ranks, self.options.identity)
            met = meet_with(ranks, self.options.meet, self._fits, self.options.identity)
            fit = self.fit = make(met, round_closed)
            self.stash = None
            fit.start(saved)
        except BaseException:
            # Nothing has begun here: what is on the disk stays the newest there is.
            self.stash, self.fit = stash, None
            if fit is not None:
                fit.stop()
            else:
                if met is not None:
                    met.close()
                if ranks is not None:
                    ranks.close()
            raise

    def abandon(self, what: str, **more: Any) -> None:
        """The fit ends before its run does: say so, and stop. Harmless when called again, or after the end."""
        fit = self.running
        if fit is None:
            return
        self._abandoned = True
        try:
            fit.publish(what, **more)
        finally:
            fit.stop()

    def saves_after(self, summary: RoundSummary) -> bool:
        """This replica's own checkpoint is due after this round."""
        return (summary.round + 1) % self.options.checkpoint_every_rounds == 0 and not summary.ended

    def state_dict(self) -> dict[str, Any]:
        if self.stash is not None:
            return self.stash
        if self.fit is None or not self.fit.loop.started:
            return {}
        return {"version": _STATE_VERSION, "fit": self._fits, "fit_state": self.fit.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The model isn't in place yet: used when the fit begins."""
        if state.get("version") != _STATE_VERSION:
            raise FleetMismatch(
                f"the checkpoint's AutoLoCo state has version {state.get('version')}, "
                f"this package reads {_STATE_VERSION}"
            )
        self.stash = dict(state)
