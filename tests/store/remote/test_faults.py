"""A real S3 server behind a proxy that throttles, cuts and delays; and the words in which each failure is told."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from composer_replication.errors import ObjectExists, ObjectMissing, StoreError, StoreRefused, StoreUnavailable
from composer_replication.store import RemoteStore, open_store
from composer_replication.store.retry import Retry
from tests.support.fault_proxy import FaultProxy
from tests.support.servers import SECRET_KEY, s3_client

pytestmark = pytest.mark.servers


class Clock:
    """Time that passes only in pauses."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)

    def retry(self, seconds: float) -> Retry:
        return Retry(seconds=seconds, clock=lambda: self.now, sleep=self.sleep, jitter=lambda: 0.5)


@pytest.fixture
def proxy(seaweedfs: str):
    with FaultProxy(seaweedfs) as proxy:
        yield proxy


@pytest.fixture
def through(s3_uri: str, seaweedfs: str, proxy: FaultProxy) -> RemoteStore:
    return RemoteStore(s3_uri.replace(seaweedfs, proxy.endpoint), retry=Retry(seconds=20, first_pause_seconds=0.01))


@pytest.mark.parametrize("status", [429, 503, 500])
def test_throttling_passes(through: RemoteStore, proxy: FaultProxy, status: int) -> None:
    proxy.add("status", method="PUT", status=status, code="SlowDown" if status != 500 else "InternalError", times=5)
    through.put_if_absent("a", b"one")
    proxy.add("status", method="GET", status=status, times=5)
    assert through.get("a") == b"one"
    with pytest.raises(ObjectMissing):
        through.get("b")
    proxy.add("status", method="GET", status=status, target="list-type", times=3)
    assert through.list("") == ["a"]
    assert all(fault.hits == fault.times for fault in proxy.faults)


@pytest.mark.parametrize("what", ["refuse", "cut request", "cut answer"])
def test_cut_connections_pass(through: RemoteStore, proxy: FaultProxy, what: Any) -> None:
    data = bytes(range(256)) * 4096
    proxy.add(what, method="PUT", times=3)
    through.put_if_absent("a", data)
    proxy.add(what, method="GET", times=3)
    assert through.get("a", max_bytes=len(data)) == data
    assert through.get_range("a", 1000, 2000) == data[1000:2000]


def test_a_lost_answer_is_no_refusal(through: RemoteStore, proxy: FaultProxy) -> None:
    """The first try has created the object, but nobody heard: the second one's refusal is not somebody else."""
    lost = proxy.add("lose answer", method="PUT", times=3)
    through.put_if_absent("a", b"mine")
    assert lost.hits >= 1 and through.get("a") == b"mine"
    lost.times = lost.hits
    with pytest.raises(ObjectExists):
        through.put_if_absent("a", b"mine")


def test_a_mark_that_can_not_be_read_at_once(through: RemoteStore, proxy: FaultProxy) -> None:
    """What says whose the object is fails in its turn: that is a failure to be tried again, and no refusal."""
    proxy.add("lose answer", method="PUT")
    marks = proxy.add("status", method="HEAD", status=503, times=2)
    through.put_if_absent("a", b"mine")
    assert marks.hits == 2 and through.get("a") == b"mine"


