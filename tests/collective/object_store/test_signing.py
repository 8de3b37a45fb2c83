"""A signed run: the bits of an unsigned one, and nothing that was moved, altered or signed by others gets in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.place import open_run
from composer_replication.collective.object_store.sealing import begin_epoch
from composer_replication.errors import (
    FleetMismatch,
    ObjectCorrupt,
    ObjectMissing,
    ReplicationError,
    RoundAborted,
    SignatureError,
    StoreError,
)
from composer_replication.store import LocalStore, MemoryStore, ObjectStore, SigningKey
from composer_replication.store.signed import HEADER_BYTES, is_signed
from composer_replication.store.signing_key import SIGNING_KEY
from tests.collective import conformance
from tests.collective.conformance import SCALAR, begin, snapshot
from tests.collective.object_store.helpers import Fleet, attempt, join, scalar
from tests.collective.object_store.test_conformance import play
from tests.collective.object_store.test_epochs import killed, resume

KEY = SigningKey(b"a signing key for tests, of more than 32 bytes")
OTHER = SigningKey(b"another signing key, of more than 32 bytes, too")


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SIGNING_KEY, raising=False)


class Tampered:
    """A store, as one replica sees it whose reads somebody else answers: `answer` has bytes for a key, or None."""

    def __init__(self, store: ObjectStore, answer: Callable[[str], bytes | None]) -> None:
        self._store = store
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        told = self._answer(key)
        return self._store.get(key, max_bytes=max_bytes) if told is None else told


@pytest.mark.parametrize("mode", ["direct", "sharded"])
def test_the_bits_of_an_unsigned_run(mode: str, tmp_path: Path) -> None:
    count = iter(range(100))

    def run(replicas: int, codec: str, script: conformance.Script, guards: Any = None) -> list[Any]:
        store = LocalStore(tmp_path / str(next(count)))
        answers = play(store, replicas, codec, mode, script, guards, signing_key=KEY)
        assert all(is_signed(store.get(key)) for key in store.list(""))
        return answers

    conformance.check_same_bits_everywhere(run)
    conformance.check_leaving(run)


def test_every_kind_of_object_is_signed() -> None:
    store = MemoryStore()
    with Fleet(3, store, layout=conformance.MIXED, signing_key=KEY, mode="sharded", checkpoint_every=1) as fleet:
        fleet.round(0, {0: 1.0, 1: 2.0, 2: 3.0})
        for collective in fleet.all:
            collective.applied(lambda: snapshot(conformance.MIXED, 1))
        fleet.round(1, {0: 1.0, 1: 2.0, 2: 3.0}, leaving=True)
        for collective in fleet.all:
            collective.applied(lambda: snapshot(conformance.MIXED, 2))
            collective.finish("state-2", {})
    written = store.list("")
    kinds = {key.split("/")[0] for key in written}
    assert {"fleet.json", "final.json", "claims", "members", "layouts", "rounds", "checkpoints", "results"} <= kinds
    for key in written:
        assert is_signed(store.get(key)), key


# -- what somebody else put where it doesn't belong


class Pair:
    """Two replicas of one run; replica 1 reads through `Tampered`."""

    def __init__(self, answer: Callable[[MemoryStore, str], bytes | None], **settings: Any) -> None:
        self.store = MemoryStore()
        self.on = False
        seen = Tampered(self.store, lambda key: answer(self.store, key) if self.on else None)
        options = {"signing_key": KEY, "timeout_seconds": 1.0, "heartbeat_seconds": 30.0, **settings}
        self.fleet = Fleet(2, self.store, **options)
        self.fleet.all[1] = join(seen, 1, 2, **options)  # type: ignore[arg-type]

    def rounds(self) -> dict[int, Any]:
        """Round 0 is let alone; then what each replica says of round 1."""
        with self.fleet as fleet:
            first = fleet.round(0, {0: 1.0, 1: 3.0})
            assert [scalar(outcome) for outcome in first.values()] == [2.0, 2.0]
            for collective in fleet.all:
                collective.applied(lambda: snapshot(SCALAR, 1))
            self.on = True
            second = fleet.round(1, {0: 5.0, 1: 9.0})
            return {who: got if isinstance(got, Exception) else scalar(got) for who, got in second.items()}


READY, ROSTER = partial(keys.ready, 1, 0), keys.roster(1, 0)
BLOB = keys.input_chunk(1, 0, 0, 1, 0)


@pytest.mark.parametrize(
    ("key", "source"),
    [
        (READY(0), keys.ready(0, 0, 0)),  # of another round
        (READY(0), READY(1)),  # of another replica
        (READY(0), keys.ready(1, 1, 0)),  # of another attempt
        (ROSTER, keys.roster(0, 0)),
        (keys.mean(1, 0, 0), keys.mean(0, 0, 0)),
        (BLOB, keys.input_chunk(0, 0, 0, 1, 0)),
        (BLOB, keys.input_chunk(1, 0, 1, 1, 0)),
    ],
)
def test_moved_objects_are_refused(key: str, source: str) -> None:
    """Genuine objects of this very run, shown under another key: whoever is shown them stops; nobody takes them in."""

    def answer(store: MemoryStore, asked: str) -> bytes | None:
        if asked != key:
            return None
        if source == keys.ready(1, 1, 0):  # there is none: signed by a process of this run, as a next attempt would be
            place = open_run(store, signing_key=KEY)
            place.put(source, place.get(key))
        return store.get(source)  # missing as long as there is nothing to show

    told = Pair(answer).rounds()
    refused = told[1]
    assert isinstance(refused, (ObjectCorrupt, RoundAborted)) and "altered, or written for another key" in str(refused)
    # Replica 0 sees the store as it is: it has the right mean, or the round is off for it, too.
    assert told[0] == 7.0 or isinstance(told[0], ReplicationError)


@pytest.mark.parametrize("key", [READY(0), ROSTER, keys.mean(1, 0, 0), BLOB])
def test_objects_of_another_run_are_refused(key: str) -> None:
    """A second run with the same signing key, the same ids, rounds and values: only its nonce differs."""
    other = MemoryStore()
    with Fleet(2, other, signing_key=KEY) as fleet:
        for number in range(2):
            fleet.round(number, {0: 5.0, 1: 9.0})
            for collective in fleet.all:
                collective.applied(partial(snapshot, SCALAR, number + 1))
    told = Pair(lambda store, asked: other.get(key) if asked == key else None).rounds()
    assert isinstance(told[1], (ObjectCorrupt, RoundAborted)) and "altered, or written for another" in str(told[1])
    assert told[0] == 7.0 or isinstance(told[0], ReplicationError)


@pytest.mark.parametrize("key", [READY(0), ROSTER, keys.mean(1, 0, 0), BLOB])
def test_altered_and_unsigned_objects_are_refused(key: str) -> None:
    """One bit turned; and the same content without its signature."""

    def changed(raw: bytes) -> bytes:
        return raw[:-1] + bytes([raw[-1] ^ 1])

    def bare(raw: bytes) -> bytes:
        return raw[HEADER_BYTES:]

    for change, said in ((changed, "not what was signed"), (bare, "isn't signed")):

        def answer(store: MemoryStore, asked: str, change: Callable[[bytes], bytes] = change) -> bytes | None:
            try:
                return change(store.get(asked)) if asked == key else None
            except ObjectMissing:
                return None

        told = Pair(answer).rounds()
        assert isinstance(told[1], (ObjectCorrupt, RoundAborted)) and said in str(told[1])
        assert told[0] == 7.0 or isinstance(told[0], ReplicationError)


def test_a_forged_checkpoint_is_not_joined_from() -> None:
    """Whoever can write, but has no key, puts weights of its own under a checkpoint's key: a newcomer refuses them."""
    store = MemoryStore()
    with Fleet(2, store, signing_key=KEY) as fleet:
        fleet.round(0, {0: 1.0, 1: 3.0})
    manifest = keys.manifest(0)
    plain = store.get(manifest)[HEADER_BYTES:].replace(b'"round":0', b'"round":0 ')
    store.put(manifest, plain)
    late = join(store, 1, 2, signing_key=KEY)
    with pytest.raises(StoreError, match="isn't signed"):
        begin(late, SCALAR)


