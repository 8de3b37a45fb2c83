"""Stores that are reached over a network: S3 and what speaks like it, Google, Azure, Hugging Face, others of fsspec.

Invariant: an operation ends within its time limit with what the store holds, or with an error that says why. What may
pass (throttling, cut connections, time-outs) is tried again with jitter; what can't isn't.
"""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from typing import Any, TypeVar

from composer_replication.errors import (
    ObjectCorrupt,
    ObjectExists,
    ObjectMissing,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from composer_replication.store.base import Buffer
from composer_replication.store.clients import (
    EXTRAS,
    PARALLEL_PARTS,
    PART_BYTES,
    STALL_SECONDS,
    Client,
    check_installed,
    connect,
    library,
)
from composer_replication.store.failures import TEMPORARY, Kind, describe, kind_of
from composer_replication.store.keys import check_key
from composer_replication.store.location import parse_location
from composer_replication.store.retry import Retry

__all__ = ["RemoteStore", "known_to_fsspec"]

_LARGE_BYTES = 2 * PART_BYTES  # one request up to here, then parts side by side
_SLOWEST_BYTES_PER_SECOND = 100_000  # a transfer below this counts as stuck
_FIRST_SECONDS = 15.0  # before the first answer a wrong endpoint is likelier than an outage
_T = TypeVar("_T")


class RemoteStore:
    """The objects below `uri`, for example `s3://bucket/runs/one`, through the client of its scheme.

    Credentials and endpoints come from where the store's own tools find them (environment, profiles, instance roles).
    `options` goes to the fsspec filesystem as it is, for what the environment can't say; it may hold credentials, and
    is never shown. `retry_seconds` is for how long an operation is tried again, from its start.

    Made in one process and used in another (a forked loader worker, a pickled copy), it connects again there.
    """

    def __init__(
        self,
        uri: str,
        *,
        options: Mapping[str, Any] | None = None,
        retry_seconds: float = 90.0,
        retry: Retry | None = None,
    ) -> None:
        self._where = parse_location(uri)
        self._given = dict(options or {})
        self._retry = retry if retry is not None else Retry(seconds=retry_seconds)
        self._clients: dict[int, Client] = {}
        self._reached = False
        check_installed(self._where)
        if self._where.kind not in (*EXTRAS, "hf"):
            warnings.warn(
                f"{self._where.kind}:// is used at your own risk: nobody has checked that fsspec creates an object "
                "only once there, and the rounds rest on it",
                stacklevel=3,
            )

    @property
    def uri(self) -> str:
        return self._where.uri

    def __repr__(self) -> str:
        return f"RemoteStore({self.uri!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}}

    def put(self, key: str, data: Buffer) -> None:
        path, body = self._path(key), _bytes(data)
        self._try(f"write {key}", key, lambda client: client.put(path, body, _limit(len(body))))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        path, body, mark = self._path(key), _bytes(data), uuid.uuid4().hex
        tries = 0

        def create(client: Client) -> None:
            nonlocal tries
            if client.refusal:
                raise StoreRefused(f"{key} in {self.uri}: {client.refusal}")
            tries += 1
            try:
                client.create(path, body, mark, _limit(len(body)))
                return
            except Exception as error:
                if kind_of(error) != "exists":
                    raise
            # Outside of the handler: a failure to read the mark is its own, and has no refusal among its causes.
            if not self._is_own(client, path, body, mark, tries > 1):
                raise ObjectExists(f"{key} is there already ({self.uri})")

        self._try(f"create {key}", key, create)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        most = _LARGE_BYTES if max_bytes is None else min(max_bytes + 1, _LARGE_BYTES)
        data = self._read(key, 0, most)
        if len(data) == _LARGE_BYTES and (max_bytes is None or max_bytes >= _LARGE_BYTES):
            size = self._try(f"look at {key}", key, lambda client: client.size(self._path(key)))
            if max_bytes is None or size <= max_bytes:
                whole = self._in_parts(key, 0, size, data)
                if len(whole) == size:
                    return whole
                raise ObjectCorrupt(f"{key} changed while it was read ({self.uri})")
            raise ObjectCorrupt(f"{key} has {size} bytes, at most {max_bytes} expected ({self.uri})")
        if max_bytes is not None and len(data) > max_bytes:
            raise ObjectCorrupt(f"{key} has more than the {max_bytes} bytes expected ({self.uri})")
        return data

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if not 0 <= start <= stop:
            raise ValueError(f"not a range of bytes: [{start}, {stop})")
        if stop - start > _LARGE_BYTES:
            first = self._read(key, start, start + _LARGE_BYTES)
            return self._in_parts(key, start, stop, first) if len(first) == _LARGE_BYTES else first
        return self._read(key, start, max(stop, start + 1))[: stop - start]

    def list(self, prefix: str) -> list[str]:
        return sorted(self.sizes(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        """All keys that begin with `prefix`, and their sizes in bytes."""
        above = f"{self._where.root}/".lstrip("/")

        def find(client: Client) -> dict[str, int]:
            try:
                found = [(str(path), size) for path, size in client.sizes(self._where.root, prefix)]
            except Exception as error:
                # An empty prefix is no error anywhere, except where folders are real; a bucket that isn't there is one.
                if kind_of(error) == "missing" and self._where.kind not in EXTRAS:
                    return {}
                raise
            keys = ((path.lstrip("/").removeprefix(above), size) for path, size in found)
            return {key: size for key, size in keys if key.startswith(prefix) and _is_key(key)}

        return self._try(f"list {prefix!r}", None, find)

    def modified_seconds(self, key: str) -> float | None:
        """When an object was written by the store's own clock, in seconds since 1970; None if it doesn't tell."""
        return self._try(f"look at {key}", key, lambda client: client.modified(self._path(key)))

    def delete(self, keys: Iterable[str]) -> None:
        paths = [self._path(key) for key in keys]
        if paths:
            self._try(f"delete {len(paths)} objects", None, lambda client: client.remove(paths))

    # -- inside

    def _path(self, key: str) -> str:
        return f"{self._where.root}/{check_key(key)}"

    def _client(self) -> Client:
        # By process: a client's event loop and sockets don't survive a fork. No lock, as another thread might have
        # held it at the fork; two threads at once make two clients, and one is dropped.
        client = self._clients.get(os.getpid())
        return client or self._clients.setdefault(os.getpid(), connect(self._where, self._given))

    def _read(self, key: str, start: int, stop: int) -> bytes:
        path = self._path(key)

        def read(client: Client) -> bytes:
            try:
                return client.read(path, start, stop, _limit(stop - start))
            except Exception as error:
                if kind_of(error) == "empty range":  # the object ends before `start`, or is empty
                    return b""
                raise

        return self._try(f"read {key}", key, read)

    def _in_parts(self, key: str, start: int, stop: int, first: bytes) -> bytes:
        """[start, stop), of which `first` has the beginning: one buffer, and a few parts in flight."""
        buffer = BytesIO()
        buffer.seek(stop - start - 1)
        buffer.write(b"\0")  # room for all at once; getvalue() gives this very buffer, without a copy
        buffer.seek(0)
        buffer.write(first)
        end = start + len(first)
        begins = range(end, stop, PART_BYTES)

        def part(begin: int) -> tuple[int, bytes]:
            return begin, self._read(key, begin, min(begin + PART_BYTES, stop))

        with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
            for at in range(0, len(begins), PARALLEL_PARTS):
                for begin, data in pool.map(part, begins[at : at + PARALLEL_PARTS]):
                    buffer.seek(begin - start)
                    buffer.write(data)
                    end = max(end, begin + len(data))
        buffer.truncate(end - start)
        return buffer.getvalue()

    def _is_own(self, client: Client, path: str, body: bytes | bytearray, mark: str, again: bool) -> bool:
        """Is the object that refuses us what this very call has written, by a try whose answer was lost?"""
        found = client.mark_of(path)
        if found is not None or not again:
            return found == mark
        # The store keeps no metadata: equal bytes after a try of ours are taken for ours.
        return client.read(path, 0, len(body) + 1, _limit(len(body))) == bytes(body)

    def _try(self, action: str, key: str | None, call: Callable[[Client], _T]) -> _T:
        failure: StoreError | None = None
        retry = self._retry
        if not self._reached:
            retry = replace(retry, seconds=min(retry.seconds, _FIRST_SECONDS))
        for _ in retry.pauses():
            try:
                result = call(self._client())
                self._reached = True
                return result
            except StoreError:
                self._reached = True
                raise
            except Exception as error:
                kind = kind_of(error)
                failure = self._explain(action, key, kind, error, retry.seconds)
                if kind not in TEMPORARY:
                    break
        assert failure is not None
        # Without the client's own exception: what it says may hold credentials.
        raise failure from None

    def _explain(self, action: str, key: str | None, kind: Kind, error: Exception, seconds: float) -> StoreError:
        if kind == "missing" and key is not None and not action.startswith(("write", "create")):
            return ObjectMissing(f"{key} isn't there ({self.uri})")
        if kind == "missing":
            kind = "bucket"  # writing or listing finds nothing missing but the bucket itself
        secrets = [str(value) for value in self._given.values() if isinstance(value, str)]
        text = f"can't {action} in {self.uri}: {describe(error, kind, secrets)}"
        if kind in TEMPORARY:
            return StoreUnavailable(f"{text}; tried for {seconds:g} s")
        return StoreRefused(text)


def _bytes(data: Buffer) -> bytes | bytearray:
    return bytes(data) if isinstance(data, memoryview) else data


def _limit(size: int) -> float:
    return 2 * STALL_SECONDS + size / _SLOWEST_BYTES_PER_SECOND


def _is_key(name: str) -> bool:
    try:
        check_key(name)
    except ValueError:
        return False
    return True


def known_to_fsspec(scheme: str) -> bool:
    """Is there a filesystem of that name, if fsspec is installed?"""
    try:
        registry = library("fsspec.registry")
    except ImportError:
        return False
    return scheme in registry.known_implementations or scheme in registry.registry
