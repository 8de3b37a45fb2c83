"""One replica's share of writing checkpoints: beside the training, and confirmed by the fleet before they exist.

Invariant: the tensors that are being written don't change meanwhile: whoever is about to change them calls `settle`
first. A checkpoint that can't be written is missed, and costs nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from composer_replication.collective.base import Snapshot
from composer_replication.collective.object_store import checkpoints
from composer_replication.collective.object_store.checkpoints import Abandoned, Manifest, Trace
from composer_replication.collective.object_store.pointers import Roster
from composer_replication.errors import ReplicationError
from composer_replication.store.base import ObjectStore

__all__ = ["Checkpointer"]

_log = logging.getLogger("composer_replication")


class Checkpointer:
    """Writes a checkpoint every `every` rounds, and one at the run's end, where this replica is the one to do so."""

    def __init__(self, store: ObjectStore, run: str, replica: int, *, every: int, trace: Trace) -> None:
        self._store = store
        self._run = run
        self._replica = replica
        self._every = every
        self._trace = trace
        self._thread: threading.Thread | None = None
        self._abandoned = threading.Event()
        self._pending: Manifest | None = None

    def applied(self, roster: Roster, take: Callable[[], Snapshot]) -> None:
        """The outer step of `roster`'s round was taken: begin to write the state that it led to, if that is due."""
        following = roster.round + 1
        staying = roster.present & set(roster.expected_next)
        writers = staying if roster.expected_next else roster.present
        due = following % self._every == 0 or not roster.expected_next
        if due and writers and min(writers) == self._replica:
            self._begin(take())

    def settle(self) -> None:
        """Wait until nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def confirm(self, roster: Roster) -> None:
        """The next roster starts from the state that was written: now the checkpoint may exist."""
        self.settle()
        pending, self._pending = self._pending, None
        if pending is not None and (pending.round, pending.digest) == (roster.round, roster.base):
            self._attempt(pending.round, lambda: checkpoints.commit(self._store, pending, self._trace))

    def leave_draft(self, digest: str) -> None:
        """There is no next roster: whoever finds that all have ended alike makes the draft a checkpoint."""
        self.settle()
        pending, self._pending = self._pending, None
        if pending is not None and pending.digest == digest:
            self._attempt(pending.round, lambda: checkpoints.put_draft(self._store, pending, self._trace))

    def close(self) -> None:
        """Stop writing: what was begun can't be confirmed any more."""
        self._abandoned.set()
        self.settle()

    def _begin(self, snapshot: Snapshot) -> None:
        self.settle()
        self._pending = None

        def write() -> None:
            self._pending = checkpoints.write_blobs(
                self._store, self._run, snapshot, self._trace, abandoned=self._abandoned.is_set
            )

        self._thread = threading.Thread(
            target=lambda: self._attempt(snapshot.round, write), name=f"checkpoint-{self._replica}", daemon=True
        )
        self._thread.start()

    def _attempt(self, round: int, write: Callable[[], None]) -> None:
        try:
            write()
        except Abandoned:
            pass
        except ReplicationError as error:
            _log.warning(
                "replica %d could not write the checkpoint of round %d to %s: %s",
                self._replica,
                round,
                self._store.uri,
                error,
            )