# -- processes that have another key, or none


def fingerprint(store: MemoryStore) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list("") if not key.startswith("members/")}


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (KEY, OTHER, f"signed with another key \\({KEY.id}, this process has {OTHER.id}\\)"),
        (KEY, None, "is signed, and this process has no signing key.*signing_key_file"),
        (None, KEY, "isn't signed, and this process, which has a signing key .*, takes nothing unsigned"),
    ],
)
def test_a_process_that_signs_otherwise_is_refused_before_it_writes(
    first: SigningKey | None, second: SigningKey | None, message: str
) -> None:
    store = MemoryStore()
    with Fleet(2, store, signing_key=first) as fleet:
        fleet.round(0, {0: 1.0, 1: 3.0})
        before = fingerprint(store)
        stranger = join(store, 1, 2, signing_key=second)
        with pytest.raises(FleetMismatch, match=message):
            begin(stranger, SCALAR)
        stranger.close()
        assert fingerprint(store) == before


@pytest.mark.parametrize("keyed", [(KEY, OTHER), (KEY, None), (None, KEY)])
def test_two_that_start_together_and_sign_differently(keyed: tuple[SigningKey | None, SigningKey | None]) -> None:
    """Replica 1 has looked before there was a fleet.json: it finds out when there is one."""
    store = MemoryStore()
    second = join(store, 1, 2, signing_key=keyed[1], start_timeout_seconds=20.0)
    told: list[Any] = []
    thread = threading.Thread(target=lambda: told.append(attempt(lambda: begin(second, SCALAR))))
    thread.start()
    claim = keys.claim(1, 1)
    while thread.is_alive() and not store.list(claim):
        thread.join(0.002)
    first = join(store, 0, 2, signing_key=keyed[0])
    begin(first, SCALAR)
    thread.join(30.0)
    first.close()
    second.close()
    assert isinstance(told[0], SignatureError)
    assert "signed" in str(told[0])


