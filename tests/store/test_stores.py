"""The stores against their conformance suite, and what each refuses."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from composer_replication.errors import ObjectMissing, StoreError
from composer_replication.store import LocalStore, MemoryStore, ObjectStore, PrefixedStore, open_store, register_scheme
from tests.store import conformance


@pytest.fixture(params=["memory", "local", "prefixed"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "prefixed":
        whole = MemoryStore("t")
        whole.put("runs/another/a/b/one", b"not in this part")
        return PrefixedStore(whole, "runs/one")
    return MemoryStore("t") if request.param == "memory" else LocalStore(tmp_path / "store")


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
def test_conformance(store: ObjectStore, check) -> None:
    check(store)


@pytest.mark.processes
@pytest.mark.parametrize("check", [conformance.check_race_of_processes, conformance.check_seen_by_other_processes])
def test_conformance_across_processes(tmp_path: Path, check) -> None:
    check(partial(LocalStore, tmp_path / "store"))


@pytest.mark.processes
def test_a_killed_writer_leaves_no_torn_object(tmp_path: Path) -> None:
    root = tmp_path / "store"

    def beginnings() -> int:
        return sum(path.stat().st_size for path in root.glob(".tmp-*"))

    conformance.check_killed_writer(partial(LocalStore, root), beginnings)


def test_names_of_the_same_folder(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/a%20run")
    store.put("k", b"v")
    assert store.uri == f"file://{tmp_path}/a%20run"
    assert open_store(str(tmp_path / "a run")).get("k") == b"v"
    assert open_store(store.uri).get("k") == b"v"


def test_only_the_last_folder_is_made(tmp_path: Path) -> None:
    open_store(f"file://{tmp_path}/one")
    assert (tmp_path / "one").is_dir()
    with pytest.raises(StoreError, match=r"mkdir -p .*/no"):
        open_store(f"file://{tmp_path}/no/such")
    with pytest.raises(StoreError, match="isn't there"):
        open_store(str(tmp_path / "two"), create=False)
    assert not (tmp_path / "two").exists()


def test_a_file_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="is a file"):
        open_store(str(tmp_path / "file"))


def test_an_object_can_not_be_a_folder_too(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"")
    with pytest.raises(StoreError, match="can't be a folder too"):
        store.put_if_absent("a/b", b"")
    with pytest.raises(ObjectMissing):
        store.get("a/b")


@pytest.mark.processes
@pytest.mark.skipif(os.geteuid() != 0 and not hasattr(os, "setuid"), reason="needs a user without rights")
def test_a_store_without_rights_says_what_to_do(tmp_path: Path) -> None:
    # Root may write anywhere, so the refusal is looked at as another user, in a process of its own.
    tmp_path.chmod(0o755)
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut").chmod(stat.S_IRUSR | stat.S_IXUSR | stat.S_IROTH | stat.S_IXOTH)
    script = (
        "import os, sys\n"
        "from composer_replication.store import LocalStore\n"
        "from composer_replication.errors import StoreError\n"
        "os.umask(0)\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "def attempt(call):\n"
        "    try: call()\n"
        "    except StoreError as error: print(error)\n"
        f"attempt(lambda: LocalStore('{tmp_path}/shut').put_if_absent('k', b''))\n"
        f"attempt(lambda: LocalStore('{tmp_path}/shut/new'))\n"
    )
    for folder in tmp_path.parents:  # pytest's own folders are private
        if folder.owner() == tmp_path.owner() and "pytest" in folder.name:
            folder.chmod(0o755)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 2 and all("rights" in line for line in lines), run.stdout


def test_a_store_that_vanishes_is_not_made_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "s")
    (tmp_path / "s").rmdir()
    for call in (lambda: store.put("a/b", b""), lambda: store.get("a/b"), lambda: store.list("")):
        with pytest.raises(StoreError, match="is gone"):  # not "no such object": that would mean something
            call()
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("uri", "word"),
    [
        ("nowhere://bucket/run", "nowhere"),
        ("", "empty"),
        ("file://shared/run", "file:///shared/run"),
        ("file://", "absolute"),
    ],
)
def test_uris_that_are_refused(uri: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        open_store(uri)


def test_memory_is_shared_by_name_and_schemes_can_be_added() -> None:
    open_store("memory://shared-by-name").put("k", b"v")
    assert open_store("memory://shared-by-name").get("k") == b"v"
    assert open_store("memory://another").list("") == []
    register_scheme("mine", lambda uri, create: MemoryStore(uri))
    assert open_store("mine://x").uri.endswith("mine://x")


def test_all_new_folders_of_an_object_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, synced = LocalStore(tmp_path / "store"), list[Path]()
    monkeypatch.setattr(LocalStore, "_sync_folder", staticmethod(synced.append))
    store.put("a/b/c", b"1")
    assert synced == [store.root, store.root / "a", store.root / "a" / "b"], "each new name, and the object's"
    synced.clear()
    store.put("a/b/d", b"2")
    assert synced == [store.root / "a" / "b"]
