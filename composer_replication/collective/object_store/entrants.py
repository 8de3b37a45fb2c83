"""Replicas that came in after the start: joins/0.json, joins/1.json, ..., each created once and naming one id.

Invariant: nothing is agreed on by what is read here. Whom a round averages, and whom the next one expects, is in its
roster; this only tells where to look for contributions, without a listing.
"""

from __future__ import annotations

from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.requests import create
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES, WIRE_VERSION, Fields, dump, load
from composer_replication.errors import ObjectCorrupt, ObjectMissing
from composer_replication.store.base import ObjectStore

__all__ = ["Entrants"]


class Entrants:
    """The ids beyond those that the run began with, as far as they have been seen."""

    def __init__(self, store: ObjectStore, run: str, replicas: int) -> None:
        self._store = store
        self._run = run
        self._replicas = replicas
        self._read = 0
        self._ids: set[int] = set()

    @property
    def fleet(self) -> tuple[int, ...]:
        """All ids, those of the beginning included."""
        return (*range(self._replicas), *sorted(self._ids))

    def look(self) -> tuple[int, ...]:
        """Read on until there is no further one: a single request where nobody new has come. Gives `fleet`."""
        while True:
            key = keys.join(self._read)
            try:
                data = self._store.get(key, max_bytes=MAX_POINTER_BYTES)
            except ObjectMissing:
                return self.fleet
            self._read += 1
            replica = self._parse(key, data)
            if replica is not None:
                self._ids.add(replica)

    def announce(self, replica: int) -> None:
        """Make an id known to all; once is enough for all its lives."""
        while replica not in self.look():
            create(
                self._store,
                keys.join(self._read),
                dump({"wire": WIRE_VERSION, "run": self._run, "replica": replica}),
            )

    def _parse(self, key: str, data: bytes) -> int | None:
        """None for one that can't be used: its replica announces itself again when it is started again."""
        try:
            fields = Fields(load(data, key))
            ours = (fields.whole("wire"), fields.text("run")) == (WIRE_VERSION, self._run)
            replica = fields.whole("replica")
        except (ObjectCorrupt, ValueError):
            return None
        return replica if ours and replica >= self._replicas else None
