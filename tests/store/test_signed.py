"""Signed objects: what is refused, and why; and the key that nobody gets to see."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest

from composer_replication.errors import ObjectCorrupt, ObjectExists, ObjectMissing, SignatureError, StoreError
from composer_replication.store import LocalStore, MemoryStore, SignedStore, SigningKey, SplitStore
from composer_replication.store.signed import HEADER_BYTES, is_signed
from composer_replication.store.signing_key import SIGNING_KEY, find_signing_key, hkdf_sha256, read_signing_key
from tests.store import conformance

SECRET = b"0123456789abcdef0123456789abcdef"
KEY = SigningKey(SECRET)
OTHER = SigningKey(SECRET[::-1])


def signed(store: object, key: SigningKey = KEY) -> SignedStore:
    return SignedStore(store, key, anchor="fleet.json", early=("claims/",), max_anchor_bytes=1000)  # type: ignore[arg-type]


def run(content: bytes = b"run 1", key: SigningKey = KEY) -> tuple[MemoryStore, SignedStore]:
    inner = MemoryStore()
    store = signed(inner, key)
    store.put("fleet.json", content)
    return inner, store


# -- objects


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 40])
def test_what_was_put_is_got(payload: bytes) -> None:
    inner, store = run()
    store.put("a/b", payload)
    assert store.get("a/b") == payload == store.get("a/b", max_bytes=len(payload))
    assert store.get_range("a/b", 3, 10) == payload[3:10]
    raw = inner.get("a/b")
    assert is_signed(raw) and raw[HEADER_BYTES:] == payload and len(raw) == len(payload) + HEADER_BYTES
    store.put_if_absent("a/c", memoryview(payload))
    assert store.get("a/c") == payload
    with pytest.raises(ObjectExists):
        store.put_if_absent("a/c", b"")
    assert store.list("a/") == ["a/b", "a/c"]
    assert store.sizes("a/") == {"a/b": len(payload), "a/c": len(payload)}
    store.delete(["a/b"])
    with pytest.raises(ObjectMissing):
        store.get("a/b")


def test_every_bit_counts() -> None:
    """One bit turned, anywhere in the object but the zeros that fill its header."""
    inner, store = run()
    store.put("key", b"payload")
    raw = inner.get("key")
    for place in (*range(48), *range(HEADER_BYTES, len(raw))):
        changed = bytearray(raw)
        changed[place] ^= 1
        inner.put("key", changed)
        with pytest.raises(SignatureError):
            store.get("key")
    for cut in (raw[:-1], raw[:HEADER_BYTES], raw[:10], b"", raw + b"\0"):
        inner.put("key", cut)
        with pytest.raises(SignatureError):
            store.get("key")


def test_an_object_belongs_to_its_key() -> None:
    inner, store = run()
    store.put("rounds/00000001/0/ready/0.json", b"mine")
    for elsewhere in (
        "rounds/00000001/0/ready/1.json",
        "rounds/00000002/0/ready/0.json",
        "rounds/00000001/1/ready/0.json",
    ):
        inner.put(elsewhere, inner.get("rounds/00000001/0/ready/0.json"))
        with pytest.raises(SignatureError, match="altered, or written for another key, round or run"):
            store.get(elsewhere)
    # The key's and the payload's bytes can't be shifted into one another.
    store.put("ab", b"c")
    inner.put("a", inner.get("ab"))
    inner.put("abc", inner.get("ab")[:HEADER_BYTES])
    for moved in ("a", "abc"):
        with pytest.raises(SignatureError):
            store.get(moved)


def test_an_object_belongs_to_its_run() -> None:
    """Two runs with the same signing key: fleet.json, in which a run's nonce is, tells them apart."""
    first, one = run(b"run 1")
    second, two = run(b"run 2")
    one.put("rounds/0", b"of the first run")
    second.put("rounds/0", first.get("rounds/0"))
    with pytest.raises(SignatureError, match="another key, round or run"):
        two.get("rounds/0")
    # Also to one that was moved together with its fleet.json, into a run that has begun.
    second.put("fleet.json", first.get("fleet.json"))
    with pytest.raises(SignatureError):
        two.get("rounds/0")


def test_other_keys_and_unsigned_objects() -> None:
    inner, store = run()
    store.put("a", b"x")
    with pytest.raises(SignatureError, match=f"signed with another key \\({KEY.id}, this process has {OTHER.id}\\)"):
        signed(inner, OTHER).get("a")
    inner.put("a", b"as it would be without a key, and longer than a signature's header; " * 3)
    with pytest.raises(SignatureError, match="isn't signed, and this process, which has a signing key"):
        store.get("a")
    assert issubclass(SignatureError, ObjectCorrupt)


