"""What a remote store's URI may say, what it must not, and what is told when a client isn't installed."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from composer_replication.errors import ObjectExists, StoreError, StoreRefused
from composer_replication.store import RemoteStore, open_store
from composer_replication.store.location import parse_location
from composer_replication.store.retry import Retry

pytest.importorskip("s3fs")


@pytest.mark.parametrize(
    ("uri", "kind", "root", "options"),
    [
        ("s3://bucket/runs/one", "s3", "bucket/runs/one", {}),
        ("s3://bucket", "s3", "bucket", {}),
        ("S3://bucket/run/", "s3", "bucket/run", {}),
        ("s3://b/r?endpoint_url=http://h:1&region=x", "s3", "b/r", {"endpoint_url": "http://h:1", "region": "x"}),
        ("gcs://bucket/r", "gs", "bucket/r", {}),
        ("az://container/r", "az", "container/r", {}),
        ("abfss://c@acc.dfs.core.windows.net/r", "az", "c/r", {"account_name": "acc"}),
        ("hf://datasets/me/runs/one", "hf", "datasets/me/runs/one", {}),
    ],
)
def test_uris(uri: str, kind: str, root: str, options: dict[str, str]) -> None:
    where = parse_location(uri)
    assert (where.kind, where.root, where.options) == (kind, root, options)


@pytest.mark.parametrize(
    ("uri", "word"),
    [
        ("s3://key:verysecret@bucket/run", "credentials don't belong"),
        ("s3://bucket/run?secret=verysecret", "'secret' can't be set"),
        ("s3://bucket/run?endpoint_url=http://me:verysecret@host", "'endpoint_url' can't be set like this"),
        ("az://container/run?sv=1&sig=verysecret", "can't be set"),
        ("s3://", "name a bucket"),
        ("s3:///run", "name a bucket"),
        ("s3://bucket/../other", "not a key"),
    ],
)
def test_uris_that_are_refused(uri: str, word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        open_store(uri)
    assert "verysecret" not in str(caught.value)


def test_credentials_are_not_shown() -> None:
    store = RemoteStore("s3://bucket/run", options={"key": "AKIA", "secret": "verysecret"})
    assert "verysecret" not in f"{store!r} {store.uri}" and "AKIA" not in repr(store)
    assert pickle.loads(pickle.dumps(store)).uri == "s3://bucket/run"


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="retry_seconds.*-1"):
        RemoteStore("s3://bucket/run", retry_seconds=-1)
    with pytest.raises(ValueError, match="max_pause_seconds.*0"):
        Retry(max_pause_seconds=0)


@pytest.mark.parametrize(
    ("module", "uri", "extra"),
    [
        ("s3fs", "s3://b/r", "s3"),
        ("gcsfs", "gs://b/r", "gcs"),
        ("adlfs", "az://b/r", "azure"),
        ("huggingface_hub", "hf://a/b", "hf"),
    ],
)
def test_a_missing_client_names_the_extra(module: str, uri: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # import then fails
    with pytest.raises(StoreError, match=rf"needs {module}.*composer-replication\[{extra}\]"):
        open_store(uri)


@pytest.mark.processes
def test_no_client_is_imported_before_it_is_needed() -> None:
    script = (
        "import sys, composer_replication.store as s; s.open_store('memory://x')\n"
        "print(sorted({'fsspec', 's3fs', 'gcsfs', 'adlfs', 'huggingface_hub', 'torch'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


def test_a_bucket_of_hugging_face_refuses_to_create() -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(StoreRefused, match=r"buckets can't create .* S3 gateway .*repository"):
        open_store("hf://buckets/me/box/run").put_if_absent("a", b"")
    with pytest.raises(StoreError, match="owner and a repository"):
        open_store("hf://datasets/me").get("a")


def test_other_filesystems_at_ones_own_risk(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="own risk"):
        store = open_store(f"local://{tmp_path}/s")
    store.put_if_absent("a/b", b"one")
    with pytest.raises(ObjectExists):
        store.put_if_absent("a/b", b"two")
    assert store.get("a/b") == b"one" and store.list("a/") == ["a/b"] and store.list("none/") == []
    store.delete(["a/b", "a/c"])
    assert store.list("") == []


def test_pauses_have_jitter_and_end() -> None:
    now, pauses = [0.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds
        pauses.append(seconds)

    for jitter in (0.0, 1.0):
        pauses.clear()
        retry = Retry(seconds=10, first_pause_seconds=1, clock=lambda: now[0], sleep=sleep, jitter=lambda j=jitter: j)
        tries = sum(1 for _ in retry.pauses())
        assert tries == len(pauses) + 1 and sum(pauses) <= 10
        assert pauses[0] == (0.5 if jitter == 0 else 1.0)
    assert sum(1 for _ in Retry(seconds=0).pauses()) == 1