def test_a_lost_answer_does_not_hide_another_writer(
    through: RemoteStore, proxy: FaultProxy, s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody writes the same bytes between our failed try and the next: they have won, we have not."""
    other = open_store(s3_uri)
    proxy.add("cut request", method="PUT", times=1)
    client = through._client()
    create, calls = client.create, []

    def first_then_other(*args: Any) -> None:
        calls.append(args)
        try:
            create(*args)
        finally:
            if len(calls) == 1:
                other.put_if_absent("a", b"same")

    monkeypatch.setattr(client, "create", first_then_other)
    with pytest.raises(ObjectExists):
        through.put_if_absent("a", b"same")


def test_delays_are_waited_for(through: RemoteStore, proxy: FaultProxy) -> None:
    proxy.add("delay", seconds=0.3, times=2)
    through.put("a", b"x")
    assert through.get("a") == b"x"


def test_trying_again_ends_at_the_limit(s3_uri: str, seaweedfs: str, proxy: FaultProxy) -> None:
    clock = Clock()
    store = RemoteStore(s3_uri.replace(seaweedfs, proxy.endpoint), retry=clock.retry(60))
    store.put("a", b"x")
    proxy.add("status", method="GET", status=503, times=10**6)
    with pytest.raises(StoreUnavailable, match=r"too fast.*tried for 60 s"):
        store.get("a")
    assert 55 < clock.now <= 60
    assert len(clock.pauses) < 25  # they grow
    assert clock.pauses[:4] == pytest.approx([0.075, 0.15, 0.3, 0.6]) and max(clock.pauses) <= 5


def test_a_store_that_never_answered_is_not_waited_for_long() -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        clock = Clock()
        uri = f"s3://rounds/x?endpoint_url=http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StoreUnavailable, match=r"can't be reached.*endpoint"):
            RemoteStore(uri, retry=clock.retry(600)).get("a")
        assert clock.now <= 15


def test_each_refusal_says_what_it_is(
    s3_uri: str, seaweedfs: str, moto: str, through: RemoteStore, proxy: FaultProxy
) -> None:
    def message(store: RemoteStore, call: str = "get", *args: Any) -> str:
        with pytest.raises(StoreRefused) as caught:
            getattr(store, call)(*(args or ("a",)))
        assert SECRET_KEY not in str(caught.value) and "testkey" not in str(caught.value)
        assert caught.value.__cause__ is None and caught.value.__suppress_context__
        return str(caught.value)

    wrong = RemoteStore(s3_uri, options={"key": "testkey", "secret": "wrong-secret-0123"})
    text = message(wrong)
    assert "refuses these credentials" in text and "rights" in text and "wrong-secret-0123" not in text
    # SeaweedFS would make the bucket.
    no_bucket = RemoteStore(s3_uri.replace("s3://rounds", "s3://nosuchbucket").replace(seaweedfs, moto))
    for call, *args in (("get", "a"), ("put", "a", b""), ("put_if_absent", "a", b""), ("list", "")):
        assert "bucket, container or repository isn't there" in message(no_bucket, call, *args)
    proxy.add("status", method="GET", status=400, code="ExpiredToken")
    assert "expired" in message(through)
    proxy.add("status", method="GET", status=403, code="RequestTimeTooSkewed")
    assert "clock" in message(through)
    proxy.add("status", method="PUT", status=403, code="AccessDenied")
    assert "refuses these credentials" in message(through, "put", "a", b"")
    assert proxy.count("PUT") == 1  # not tried again


def test_missing_credentials_are_named(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(StoreRefused, match="no credentials.*environment variables"):
        open_store(s3_uri).get("a")


def test_missing_buckets_elsewhere(fake_gcs: str, azurite: str) -> None:
    for uri in (f"gs://nosuchbucket/x?endpoint_url={fake_gcs}&auth=anon&project=test", "az://nosuchcontainer/x"):
        store = open_store(uri)
        for call in (lambda s=store: s.put_if_absent("a", b""), lambda s=store: s.list("")):
            with pytest.raises(StoreRefused, match="bucket, container or repository isn't there"):
                call()


def test_reads_are_one_request_each(through: RemoteStore, proxy: FaultProxy) -> None:
    through.put("a", b"x" * 1000)
    proxy.requests.clear()
    through.get("a")
    through.get("a", max_bytes=2000)
    with pytest.raises(ObjectMissing):
        through.get("b")
    through.get_range("a", 0, 10)
    assert [method for method, _ in proxy.requests] == ["GET"] * 4
    proxy.requests.clear()
    through.put("c", b"")
    through.put_if_absent("d", b"")
    through.list("a")
    through.delete(["c", "d"])
    assert [method for method, _ in proxy.requests] == ["PUT", "PUT", "GET", "POST"]


def test_deletes_that_are_refused_are_told(seaweedfs: str, s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 answers a delete of many keys with success, and the refusals inside."""
    store = open_store(s3_uri)
    store.put("a", b"")
    client = store._client()
    call = client.call

    def refused(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "call_s3":
            return {"Errors": [{"Code": "AccessDenied", "Message": "no", "Key": "a"}]}
        return call(name, *args, **kwargs)

    monkeypatch.setattr(client, "call", refused)
    with pytest.raises(StoreError, match="refuses these credentials"):
        store.delete(["a"])
    assert s3_client(seaweedfs).list_objects_v2(Bucket="rounds", Prefix=s3_uri[12:].split("?")[0])["KeyCount"] == 1
