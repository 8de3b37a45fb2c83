"""The thread that shows how this replica is doing, and looks whether it has been outclaimed or overtaken.

Invariant: it decides nothing and raises nothing; the main thread reads `fenced` and `overtaken`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.pointers import parse_roster
from composer_replication.collective.object_store.requests import there
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES, for_people
from composer_replication.errors import ObjectMissing
from composer_replication.store.base import ObjectStore

__all__ = ["Heartbeat"]


class Heartbeat:
    def __init__(
        self,
        store: ObjectStore,
        replica: int,
        incarnation: int,
        seconds: float,
        host: str,
        *,
        patience_seconds: float = 30.0,  # with its last beat
    ) -> None:
        self._patience_seconds = patience_seconds
        self._store = store
        self._replica = replica
        self._incarnation = incarnation
        self._seconds = seconds
        self._host = host
        self._status: Mapping[str, Any] = {}
        self._counter = 0
        self._ending = ""  # what the thread is to say last, when it was stuck
        self._silent = False  # the thread has nothing to say any more, but that
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._watched: tuple[str, int, int] | None = None  # run, round, attempt
        self.fenced = False
        self.overtaken = False
        self.last_error = ""
        self._thread = threading.Thread(target=self._run, name=f"heartbeat-{replica}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def show(self, status: Mapping[str, Any]) -> None:
        self._status = dict(status)

    def watch(self, run: str, round: int, attempt: int) -> None:
        """Look out for this round's roster from now on."""
        with self._lock:
            self._watched = (run, round, attempt)
            self.overtaken = False

    def look(self) -> None:
        """One look at the claim and at the roster. Errors are kept for people to see."""
        with self._lock:
            watched = self._watched
        try:
            self.fenced = self.fenced or there(self._store, keys.claim(self._replica, self._incarnation + 1))
            if watched is None or self.overtaken:
                return
            run, round, attempt = watched
            key = keys.roster(round, attempt)
            try:
                data = self._store.get(key, max_bytes=MAX_POINTER_BYTES)
            except ObjectMissing:
                return
            roster = parse_roster(data, key, run=run, round=round, attempt=attempt)
            left_out = roster.kind != "roster" or self._replica not in roster.present
            with self._lock:
                if self._watched == watched:  # else it is about another round, of which this look knows nothing
                    self.overtaken = left_out
        except Exception as error:
            self.last_error = f"{type(error).__name__}: {error}"

    def stop(self, ending: str) -> None:
        """Stop beating; the last beat says how it ended."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._patience_seconds)
        with self._lock:
            if self._thread.is_alive() and not self._silent:
                # Its write is stuck, and would come after ours and say that we run: so it says the last word itself.
                self._ending = ending
                return
        self._beat(ending)

    def _run(self) -> None:
        self._beat("running")
        while not self._stop.wait(self._seconds):
            self.look()
            self._beat("running")
        with self._lock:
            self._silent, ending = True, self._ending
        if ending:
            self._beat(ending)

    def _beat(self, state: str) -> None:
        self._counter += 1
        try:
            content = {
                "host": self._host,
                "replica": self._replica,
                "incarnation": self._incarnation,
                "heartbeat_seconds": self._seconds,
                "counter": self._counter,
                "state": "fenced" if self.fenced else state,
                "time": time.time(),  # for people: nothing is ever decided by it
                "last_error": self.last_error,
                "status": dict(self._status),
            }
            data = for_people(content)
            if not self.fenced:
                self._store.put(keys.member(self._replica), data)
        except Exception as error:  # a status may hold anything, and change while it is read: the next beat comes
            self.last_error = f"{type(error).__name__}: {error}"
