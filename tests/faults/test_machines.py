"""What goes wrong around a replica: its disk is full, another run has its prefix, its machine computes otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from composer_replication.collective.object_store import shards
from composer_replication.errors import FleetMismatch, ReplicaTaken
from composer_replication.store import LocalStore, MemoryStore
from tests.collective.object_store import lives
from tests.collective.object_store.toy import Toy
from tests.faults.fleet import Fleet, agree, nothing_lost
from tests.faults.registry import Case, covers
from tests.support.threads import run_threads

ROOT = Path(__file__).parents[2]


# -- no room


@pytest.mark.processes
@covers("file size limit")
def test_a_replica_that_may_write_no_large_file(case: Case, tmp_path: Path) -> None:
    """As with a quota: small objects can be written, chunks can't."""
    skip = case.policy == "skip"
    waits = {"failure_policy": "skip", "timeout_seconds": 3.0, "start_timeout_seconds": 40.0, "tolerated_misses": 0}
    fleet = lives.Fleet(tmp_path, settings={"mode": case.point, "checkpoint_every": 100, **(waits if skip else {})})
    processes = [fleet.start(i, lives.Kill("before:upload", 1) if i == 1 else None) for i in range(3)]
    assert lives.join(processes[1]) == -9
    limited = fleet.start(1, file_bytes=3000)
    assert lives.join(limited) == 1
    text = fleet.ended(1)["text"]
    assert "File too large" in text and str(tmp_path / "store") in text, text
    if not skip:
        assert lives.join(fleet.start(1)) == 0, fleet.ended(1)
    rest = [i for i in range(3) if i != 1 or not skip]
    for replica in rest:
        if replica != 1:
            assert lives.join(processes[replica]) == 0, fleet.ended(replica)
    assert len({fleet.ended(replica)["digest"] for replica in rest}) == 1


_ON_A_SMALL_DISK = """\
import subprocess, sys
from pathlib import Path
from tests.collective.object_store.toy import Toy
from tests.faults.fleet import Fleet, nothing_lost
from composer_replication.store import LocalStore

folder, policy, step = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
disk = folder / "disk"
disk.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)], check=True)
store = LocalStore(disk / "store")
fleet = Fleet(folder, store, policy=policy, timeout_seconds=3.0, start_timeout_seconds=30.0)

def fill(at, toy):
    if at == step and toy.round == 1 and not (disk / "fill").exists():
        with open(disk / "fill", "wb", buffering=0) as file:
            try:
                while file.write(b"x" * 4096):
                    pass
            except OSError:
                pass

first = fleet.run({0: fill})
for life in first:
    assert life.error is not None, "it went on on a full disk"
full = [life.text for life in first if "is full" in life.text and "free some space" in life.text]
assert full and all("is full" in life.text or "RoundAborted" in life.text for life in first), [l.text for l in first]
(disk / "fill").unlink()
again = fleet.run(salt=1)
assert [life.text for life in again] == ["", "", ""], [life.text for life in again]
assert len(nothing_lost(store, [*first, *again])) == 4
print("as it should be")
"""


