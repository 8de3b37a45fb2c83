"""A run that was begun again by its whole fleet: one epoch after another, each with a fleet of its own.

Invariant: the rounds before an epoch's first one are those of the epochs before it, and from its first round on nothing
of theirs counts: an epoch is sealed, under a key at which its next roster would have to be, before the next one exists.

Epoch 0 lies in the run's own prefix, epoch e below epochs/e/. `epochs/1.json`, `epochs/2.json`, ... are created once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES, WIRE_VERSION, Fields, dump, load
from composer_replication.errors import ObjectCorrupt, ObjectMissing
from composer_replication.store import details
from composer_replication.store.base import Buffer, ObjectStore

__all__ = ["Epoch", "EpochStore", "current", "dump_epoch", "read_epochs", "read_fleet"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    number: int  # from 1
    run: str
    first: int  # its first round
    replicas: int  # that it begins with
    sealed: tuple[int, int]  # round and attempt at which the epoch before it was sealed


def dump_epoch(epoch: Epoch) -> bytes:
    return dump(
        {
            "wire": WIRE_VERSION,
            "run": epoch.run,
            "epoch": epoch.number,
            "first": epoch.first,
            "replicas": epoch.replicas,
            "sealed": list(epoch.sealed),
        }
    )


def _parse(data: bytes, number: int) -> Epoch:
    key = keys.epoch(number)
    try:
        fields = Fields(load(data, key))
        if (fields.whole("wire"), fields.whole("epoch")) != (WIRE_VERSION, number):
            raise ValueError("it is of another epoch or wire version")
        round, attempt = fields.several("sealed", lambda value, name: int(value))
        return Epoch(
            number=number,
            run=fields.text("run"),
            first=fields.whole("first"),
            replicas=fields.whole("replicas"),
            sealed=(round, attempt),
        )
    except (ValueError, TypeError) as error:
        raise ObjectCorrupt(f"{key} is damaged: {error}") from error


def read_epochs(store: ObjectStore) -> tuple[Epoch, ...]:
    """All epochs after the first, in order: one request where there are none."""
    found: list[Epoch] = []
    while True:
        number = len(found) + 1
        try:
            data = store.get(keys.epoch(number), max_bytes=MAX_POINTER_BYTES)
        except ObjectMissing:
            return tuple(found)
        found.append(_parse(data, number))


def current(store: ObjectStore) -> ObjectStore:
    """A run's objects as its newest epoch sees them."""
    epochs = read_epochs(store)
    return EpochStore(store, epochs) if epochs else store


def read_fleet(store: ObjectStore) -> tuple[dict[str, Any] | None, bool]:
    """(What fleet.json says of the run that `store` is a view of, whether that is its newest epoch's). None where there
    is no run. An epoch has none until its lowest id has started: until then it is that of the epoch before it."""
    view = store
    while True:
        try:
            return load(view.get(keys.FLEET, max_bytes=MAX_POINTER_BYTES), keys.FLEET), view is store
        except ObjectMissing:
            if not isinstance(view, EpochStore):
                return None, True
            view = view.before


class EpochStore:
    """The run's store as one of its epochs sees it: earlier rounds, and the checkpoints that they led to, are where
    they were made; all else is the epoch's own."""

    def __init__(self, store: ObjectStore, epochs: Sequence[Epoch]) -> None:
        self._store = store
        self._epochs = tuple(epochs)
        self._firsts = [0, *(epoch.first for epoch in epochs)]

    @property
    def uri(self) -> str:
        return self._store.uri

    @property
    def before(self) -> ObjectStore:
        """The run as the epoch before this one sees it."""
        return EpochStore(self._store, self._epochs[:-1]) if len(self._epochs) > 1 else self._store

    def put(self, key: str, data: Buffer) -> None:
        self._store.put(self._place(key), data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._store.put_if_absent(self._place(key), data)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return self._store.get(self._place(key), max_bytes=max_bytes)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return self._store.get_range(self._place(key), start, stop)

    def delete(self, keys: Iterable[str]) -> None:
        self._store.delete([self._place(key) for key in keys])

    def list(self, prefix: str) -> list[str]:
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        for number in range(len(self._firsts)):
            beginning = keys.epoch_prefix(number)
            for key, size in details.sizes(self._store, beginning + prefix).items():
                if self._place(key[len(beginning) :]) == key:
                    found[key[len(beginning) :]] = size
        return found

    def modified_seconds(self, key: str) -> float | None:
        return details.modified_seconds(self._store, self._place(key))

    def _place(self, key: str) -> str:
        return keys.epoch_prefix(self._epoch_of(key)) + key

    def _epoch_of(self, key: str) -> int:
        newest = len(self._firsts) - 1
        if (found := re.match(r"(rounds|checkpoints)/(\d{8})/", key)) is not None:
            # The state at the start of an epoch's first round is the one before's last.
            round = int(found[2]) if found[1] == "rounds" else int(found[2]) - 1
            return max((e for e in range(newest + 1) if self._firsts[e] <= round), default=0)
        return 0 if key.startswith("layouts/") else newest
