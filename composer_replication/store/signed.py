"""A store whose objects are signed, each for its own key of the store and its own run.

Invariant: what `get` returns was put under that key, in that run, by someone who holds the signing key. So an object
that is altered, moved or unsigned is refused, and nothing is used of it. (An older object of the same key is not found
out: see docs/security.md.)

An object is a header of 64 bytes and the payload as it is:

    offset 0   8 bytes   magic b"CRSIGN1\\0"
           8   8 bytes   id of the signing key
          16   32 bytes  HMAC-SHA256 of magic, length and bytes of the store's key, length and bytes of the payload
          48   zeros

The HMAC's key is derived from the signing key and the hash of the run's first object, the anchor (fleet.json, which is
created once): objects of another run don't pass, even where the signing key is the same. Only the anchor itself, and
what is written before it is there, are signed without it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterable

from composer_replication.errors import ObjectMissing, SignatureError, StoreError
from composer_replication.store import details
from composer_replication.store.base import Buffer, ObjectStore
from composer_replication.store.signing_key import SigningKey

__all__ = ["HEADER_BYTES", "SignedStore", "is_signed"]

_MAGIC = b"CRSIGN1\0"
_HEADER = struct.Struct("<8s8s32s16x")
HEADER_BYTES = _HEADER.size
_LENGTH = struct.Struct("<Q")


def is_signed(data: Buffer) -> bool:
    """Does an object, as it lies in a plain store, begin as a signed one does?"""
    return bytes(data[: len(_MAGIC)]) == _MAGIC


class SignedStore:
    """`store` with every object signed.

    Args:
        store: the run's own part of a store.
        key: what to sign with; every process of the run holds the same one.
        anchor: the object by which the run is known.
        early: beginnings of keys that may be written before the anchor.
        max_anchor_bytes: how big the anchor may be.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: SigningKey,
        *,
        anchor: str,
        early: tuple[str, ...],
        max_anchor_bytes: int,
    ) -> None:
        self._store = store
        self._key = key
        self._id = bytes.fromhex(key.id)
        self._anchor = anchor
        self._early = early
        self._max_anchor_bytes = max_anchor_bytes
        self._before_run = key.derive("before the run")
        self._of_run: bytes | None = None  # once the anchor is known

    def __repr__(self) -> str:
        return f"SignedStore({self.uri}, {self._key!r})"

    @property
    def uri(self) -> str:
        return self._store.uri

    def put(self, key: str, data: Buffer) -> None:
        self._store.put(key, self._signed(key, data))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._store.put_if_absent(key, self._signed(key, data))

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """As of any store; raises SignatureError for what isn't signed for this key and run."""
        data = self._store.get(key, max_bytes=None if max_bytes is None else max_bytes + HEADER_BYTES)
        return self._checked(key, data)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """A part of an object, all of which has to be read: a signature is that of the whole."""
        if not 0 <= start <= stop:
            raise ValueError(f"not a range of bytes: [{start}, {stop})")
        return self.get(key)[start:stop]

    def list(self, prefix: str) -> list[str]:
        return self._store.list(prefix)

    def sizes(self, prefix: str) -> dict[str, int | None]:
        """Of what `get` would give."""
        found = details.sizes(self._store, prefix)
        return {key: None if size is None else max(size - HEADER_BYTES, 0) for key, size in found.items()}

    def modified_seconds(self, key: str) -> float | None:
        return details.modified_seconds(self._store, key)

    def delete(self, keys: Iterable[str]) -> None:
        self._store.delete(keys)

    def _signed(self, key: str, data: Buffer) -> bytes:
        try:
            secret = self._secret_for(key)
        except ObjectMissing as error:
            raise StoreError(f"{key} can't be signed before {self._anchor} is in {self.uri}") from error
        return b"".join((_HEADER.pack(_MAGIC, self._id, _tag(secret, key, data)), data))

    def _checked(self, key: str, data: bytes) -> bytes:
        where = f"{key} in {self.uri}"
        if len(data) < HEADER_BYTES or not is_signed(data):
            raise SignatureError(
                f"{where} isn't signed, and this process, which has a signing key ({self._key.id}), takes nothing "
                "unsigned: give the key to every process of the run, and a new run a prefix of its own"
            )
        _, signer, tag = _HEADER.unpack_from(data)
        if signer != self._id:
            raise SignatureError(
                f"{where} is signed with another key ({signer.hex()}, this process has {self._key.id}): give all "
                "processes of the run the same key"
            )
        payload = data[HEADER_BYTES:]
        try:
            secret = self._secret_for(key)
        except ObjectMissing as error:
            raise SignatureError(f"{where}: there is no {self._anchor} that tells of which run it is") from error
        if not hmac.compare_digest(tag, _tag(secret, key, payload)):
            raise SignatureError(
                f"{where} is not what was signed: it was altered, or written for another key, round or run. Find out "
                "who can write to the store"
            )
        return payload

    def _secret_for(self, key: str) -> bytes:
        if key == self._anchor or key.startswith(self._early):
            return self._before_run
        if self._of_run is None:
            anchor = self.get(self._anchor, max_bytes=self._max_anchor_bytes)
            self._of_run = self._key.derive("the run", salt=hashlib.sha256(anchor).digest())
        return self._of_run


def _tag(secret: bytes, key: str, data: Buffer) -> bytes:
    name, size = key.encode(), memoryview(data).nbytes
    signature = hmac.new(secret, _MAGIC + _LENGTH.pack(len(name)) + name + _LENGTH.pack(size), "sha256")
    signature.update(data)
    return signature.digest()