def test_before_the_run_is_known() -> None:
    inner = MemoryStore()
    store = signed(inner)
    store.put_if_absent("claims/0/1", b"me")
    assert store.get("claims/0/1") == b"me"
    with pytest.raises(StoreError, match="a can't be signed before fleet.json is in memory://"):
        store.put("a", b"x")
    with pytest.raises(ObjectMissing):
        store.get("a")
    _, other = run()
    other.put("a", b"x")
    inner.put("a", other._store.get("a"))
    with pytest.raises(SignatureError, match="no fleet.json that tells of which run it is"):
        store.get("a")
    store.put("fleet.json", b"run 1")
    assert store.get("a") == b"x"  # it is the same run


def test_sizes_are_bounded_before_anything_is_read() -> None:
    inner, store = run()
    store.put("a", bytes(100))
    assert len(store.get("a", max_bytes=100)) == 100
    with pytest.raises(ObjectCorrupt, match="at most 163 expected"):
        store.get("a", max_bytes=99)
    inner.put("fleet.json", bytes(5000))
    with pytest.raises(ObjectCorrupt, match="at most 1064 expected"):
        signed(inner).get("a")


@pytest.mark.parametrize(
    "check",
    [
        conformance.check_objects,
        conformance.check_ranges,
        conformance.check_list_and_delete,
        conformance.check_bad_keys,
        conformance.check_race_of_threads,
    ],
)
@pytest.mark.parametrize("place", ["memory", "file"])
def test_it_is_a_store_like_any_other(check, place: str, tmp_path: Path) -> None:
    inner = MemoryStore("t") if place == "memory" else LocalStore(tmp_path / "store")
    check(SignedStore(inner, KEY, anchor="fleet.json", early=("",), max_anchor_bytes=1000))


def test_over_two_stores(tmp_path: Path) -> None:
    inner = SplitStore(MemoryStore(), LocalStore(tmp_path / "control"), lambda key: key.startswith("in/"))
    store = signed(inner)
    store.put_if_absent("fleet.json", b"run")
    store.put("in/0", b"blob")
    assert store.get("in/0") == b"blob" and store.uri == inner.uri


# -- the key


def test_hkdf_is_that_of_the_rfc() -> None:
    """RFC 5869, appendix A: test cases 1 and 3 (without salt and info)."""
    secret = bytes([0x0B] * 22)
    first = hkdf_sha256(secret, salt=bytes(range(13)), info=bytes(range(0xF0, 0xFA)), length=42)
    assert first.hex() == ("3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865")
    third = hkdf_sha256(secret, salt=b"", info=b"", length=42)
    assert third.hex() == ("8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8")


def test_a_key_is_never_shown() -> None:
    _, store = run()
    for shown in (repr(KEY), str(KEY), f"{KEY}", repr(store), repr([KEY])):
        assert "0123456789abcdef" not in shown
    assert KEY.id in repr(KEY) and KEY.id != OTHER.id
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="isn't pickled"):
            copied(KEY)
    assert not hasattr(KEY, "__dict__")
    assert SECRET not in store._store.get("fleet.json")  # type: ignore[attr-defined]


def key_file(folder: Path, content: bytes = SECRET, mode: int = 0o600) -> Path:
    path = folder / "signing.key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_key_from_a_file(tmp_path: Path) -> None:
    assert read_signing_key(key_file(tmp_path, SECRET + b"\n")).id == KEY.id
    assert read_signing_key(key_file(tmp_path, mode=0o400)).id == KEY.id


@pytest.mark.skipif(os.name != "posix", reason="there are no such modes elsewhere")
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o601])
def test_a_key_file_that_others_can_read(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, mode=mode)
    with pytest.raises(ValueError, match=rf"open to others than its owner \(mode {mode:o}\).*chmod 600 .*signing.key"):
        read_signing_key(path)


def test_files_that_hold_no_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 31 bytes, at least 32 are needed: make one with"):
        read_signing_key(key_file(tmp_path, SECRET[:31] + b"   \n"))
    with pytest.raises(ValueError, match="more than 4096 bytes"):
        read_signing_key(key_file(tmp_path, bytes(5000)))
    with pytest.raises(ValueError, match=r"nowhere.key can't be read: No such file.*openssl rand"):
        read_signing_key(tmp_path / "nowhere.key")
    with pytest.raises(ValueError, match="not a plain file"):
        read_signing_key(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match="not a plain file"):  # and nobody waits for a writer
        read_signing_key(tmp_path / "pipe")


def test_where_a_key_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SIGNING_KEY, raising=False)
    path = key_file(tmp_path)
    assert find_signing_key() is None
    found = find_signing_key(path)
    assert found is not None and found.id == KEY.id and find_signing_key(KEY) is KEY
    monkeypatch.setenv(SIGNING_KEY, SECRET.decode())
    for given in (None, path, KEY):
        found = find_signing_key(given)
        assert found is not None and found.id == KEY.id
    with pytest.raises(ValueError, match=f"isn't the one in {SIGNING_KEY}") as refused:
        find_signing_key(OTHER)
    assert SECRET.decode() not in str(refused.value)
    monkeypatch.setenv(SIGNING_KEY, "")  # set, and no key: someone meant to sign
    with pytest.raises(ValueError, match=f"{SIGNING_KEY} has 0 bytes"):
        find_signing_key()
