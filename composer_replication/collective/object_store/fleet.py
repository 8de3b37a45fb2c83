"""Who may take part: claims on replica ids, and the facts that all replicas of a fleet must share.

Invariant: one live process holds a replica id (the highest claim rules), and a process whose facts differ from
fleet.json in anything that could change a bit is refused, with both values, before it trains.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from composer_replication.collective.codec import CODECS, content_hash, encode_chunk
from composer_replication.collective.layout import Layout
from composer_replication.collective.norms import square_norm
from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.epochs import read_fleet
from composer_replication.collective.object_store.requests import create, there
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES, WIRE_VERSION, dump, load
from composer_replication.collective.reduce import reduce_chunk
from composer_replication.errors import (
    FleetMismatch,
    ObjectCorrupt,
    ObjectExists,
    ObjectMissing,
    ReplicaTaken,
    StoreError,
)
from composer_replication.store.base import ObjectStore

__all__ = [
    "Process",
    "agree_on_fleet",
    "claim_replica",
    "few",
    "heartbeat",
    "live_replicas",
    "numerics_probe",
    "this_process",
]

_Json = dict[str, Any]


# -- claims


@dataclass(frozen=True, slots=True)
class Process:
    """What tells one process from all others; `pid` means something only where the first three are the same."""

    host: str
    boot: str
    namespace: str
    pid: int
    started: str

    def beside(self, other: Process) -> bool:
        """Can this process see whether the other one runs?"""
        here, there = (self.host, self.boot, self.namespace), (other.host, other.boot, other.namespace)
        return bool(self.boot) and here == there


def this_process() -> Process:
    boot = namespace = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return Process(socket.gethostname(), boot, namespace, os.getpid(), _started(os.getpid()) or "")


def _started(pid: int) -> str | None:
    """When a process started, in the kernel's own count; None if there is no such process, or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def claim_replica(
    store: ObjectStore,
    replica: int,
    *,
    heartbeat_seconds: float,
    clock: Callable[[], float],
    pause: Callable[[float], None],
    trace: Callable[[str], None],
) -> int:
    """Take a replica id; gives the incarnation. Raises ReplicaTaken while a live process holds it.

    Also finds out whether the store's create-if-absent holds what it promises (StoreError if it doesn't).
    """
    me = this_process()
    met = 0
    while True:
        found = [n for n in (keys.incarnation_of(key) for key in store.list(keys.claims(replica))) if n is not None]
        last = max([*found, met])
        if last and not there(store, keys.closed(replica, last)):
            _refuse_if_alive(store, replica, last, me, heartbeat_seconds, clock, pause)
        key, mark = keys.claim(replica, last + 1), os.urandom(8).hex()  # of this very call
        claim = dump({"wire": WIRE_VERSION, "replica": replica, "mark": mark, **asdict(me)})
        trace("before:claim")
        try:
            store.put_if_absent(key, claim)
        except ObjectExists:
            if not _holds(store, key, claim):  # else it was a try of ours that seemed to fail
                met = last + 1  # someone else has started under this id: a listing may not show that one yet
                continue
        trace("after:claim")
        try:
            store.put_if_absent(key, claim)
        except ObjectExists:
            return last + 1
        raise StoreError(
            f"{store.uri} lets two writers create the same object ({key}), so no round would be safe there: "
            "use a store, or a mount, whose create-if-absent is honest, or keep only the blobs there and the pointers "
            "in such a store (control=...; docs/stores.md)"
        )


def _holds(store: ObjectStore, key: str, data: bytes) -> bool:
    try:
        return store.get(key, max_bytes=MAX_POINTER_BYTES) == data
    except (ObjectMissing, ObjectCorrupt):
        return False


def _refuse_if_alive(
    store: ObjectStore,
    replica: int,
    incarnation: int,
    me: Process,
    heartbeat_seconds: float,
    clock: Callable[[], float],
    pause: Callable[[float], None],
) -> None:
    key = keys.claim(replica, incarnation)
    holder, pid, started = _holder(store, replica, incarnation)
    if me.beside(holder) and isinstance(pid, int):
        alive = _started(pid) == started
    else:
        alive = _beats(store, replica, incarnation, heartbeat_seconds, clock, pause)
    if alive:
        who = f"process {pid} on {holder.host}" if holder.host else f"a live process whose claim {key} is damaged"
        raise ReplicaTaken(
            f"replica {replica} is held by {who} (claim {incarnation} in {store.uri}): "
            "choose another id, or stop that process first"
        )


