"""When a round's blobs may go.

Invariant: floor = min(latest checkpoint, rounds that all expected replicas have applied) - KEEP_ROUNDS; below it blobs
are deleted, pointers never. A store that can't be tidied is a warning: no round fails for it.
"""

from __future__ import annotations

import logging

from composer_replication.collective.object_store import checkpoints, keys
from composer_replication.collective.object_store.pointers import Roster
from composer_replication.collective.object_store.requests import there
from composer_replication.collective.retention import KEEP_ROUNDS
from composer_replication.errors import StoreError
from composer_replication.store.base import ObjectStore

__all__ = ["KEEP_ROUNDS", "Collector"]

_log = logging.getLogger("composer_replication")
QUIET_ROUNDS = 8  # looking back for what an earlier life left ends after so many rounds without a blob


class Collector:
    """One replica's share of the tidying: its own blobs, and as the lowest id what the dead have left."""

    def __init__(self, store: ObjectStore, replica: int, *, checkpoint: int, every: int) -> None:
        self._store = store
        self._replica = replica
        self._every = every
        self._checkpoint = checkpoint
        self._present: dict[int, int] = {}  # replica -> the last round it took part in: it has applied all before that
        self._own: dict[int, list[str]] = {}
        self._swept: int | None = None  # all before it is gone; not known before the first sweep
        self._kept_from: int | None = None  # contents of older checkpoints are to go
        self._told: set[str] = set()

    def wrote(self, round: int, blobs: list[str]) -> None:
        self._own.setdefault(round, []).extend(blobs)

    def closed(self, roster: Roster) -> None:
        for replica in roster.present:
            self._present[replica] = roster.round

    def floor(self, expected: tuple[int, ...]) -> int:
        # Whoever hasn't been seen since this process began may be about to roll forward from an older state.
        applied = min((self._present.get(replica, 0) for replica in expected), default=0)
        return min(self._checkpoint, applied) - KEEP_ROUNDS

    def collect(self, roster: Roster) -> None:
        """Delete what nobody can ask for any more, after `roster`'s round was applied. What can't be deleted now is
        tried again after the next round."""
        try:
            self._tidy(roster)
        except StoreError as error:
            cause = type(error).__name__  # not the text, which names another key each time
            if cause not in self._told:
                self._told.add(cause)
                _log.warning(
                    "replica %d can't delete what is no longer needed, and goes on without (the store grows): %s",
                    self._replica,
                    error,
                )

    def _tidy(self, roster: Roster) -> None:
        tidies = bool(roster.present) and self._replica == min(roster.present)
        self._find_checkpoint(roster.round + 1, tidies)
        floor = self.floor(roster.expected_next)
        over = [round for round in sorted(self._own) if round < floor]
        doomed = [key for round in over for key in self._own[round]]
        left, swept = self._sweep(floor) if tidies else ([], self._swept)
        if doomed or left:
            self._store.delete(doomed + left)
        # Forgotten only when it is gone.
        self._swept = swept
        for round in over:
            del self._own[round]
        if self._kept_from is not None:
            checkpoints.collect_checkpoints(self._store, self._kept_from)
            self._kept_from = None

    def _sweep(self, floor: int) -> tuple[list[str], int | None]:
        """Everyone's blobs below the floor. The first sweep looks back: when a fleet is restarted, no process knows
        any more what its last life wrote between the floor of then and the round it goes on from. Also the round
        before which all will be gone then."""
        doomed: list[str] = []
        swept = self._swept
        if floor <= 0:
            return doomed, swept
        if swept is None:
            round, quiet = floor, 0
            while round > 0 and quiet < QUIET_ROUNDS:
                round -= 1
                left = self._left_behind(round)
                doomed, quiet = left + doomed, 0 if left else quiet + 1
            swept = floor
        while swept < floor:
            doomed += self._left_behind(swept)
            swept += 1
        return doomed, swept

    def _left_behind(self, round: int) -> list[str]:
        return [key for key in self._store.list(keys.round_prefix(round)) if key.split("/")[3] in ("in", "out")]

    def _find_checkpoint(self, round: int, tidies: bool) -> None:
        newest = round - round % self._every
        for candidate in (newest, newest - self._every):
            if candidate > self._checkpoint and there(self._store, keys.manifest(candidate)):
                older, self._checkpoint = self._checkpoint, candidate
                # Two generations are kept: someone may be reading the older one.
                if tidies:
                    self._kept_from = older
                return