def test_a_key_in_the_environment_signs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIGNING_KEY, "a signing key for tests, of more than 32 bytes")
    store = MemoryStore()
    with Fleet(2, store) as fleet:
        got = fleet.round(0, {0: 1.0, 1: 3.0})
        assert [scalar(outcome) for outcome in got.values()] == [2.0, 2.0]
    assert all(is_signed(store.get(key)) for key in store.list(""))
    assert open_run(store, signing_key=KEY).get(keys.FLEET).startswith(b"{")
    for key in store.list(""):
        assert b"a signing key for tests" not in store.get(key)


def test_epochs_of_a_signed_run(tmp_path: Path) -> None:
    """A whole fleet is killed and resumed as another one; what one epoch has signed isn't taken in the other."""
    inner = MemoryStore()
    place: Any = open_run(inner, signing_key=KEY)
    killed(place, tmp_path, 3, 7)
    begin_epoch(place, 2)
    toys = resume(place, tmp_path, 2, 9)
    assert len({toy.digest for toy in toys}) == 1
    assert all(is_signed(inner.get(key)) for key in inner.list(""))
    old, new = keys.roster(7, 0), keys.epoch_prefix(1) + keys.roster(7, 0)
    for source, target in ((old, new), (new, old)):
        kept = inner.get(target)
        inner.put(target, inner.get(source))
        with pytest.raises(SignatureError, match="another key, round or run"):
            place.get(target)
        inner.put(target, kept)
