"""The stores' conformance suite over real servers: two that speak S3, and the emulators of Google's and Azure's."""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import Any

import pytest

from composer_replication.errors import ObjectCorrupt, ObjectExists, ObjectMissing
from composer_replication.store import PrefixedStore, RemoteStore, open_store
from tests.store import conformance
from tests.support.fault_proxy import FaultProxy

pytestmark = pytest.mark.servers


@pytest.mark.parametrize(
    "check",
    [
        conformance.check_objects,
        conformance.check_ranges,
        conformance.check_list_and_delete,
        conformance.check_bad_keys,
        partial(conformance.check_race_of_threads, keys=10),
    ],
    ids=["objects", "ranges", "list and delete", "bad keys", "race of threads"],
)
def test_conformance(uri: str, check) -> None:
    check(open_store(uri))


def test_a_part_of_a_store(s3_uri: str) -> None:
    whole = open_store(s3_uri)
    whole.put("runs/another/a/b/one", b"not in this part")
    store = PrefixedStore(whole, "runs/one")
    conformance.check_objects(store)
    conformance.check_list_and_delete(store)
    assert whole.get("runs/another/a/b/one") == b"not in this part"


@pytest.mark.processes
def test_a_race_of_processes_has_one_winner(uri: str) -> None:
    conformance.check_race_of_processes(partial(open_store, uri), keys=20)


@pytest.mark.processes
def test_what_one_process_writes_another_finds_at_once(s3_uri: str) -> None:
    conformance.check_seen_by_other_processes(partial(open_store, s3_uri), rounds=8)


def test_no_client_keeps_what_it_has_seen(uri: str) -> None:
    """Two clients that know nothing of each other: a key missed before, a listing seen before, an object replaced."""
    one, other = open_store(uri), open_store(uri)
    assert one.list("") == []
    for i in range(5):
        with pytest.raises(ObjectMissing):
            one.get(f"talk/{i}")
        other.put_if_absent(f"talk/{i}", b"x" * i)
        assert one.get(f"talk/{i}") == b"x" * i
        assert one.list("talk/") == [f"talk/{j}" for j in range(i + 1)]
        other.put(f"talk/{i}", b"longer than before")
        assert one.get(f"talk/{i}") == b"longer than before"
    other.delete(["talk/0"])
    with pytest.raises(ObjectMissing):
        one.get("talk/0")
    assert "talk/0" not in one.list("talk/")


@pytest.mark.processes
def test_a_killed_writer_leaves_no_torn_object(seaweedfs: str, s3_uri: str) -> None:
    size = 16 * 1024 * 1024
    with FaultProxy(seaweedfs, bytes_per_second=size) as proxy:
        through = s3_uri.replace(seaweedfs, proxy.endpoint)
        conformance.check_killed_writer(partial(open_store, through), lambda: proxy.body_bytes, size)


def test_the_same_bytes_twice_are_still_refused(uri: str) -> None:
    # The rounds find out in this way whether a store's create-if-absent is honest.
    store = open_store(uri)
    store.put_if_absent("claim", b"me")
    with pytest.raises(ObjectExists):
        store.put_if_absent("claim", b"me")


def test_large_objects_go_in_parts(s3_uri: str) -> None:
    size = 64 * 1024 * 1024 + 12345
    block = bytes(range(251)) * 1001
    data = (block * (size // len(block) + 1))[:size]
    store = open_store(s3_uri)
    store.put_if_absent("large", data)
    with pytest.raises(ObjectExists):
        store.put_if_absent("large", data)
    assert store.get("large", max_bytes=size) == data
    assert store.get_range("large", size - 10, size + 10) == data[-10:]
    with pytest.raises(ObjectCorrupt, match="at most"):
        store.get("large", max_bytes=size - 1)
    store.delete(["large"])
    with pytest.raises(ObjectMissing):
        store.get("large")


def test_listings_beyond_one_page(s3_uri: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    store = open_store(s3_uri)
    keys = [f"many/{i:04d}" for i in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b""), keys))
    assert store.list("many/") == keys
    store.delete(keys)
    assert store.list("many/") == []


def _child(store: RemoteStore, out: Any) -> None:
    store.put_if_absent("from-child", b"c")
    out.put(store.get("from-parent"))


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_store_in_use_goes_into_other_processes(s3_uri: str, method: str) -> None:
    """As a loader worker inherits it: it connects anew there, and both go on."""
    store = open_store(s3_uri)
    store.put("from-parent", b"p")
    context: Any = multiprocessing.get_context(method)
    out = context.Queue()
    child = context.Process(target=_child, args=(store, out))
    child.start()
    assert out.get(timeout=60) == b"p"
    child.join(timeout=30)
    assert child.exitcode == 0
    assert store.get("from-child") == b"c"