def live_replicas(
    store: ObjectStore, replicas: Sequence[int], *, clock: Callable[[], float], pause: Callable[[float], None]
) -> list[str]:
    """Which of these ids a process holds that lives, in words. Those elsewhere are watched together, for two heartbeats
    of the slowest."""
    me, alive, watched = this_process(), list[str](), dict[int, _Json]()
    for replica in replicas:
        beat = heartbeat(store, replica)
        incarnation = beat.get("incarnation")
        if not beat or beat.get("state") in ("closed", "fenced") or not isinstance(incarnation, int):
            continue
        holder, pid, started = _holder(store, replica, incarnation)
        if me.beside(holder) and isinstance(pid, int):
            if _started(pid) == started:
                alive.append(f"replica {replica} by process {pid} on {holder.host}")
        else:
            watched[replica] = beat
    until = clock() + 2.0 * max((_interval(beat) for beat in watched.values()), default=0.0)
    while watched and clock() < until:
        pause(min(0.5, max(until - clock(), 0.0)))
        for replica in [r for r, beat in watched.items() if _moved(beat, heartbeat(store, r))]:
            alive.append(f"replica {replica} on {watched.pop(replica).get('host')}")
    return alive


def _interval(beat: _Json) -> float:
    seconds = beat.get("heartbeat_seconds")
    return float(seconds) if isinstance(seconds, int | float) else 0.0


def _holder(store: ObjectStore, replica: int, incarnation: int) -> tuple[Process, Any, str]:
    """(where a claim's process runs, its id there, when it was started); empty if the claim can't be read."""
    key = keys.claim(replica, incarnation)
    try:
        content = load(store.get(key, max_bytes=MAX_POINTER_BYTES), key)
    except (ObjectCorrupt, ObjectMissing):
        content = {}  # held by nobody knows whom: its heartbeat tells, as for a process elsewhere
    holder = Process(*(str(content.get(name, "")) for name in ("host", "boot", "namespace")), 0, "")  # type: ignore[arg-type]
    return holder, content.get("pid"), str(content.get("started", ""))


def _beats(
    store: ObjectStore,
    replica: int,
    incarnation: int,
    heartbeat_seconds: float,
    clock: Callable[[], float],
    pause: Callable[[float], None],
) -> bool:
    """Does that incarnation's heartbeat counter move? Watched for two of its intervals, on the local clock."""
    first = heartbeat(store, replica)
    if first.get("incarnation") != incarnation:
        return False  # it has never shown itself: it died while it was starting, or is about to find itself outclaimed
    interval = max(heartbeat_seconds, _interval(first))
    until = clock() + 2.0 * interval
    while clock() < until:
        pause(min(interval / 4, max(until - clock(), 0.0)))
        if _moved(first, heartbeat(store, replica)):
            return True
    return False


def _moved(before: _Json, now: _Json) -> bool:
    return bool(now) and now.get("counter") != before.get("counter")  # empty: it couldn't be read


def heartbeat(store: ObjectStore, replica: int) -> _Json:
    """What a replica last showed of itself; empty if nothing readable is there."""
    try:
        return load(store.get(keys.member(replica), max_bytes=MAX_POINTER_BYTES), keys.member(replica))
    except StoreError:
        return {}


# -- fleet.json


def numerics_probe() -> dict[str, str]:
    """Digests of the arithmetic that decides bits, computed here: compared over the fleet before any training."""
    count = 3 * 4096 + 17
    # Whole numbers, so that making the input involves no rounding; scaled by a power of two, which is exact.
    pattern = torch.arange(count, dtype=torch.int64).mul_(2654435761).remainder_(1_000_003)
    values = (pattern - 500_001).to(torch.float32).mul_(2.0**-19)
    sizes = (2 * 4096, count - 2 * 4096)
    probe: dict[str, str] = {}
    for codec in CODECS:
        payload = encode_chunk(codec, sizes, values)
        probe[f"encode {codec}"] = content_hash(payload)
        reduced = reduce_chunk(codec, sizes, [payload, payload, payload], [1.0, 2.0, 4.0])
        probe[f"average {codec}"] = content_hash(reduced.payload)
    probe["norm"] = square_norm(values).hex()
    momentum = values.mul(0.7).add(values)
    probe["outer step"] = content_hash(encode_chunk("float32", sizes, values.sub(momentum.mul(0.49))))
    probe["exp"] = math.exp(-0.1234567).hex()
    probe["log"] = math.log(1.2345678).hex()
    probe["pow"] = math.pow(0.7, 1.2345678).hex()
    return probe


