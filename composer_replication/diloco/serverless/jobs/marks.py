"""What launchers and replicas leave in the run's store, below `launch/`.

    launch/files/HASH               recipes and code that launchers send, named by their SHA-256
    launch/recipe.json              which of them is the recipe of the newest launch
    launch/replicas/R/JOB.json      the replica's own word: started, alive, ended and how
    launch/logs/JOB/00000000.txt    its output, where the service keeps none
    launch/handles/R.json           the handle of replica R's newest job
    launch/cancelled/JOB            somebody asked for this job to stop
    launch/claims/JOB/N             since when a launcher is submitting this job; 0 if it gave up

Invariant: JSON and text only, small, and without credentials. A launcher that has died is replaced by reading them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, TypeVar

from composer_replication.diloco.serverless.handle import ReplicaHandle
from composer_replication.diloco.serverless.plain_values import from_values
from composer_replication.errors import ExecutorError, ObjectExists, ObjectMissing, ReplicationError, StoreError
from composer_replication.store import ObjectStore

__all__ = ["CLAIM_SECONDS", "Mark", "Marks"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
PREFIX = "launch/"
_MAX_JSON = 1 << 20
_MAX_FILE = 256 << 20
CLAIM_SECONDS = 120.0


@dataclass(frozen=True)
class Mark:
    """A replica's own word on one of its jobs."""

    job: str
    replica: int
    state: str = "running"  # running, or how its process ended: completed, failed, preempted
    starts: int = 1  # how often the service has started this job
    exit_code: int | None = None
    began: float = 0.0  # seconds since 1970, by the replica's clock
    seen: float = 0.0  # the last sign of life, or the end
    host: str = ""
    versions: str = ""
    result: Mapping[str, Any] = field(default_factory=dict)  # what the replica's result.json says


class Marks:
    """The objects of one run's launches."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    # -- files that launchers send -------------------------------------------------------------------------------------

    def send(self, data: bytes) -> str:
        """Store a file under its SHA-256; returns that."""
        digest = hashlib.sha256(data).hexdigest()
        try:
            self.store.put_if_absent(f"{PREFIX}files/{digest}", data)
        except ObjectExists:
            pass
        return digest

    def fetch(self, digest: str) -> bytes:
        """A file, checked: what isn't what the launcher sent raises ExecutorError."""
        try:
            data = self.store.get(f"{PREFIX}files/{digest}", max_bytes=_MAX_FILE)
        except ObjectMissing as error:
            raise ExecutorError(f"the file that the launcher sent isn't in {self.store.uri}: {error}") from error
        if hashlib.sha256(data).hexdigest() != digest:
            raise ExecutorError(f"{PREFIX}files/{digest} in {self.store.uri} isn't what the launcher sent: not used")
        return data

    def send_recipe(self, data: bytes) -> None:
        """Store the recipe that this launch goes by: with it another machine finds the back ends' jobs."""
        self._write("recipe.json", {"sha256": self.send(data)})

    def recipe(self) -> bytes | None:
        """That of the newest launch, checked; None if it was launched without one."""
        values = self._read("recipe.json")
        return None if values is None else self.fetch(str(values.get("sha256")))

    # -- replicas ------------------------------------------------------------------------------------------------------

    def mark(self, mark: Mark) -> None:
        self._write(f"replicas/{mark.replica}/{mark.job}.json", asdict(mark))

    def read(self, replica: int, job: str) -> Mark | None:
        """The replica's word on this job; None if there is none, or none that can be read."""
        return self._read_as(f"replicas/{replica}/{job}.json", lambda values: from_values(Mark, values))

    def jobs(self) -> dict[int, str]:
        """By replica, the newest job that a replica has left a word of."""
        found: dict[int, tuple[int, str]] = {}
        for key in self.store.list(f"{PREFIX}replicas/"):
            job = key.rpartition("/")[2].removesuffix(".json")
            replica, _, submission = job.rpartition("-r")[2].partition("-")
            if replica.isdecimal() and submission.isdecimal():
                found[int(replica)] = max(found.get(int(replica), (-1, "")), (int(submission), job))
        return {replica: job for replica, (_, job) in sorted(found.items())}

    def add_log(self, job: str, part: int, text: str) -> None:
        self.store.put(f"{PREFIX}logs/{job}/{part:08}.txt", text.encode("utf-8", errors="replace"))

    def count_log(self, job: str) -> int:
        """Parts that are there, found one by one: a listing is a hint only."""
        count = len(self.store.list(f"{PREFIX}logs/{job}/"))
        while self.log(job, count) is not None:
            count += 1
        return count

    def log(self, job: str, part: int) -> str | None:
        try:
            return self.store.get(f"{PREFIX}logs/{job}/{part:08}.txt").decode("utf-8", errors="replace")
        except ObjectMissing:
            return None

    # -- launchers -----------------------------------------------------------------------------------------------------

    def save(self, handle: ReplicaHandle) -> None:
        self._write(f"handles/{handle.replica_id}.json", handle.to_dict())

    def handle(self, replica: int) -> ReplicaHandle | None:
        """None if there is none, or none that can be read."""
        return self._read_as(f"handles/{replica}.json", ReplicaHandle.from_dict)

    def handles(self) -> Iterator[ReplicaHandle]:
        """Those of all replicas, by id."""
        listed = [key.rpartition("/")[2].removesuffix(".json") for key in self.store.list(f"{PREFIX}handles/")]
        for replica in sorted(int(name) for name in listed if name.isdecimal()):
            found = self.handle(replica)
            if found is not None:
                yield found

    def claim(self, job: str, now: float) -> str | None:
        """The right to submit a job, for two minutes: what `give_up` takes. None while another launcher has it."""
        for number in count():  # never deleted: who comes late to an old one can't take it for the newest
            key = f"{PREFIX}claims/{job}/{number}"
            try:
                self.store.put_if_absent(key, repr(now).encode())
                return key
            except ObjectExists:
                if abs(now - self._since(key)) < CLAIM_SECONDS:
                    return None

    def _since(self, claim: str) -> float:
        try:
            return float(self.store.get(claim))
        except (ObjectMissing, ValueError):
            return 0.0

    def give_up(self, claim: str) -> None:
        self.store.put(claim, b"0")

    def ask_to_stop(self, job: str) -> None:
        self.store.put(f"{PREFIX}cancelled/{job}", b"")

    def asked_to_stop(self, job: str) -> bool:
        try:
            self.store.get(f"{PREFIX}cancelled/{job}")
        except ObjectMissing:
            return False
        return True

    def _write(self, key: str, values: Mapping[str, Any]) -> None:
        self.store.put(PREFIX + key, json.dumps(values, sort_keys=True).encode())

    def _read_as(self, key: str, made: Callable[[dict[str, Any]], _T]) -> _T | None:
        try:
            values = self._read(key)
            return None if values is None else made(values)
        except StoreError:
            raise
        except (ReplicationError, TypeError) as error:  # cut off, or another program's
            logger.warning("%s%s in %s is passed over: %s", PREFIX, key, self.store.uri, error)
            return None

    def _read(self, key: str) -> dict[str, Any] | None:
        try:
            values = json.loads(self.store.get(PREFIX + key, max_bytes=_MAX_JSON))
        except ObjectMissing:
            return None
        except ValueError as error:
            raise ExecutorError(f"{PREFIX}{key} in {self.store.uri} isn't readable: {error}") from error
        if not isinstance(values, dict):
            raise ExecutorError(f"{PREFIX}{key} in {self.store.uri} isn't a JSON object")
        return values
