"""Repositories of Hugging Face against a stand-in of its HTTP interface; the client library is the real one."""

from __future__ import annotations

from functools import partial

import pytest

from composer_replication.errors import ObjectExists, StoreRefused
from composer_replication.store import RemoteStore
from composer_replication.store.retry import Retry
from tests.store import conformance
from tests.support.hub import Hub

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.servers


@pytest.fixture
def hub():
    with Hub() as hub:
        yield hub


def store_of(hub: Hub, uri: str = "hf://datasets/me/runs/one", token: str = "hf_of_the_suite") -> RemoteStore:
    options = {"endpoint": hub.endpoint, "token": token}
    return RemoteStore(uri, options=options, retry=Retry(seconds=30, first_pause_seconds=0.01))


@pytest.mark.parametrize("uri", ["hf://datasets/me/runs/one", "hf://me/runs"])
def test_conformance(hub: Hub, uri: str) -> None:
    store = store_of(hub, uri)
    for check in (
        conformance.check_objects,
        conformance.check_ranges,
        conformance.check_list_and_delete,
        conformance.check_bad_keys,
        partial(conformance.check_race_of_threads, threads=3, keys=4),
    ):
        check(store)
    assert hub.conflicts > 0  # the race was one


def test_a_lost_answer_is_no_refusal(hub: Hub) -> None:
    store = store_of(hub)
    hub.lose_answers = 1
    store.put_if_absent("a", b"mine")
    assert hub.lose_answers == 0 and hub.commits == 1 and store.get("a") == b"mine"
    with pytest.raises(ObjectExists):
        store.put_if_absent("a", b"mine")


def test_refusals_say_what_they_are(hub: Hub) -> None:
    with pytest.raises(StoreRefused, match="bucket, container or repository isn't there"):
        store_of(hub, "hf://datasets/me/other").get("a")
    with pytest.raises(StoreRefused, match="refuses these credentials") as caught:
        store_of(hub, token="hf_wrong_token").put_if_absent("a", b"")
    assert "hf_wrong_token" not in str(caught.value)