@pytest.mark.processes
@covers("disk full")
def test_the_disk_is_full(case: Case, tmp_path: Path) -> None:
    """All stop and say so; when there is room again, the restarted fleet ends with the right bits."""
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        subprocess.run([*inside, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system lets no user mount a memory disk of its own")
    ran = subprocess.run(
        [*inside, sys.executable, "-c", _ON_A_SMALL_DISK, str(tmp_path), case.policy, case.point],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.stdout == "as it should be\n", ran.stdout + ran.stderr


# -- two runs


@covers("two runs, one prefix")
def test_two_runs_under_one_prefix(case: Case, tmp_path: Path) -> None:
    """The second one is refused, whichever way it is found out, and the first ends as if it had been alone."""
    store = MemoryStore()
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    named = case.point == "named"
    first = Fleet(tmp_path / "a", store, policy=case.policy, **({"nonce": "one"} if named else {}))
    second = Fleet(tmp_path / "b", store, policy=case.policy, **({"nonce": "two"} if named else {}))
    refused = []

    def intrude(step: str, toy: Toy) -> None:
        if step == "after:ready" and toy.round == 1 and not refused:
            before = set(store.list(""))
            refused.extend(second.live(i, salt=5) for i in range(3))
            assert set(store.list("")) >= before

    mine = first.run({0: intrude})
    assert [life.text for life in mine] == ["", "", ""]
    assert len(nothing_lost(store, mine)) == 4
    late = [second.live(i, salt=5) for i in range(3)]
    for life in refused:
        assert isinstance(life.error, ReplicaTaken) and "choose another id" in life.text, life.text
    for life in late:
        assert life.applied == []
        if named:
            assert isinstance(life.error, FleetMismatch) and "choose another prefix" in life.text, life.text
        else:  # it can't be told from a replica of the first one that comes back, and is given that one's end
            assert life.digest == mine[0].digest


# -- other arithmetic


@covers("encoder off by one")
def test_an_encoder_that_is_off_by_one_unit_and_is_taken_over(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everyone's mean comes out otherwise by a unit; owners hang before they publish theirs, and others take over. What
    counts is the one that was published, also for its owner."""
    store, honest, count = MemoryStore(), shards.reduce_chunk, iter(range(10**6))
    lock = threading.Lock()

    def off_by_one(*args: object, **options: object) -> object:
        reduced = honest(*args, **options)  # type: ignore[arg-type]
        with lock:
            number = next(count)
        if reduced.finite:
            reduced.payload[-1] ^= number % 2  # of the last value's lowest bit: a unit
        return reduced

    monkeypatch.setattr(shards, "reduce_chunk", off_by_one)
    fleet = Fleet(tmp_path, store, policy=case.policy, takeover_seconds=0.05)
    taken = threading.Event()

    def hang(step: str, toy: Toy) -> None:
        if step == "before:mean" and toy.round == 1 and not taken.is_set():
            taken.wait(timeout=1.0)  # past the others' turns

    lives_ = fleet.run({case.point: hang})
    assert [life.text for life in lives_] == ["", "", ""]
    assert len(agree(lives_)) == 4


_ONE_OF_A_MIXED_FLEET = """\
import json, sys
from pathlib import Path
import torch
from tests.faults.fleet import Fleet
from composer_replication.store import LocalStore
folder, replica, threads, codec, mode = Path(sys.argv[1]), *map(int, sys.argv[2:4]), *sys.argv[4:6]
torch.set_num_threads(threads)
out = folder / f"own-{replica}"
out.mkdir()
settings = {"codec": codec, "mode": mode, "start_timeout_seconds": 60.0}
life = Fleet(out, LocalStore(folder / "store"), rounds=3, **settings).live(replica)
print(json.dumps([torch.__version__, torch.backends.cpu.get_cpu_capability(), life.digest, life.text]))
"""
MACHINES = (("default", 1), ("avx2", 3), ("", 4))  # instruction set ("": the machine's own), threads


def mixed(folder: Path, pythons: list[str], codec: str, mode: str) -> list[list[str]]:
    LocalStore(folder / "store")

    def one(replica: int) -> list[str]:
        capability, threads = MACHINES[replica]
        ran = subprocess.run(
            [pythons[replica], "-c", _ONE_OF_A_MIXED_FLEET, str(folder), str(replica), str(threads), codec, mode],
            capture_output=True,
            text=True,
            timeout=200,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_WAIT_POLICY": "passive",  # several threads on a busy machine would spin for each other
                **({"ATEN_CPU_CAPABILITY": capability} if capability else {}),
            },
        )
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    return run_threads([lambda r=r: one(r) for r in range(3)], timeout_seconds=200)


@pytest.mark.processes
@covers("mixed fleet")
def test_machines_of_several_kinds_get_the_same_bits(case: Case, tmp_path: Path) -> None:
    ends = mixed(tmp_path, [sys.executable] * 3, *case.point)
    assert [text for *_, text in ends] == ["", "", ""]
    assert len({digest for _, _, digest, _ in ends}) == 1
    native = ends[2][1]
    assert native == "DEFAULT" or len({capability for _, capability, *_ in ends}) > 1, "the variable was not heeded"


@pytest.mark.processes
@covers("two versions of PyTorch")
def test_two_versions_of_pytorch(case: Case, tmp_path: Path) -> None:
    """The same bits; or the probe has found out that they would differ, and says what does."""
    other = os.environ.get("OTHER_PYTHON")
    if not other:
        pytest.skip("OTHER_PYTHON names no interpreter with another PyTorch")
    ends = mixed(tmp_path, [sys.executable, other, sys.executable], "int8", "sharded")
    assert ends[0][0] != ends[1][0], "OTHER_PYTHON has the same PyTorch"
    told = [text for *_, text in ends]
    if told == ["", "", ""]:
        assert len({digest for _, _, digest, _ in ends}) == 1
    else:
        assert "FleetMismatch" in told[1] and "numerics." in told[1], told
