"""Bytes under keys: where the replicas of a fleet meet.

Every implementation passes one conformance suite (tests/store/conformance.py).
"""

from __future__ import annotations

from composer_replication.store.base import Buffer, ObjectStore
from composer_replication.store.keys import check_key
from composer_replication.store.local import LocalStore
from composer_replication.store.memory import MemoryStore
from composer_replication.store.open import open_store, register_scheme
from composer_replication.store.prefixed import PrefixedStore
from composer_replication.store.remote import RemoteStore
from composer_replication.store.signed import SignedStore
from composer_replication.store.signing_key import SigningKey
from composer_replication.store.split import SplitStore

__all__ = [
    "Buffer",
    "LocalStore",
    "MemoryStore",
    "ObjectStore",
    "PrefixedStore",
    "RemoteStore",
    "SignedStore",
    "SigningKey",
    "SplitStore",
    "check_key",
    "open_store",
    "register_scheme",
]
