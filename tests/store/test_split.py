"""A run in two stores: pointers where they can be created only once, blobs where they can't."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from composer_replication.adapter.options import read_options
from composer_replication.collective.object_store import ObjectStoreCollective, keys
from composer_replication.collective.object_store.place import open_run
from composer_replication.diloco.serverless.allreduce import ObjectStoreAllReduce
from composer_replication.diloco.serverless.averager import Averager
from composer_replication.diloco.serverless.replica import adapter_options
from composer_replication.errors import StoreError, StoreRefused
from composer_replication.isolate import Identity
from composer_replication.recipe import recipe_from
from composer_replication.store import LocalStore, MemoryStore, PrefixedStore, details, open_store
from tests.support.threads import run_threads


class BlobsOnly(MemoryStore):
    """Refuses to create, as Hugging Face's buckets do."""

    def put_if_absent(self, key, data):
        raise StoreRefused(f"{key}: this store can't create an object only once")


def test_each_kind_of_key_has_its_place():
    blobs, control = BlobsOnly(), MemoryStore()
    store = open_run(blobs, control=control, run="runs/one")
    pointers = [
        *(
            keys.FLEET,
            keys.FINAL,
            keys.claim(0, 1),
            keys.closed(0, 1),
            keys.member(0),
            keys.layout("ab"),
            keys.result(0),
        ),
        *(keys.ready(3, 0, 1), keys.roster(3, 0), keys.mean(3, 0, 0), keys.manifest(0)),
    ]
    big = [keys.input_chunk(3, 0, 1, 1, 0), keys.output_chunk(3, 0, "ab" * 16), keys.checkpoint_blob(0, "cd" * 16)]
    for key in pointers:
        store.put_if_absent(key, key.encode())
    for key in big:
        store.put(key, key.encode())
        with pytest.raises(ValueError, match="is a blob"):
            store.put_if_absent(key, b"")
    assert control.list("") == sorted(f"runs/one/{key}" for key in pointers)
    assert blobs.list("") == sorted(f"runs/one/{key}" for key in big)
    assert store.list("") == sorted([*pointers, *big])
    assert details.sizes(store, "rounds/") == {k: len(k) for k in sorted([*pointers, *big]) if k.startswith("rounds/")}
    for key in (*pointers, *big):
        assert store.get(key) == key.encode() and store.get_range(key, 1, 3) == key.encode()[1:3]
    store.delete([*big, keys.FINAL])
    assert blobs.list("") == [] and f"runs/one/{keys.FINAL}" not in control.list("")


def test_a_run_inside_an_epoch_is_split_alike():
    for key in (keys.input_chunk(0, 0, 0, 1, 0), keys.checkpoint_blob(4, "ab" * 16)):
        assert keys.is_blob(key) and keys.is_blob(f"epochs/2/{key}")
    for key in (keys.manifest(4), keys.roster(0, 0), "doctor-1/rounds", "rounds/00000000/0/in"):
        assert not keys.is_blob(key) and not keys.is_blob(f"epochs/2/{key}")


def test_the_same_store_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="leave it out"):
        open_run(str(tmp_path), control=str(tmp_path))


def test_what_stores_tell_of_their_objects(tmp_path):
    for store in (LocalStore(tmp_path / "a"), MemoryStore(), PrefixedStore(LocalStore(tmp_path / "b"), "run")):
        store.put("x/one", b"12345")
        store.put("y", b"")
        assert details.sizes(store, "") == {"x/one": 5, "y": 0} and details.sizes(store, "x") == {"x/one": 5}
        moment = details.modified_seconds(store, "y")
        assert moment is None or moment > 1e9


def test_averages_over_two_stores():
    blobs, control, alone = BlobsOnly("blobs"), MemoryStore("control"), MemoryStore("alone")
    values = [torch.arange(10000.0) * (index + 1) for index in range(3)]

    def replica(index: int, store: MemoryStore, second: MemoryStore | None) -> torch.Tensor:
        tensor = values[index].clone()
        collective = ObjectStoreCollective(
            store, control=second, replica=index, replicas=3, mode="sharded", poll_seconds=0.005, heartbeat_seconds=60.0
        )
        Averager(collective).average(tensor)
        collective.close()
        return tensor

    split = run_threads([partial(replica, index, blobs, control) for index in range(3)])
    whole = run_threads([partial(replica, index, alone, None) for index in range(3)])
    assert all(torch.equal(mean, whole[0]) for mean in (*split, *whole))
    assert blobs.list("") and all(keys.is_blob(key) for key in blobs.list(""))
    assert keys.FLEET in control.list("") and not any(keys.is_blob(key) for key in control.list(""))


def test_a_store_that_lets_two_writers_win_is_told_of_control():
    class Careless(MemoryStore):
        def put_if_absent(self, key, data):
            self.put(key, data)

    collective = ObjectStoreCollective(Careless(), replica=0, replicas=1)
    with pytest.raises(StoreError, match="control=.*docs/stores.md"):
        Averager(collective).average(torch.ones(4))


def test_options_for_a_client_reach_it_or_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"options \['anon'\] mean nothing to the store .*leave them out"):
        ObjectStoreAllReduce(0, 1, str(tmp_path), fsspec_kwargs={"anon": True})
    pytest.importorskip("s3fs")
    store = open_store("s3://bucket/run", options={"key": "AKIA", "secret": "hush"})
    assert store._client().fs.key == "AKIA" and "hush" not in repr(store)


def test_an_adapter_and_a_recipe_pass_it_on(tmp_path):
    def meet(**options):
        read = read_options(
            "memory://adapter-blobs", interrupted=lambda: False, replica=0, replicas=2, base_horizon=5, **options
        )
        collective = read.meet(0)
        return collective._raw.uri  # what it says of itself; nothing is opened before

    assert "control: memory://adapter-control" in meet(control="memory://adapter-control")
    assert "control" not in meet()
    with pytest.raises(ValueError, match="control must be a URI or an open store, got 7"):
        meet(control=7)
    sections = {"model": {"name": "byte_gpt"}, "data": {"name": "text_bytes"}}
    recipe = recipe_from(json.dumps({"store": {"uri": "memory://a", "control": "memory://b"}, **sections}))
    options = adapter_options(recipe, Identity(replica=0, replicas=2), tmp_path)
    assert options["control"] == "memory://b"