def agree_on_fleet(
    store: ObjectStore,
    own: Mapping[str, Any],
    layout: Layout,
    *,
    nonce: str,
    resumed: bool,
    before: ObjectStore | None,
    first: bool,
    wait: Callable[[], None],
    trace: Callable[[str], None],
) -> str:
    """Write fleet.json (only the `first` id does), or find that it says the same. Gives the run's nonce.

    One writer, so that a replica with a wrong setting is refused itself, and never the rest of the fleet. `before` is
    the view of the epoch before this one, if there is one: its training settings stay those of the run. Raises
    FleetMismatch; `wait` pauses, and raises when it has been too long.
    """
    if before is not None:
        _check_settings_stay(before, own)
    elif resumed and not there(store, keys.FLEET):
        raise FleetMismatch(
            f"{store.uri} holds no run that could be resumed (no {keys.FLEET}): give the prefix that the checkpoint's "
            "run used, or start afresh without the checkpoint"
        )
    facts = {**own, "wire": WIRE_VERSION, "numerics": numerics_probe(), "layout": layout.to_json()}
    if first:
        trace("before:fleet")
        create(store, keys.FLEET, dump({**facts, "nonce": nonce or os.urandom(8).hex()}))
        trace("after:fleet")
    while not there(store, keys.FLEET):
        wait()
    found = load(store.get(keys.FLEET, max_bytes=MAX_POINTER_BYTES), keys.FLEET)
    theirs = str(found.get("nonce", ""))
    if nonce and theirs != nonce:
        raise FleetMismatch(
            f"{store.uri} holds another run ({theirs}; this one is {nonce}): choose another prefix, "
            "or resume that run under its own name"
        )
    # Tensors may have been unfrozen since the run began.
    known_only = resumed or before is not None
    tensors, settings = _layout_differences(layout, found, known_only), _differences(_flat(facts), _flat(found))
    if tensors or settings:
        frozen = [line for line in settings if line.startswith("settings.frozen.")]  # a line for each tensor, too
        parts = [few([*tensors, *frozen], 3), few([line for line in settings if line not in frozen], 20)]
        raise FleetMismatch(
            f"this process differs from its fleet (fleet.json in {store.uri}): {'; '.join(filter(None, parts))}. "
            "Start all replicas with the same settings, or use another prefix if the first start was wrong"
        )
    return theirs


def _check_settings_stay(before: ObjectStore, own: Mapping[str, Any]) -> None:
    """A run that goes on in a new epoch is still trained as it was: its controller's state wouldn't fit otherwise."""
    theirs, _ = read_fleet(before)  # nobody may have started in the epoch before
    pairs = ({"settings": own.get("settings")}, {"settings": (theirs or {}).get("settings")})
    lines = [line for line in _differences(*(_flat(one) for one in pairs)) if not line.startswith("settings.frozen")]
    if lines:
        raise FleetMismatch(
            f"this process differs from the run that it resumes ({before.uri}): {few(lines, 20)}. Resume with the "
            "settings that the run began with, or begin another run in another place"
        )


def few(lines: Sequence[str], most: int) -> str:
    """The first `most` of them in one line, and how many more there are."""
    return "; ".join(lines[:most]) + (f"; and {len(lines) - most} more" if len(lines) > most else "")


def _layout_differences(layout: Layout, found: _Json, known_only: bool) -> list[str]:
    try:
        theirs = Layout.from_json(found["layout"])
    except (KeyError, TypeError, ValueError):
        return [f"layout: {keys.FLEET} has none that this version can read"]
    if known_only:  # those that both know must still agree
        known = {slot.name for slot in layout.slots} & {slot.name for slot in theirs.slots}
        layout, theirs = (
            Layout(
                tuple(sorted((s for s in which.slots if s.name in known), key=lambda s: s.name)), which.chunk_elements
            )
            for which in (layout, theirs)
        )
    return layout.differences(theirs)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        content = cast(_Json, value)
        return {
            key: item for part in content for key, item in _flat(content[part], f"{name}.{part}".strip(".")).items()
        }
    return {name: value}


def _differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    names = [name for name in sorted({*mine, *theirs}) if name != "nonce" and not name.startswith("layout.")]
    absent = "nothing"
    return [
        f"{name}: {mine.get(name, absent)!r} here, {theirs.get(name, absent)!r} in the fleet"
        for name in names
        if mine.get(name, absent) != theirs.get(name, absent)
    ]
