"""The key that a run's objects are signed with: read from a file or the environment, and never shown.

Invariant: a key is in no text, no pickle and no object of the store; what is shown of it is its id, a hash that tells
two keys apart and nothing else. Keys for use are derived from it (HKDF with SHA-256, RFC 5869).
"""

from __future__ import annotations

import hmac
import os
import stat
from typing import NoReturn

__all__ = ["LEAST_KEY_BYTES", "SIGNING_KEY", "SigningKey", "find_signing_key", "hkdf_sha256", "read_signing_key"]

SIGNING_KEY = "COMPOSER_REPLICATION_SIGNING_KEY"  # the environment variable that may hold the key itself
LEAST_KEY_BYTES = 32
_MOST_KEY_BYTES = 4096
_MAKE_ONE = "make one with: (umask 077; openssl rand -base64 32 > signing.key)"


def hkdf_sha256(secret: bytes, *, salt: bytes, info: bytes, length: int = 32) -> bytes:
    """HMAC-based key derivation: extract with `salt`, expand with `info` (RFC 5869)."""
    if not 0 < length <= 255 * 32:
        raise ValueError(f"length must be from 1 to {255 * 32}, got {length}")
    extracted = hmac.digest(salt or bytes(32), secret, "sha256")
    block, expanded = b"", b""
    while len(expanded) < length:
        block = hmac.digest(extracted, block + info + bytes([len(expanded) // 32 + 1]), "sha256")
        expanded += block
    return expanded[:length]


class SigningKey:
    """A secret of at least 32 bytes, white space around it aside. Raises ValueError for a shorter one."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes, *, where: str = "the signing key") -> None:
        secret = secret.strip()
        if len(secret) < LEAST_KEY_BYTES:
            raise ValueError(f"{where} has {len(secret)} bytes, at least {LEAST_KEY_BYTES} are needed: {_MAKE_ONE}")
        self._secret = secret

    def derive(self, purpose: str, salt: bytes = b"") -> bytes:
        """A key of 32 bytes for one purpose."""
        return hkdf_sha256(self._secret, salt=salt, info=b"composer-replication 1 " + purpose.encode())

    @property
    def id(self) -> str:
        """Tells keys apart; gives none away."""
        return self.derive("id")[:8].hex()

    def __repr__(self) -> str:
        return f"SigningKey(id={self.id})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a signing key isn't pickled: give each process the file or the environment variable")


def read_signing_key(path: str | os.PathLike[str]) -> SigningKey:
    """The key in a file that nobody but its owner can read. Raises ValueError, with the remedy."""
    name: str = os.path.expanduser(os.fspath(path))
    try:
        # Not to hang on what isn't a plain file, and to look at the very file that is read.
        handle = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"signing_key_file {name} can't be read: {why}; {_MAKE_ONE}") from None
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"signing_key_file {name} is not a plain file")
        if os.name == "posix" and about.st_mode & 0o077:
            raise ValueError(
                f"signing_key_file {name} is open to others than its owner (mode {stat.S_IMODE(about.st_mode):03o}), "
                f"who could sign with it: chmod 600 {name}, and a new key if others had access"
            )
        secret = os.read(handle, _MOST_KEY_BYTES + 1)
    finally:
        os.close(handle)
    if len(secret) > _MOST_KEY_BYTES:
        raise ValueError(f"signing_key_file {name} has more than {_MOST_KEY_BYTES} bytes: that is no signing key")
    return SigningKey(secret, where=f"signing_key_file {name}")


def find_signing_key(given: SigningKey | str | os.PathLike[str] | None = None) -> SigningKey | None:
    """The key that is `given`, by itself or as a file; else that of the environment; else None: nothing is signed.

    Raises ValueError for a key that can't be used, and for two that differ.
    """
    key = given if given is None or isinstance(given, SigningKey) else read_signing_key(given)
    held = os.environ.get(SIGNING_KEY)
    if held is None:
        return key
    found = SigningKey(held.encode(), where=SIGNING_KEY)
    if key is not None and not hmac.compare_digest(key.derive("id"), found.derive("id")):
        raise ValueError(f"the signing key that is given isn't the one in {SIGNING_KEY}: leave one of the two out")
    return found
