"""What a store really does: each promise that a round rests on is tried, and how fast it is.

Invariant: everything happens below one scratch prefix, and every object that was made is deleted, also after a failure.
Nothing is concluded from a store's name.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from composer_replication.errors import ObjectExists, ObjectMissing, StoreError, StoreRefused
from composer_replication.store import details
from composer_replication.store.base import Buffer, ObjectStore

__all__ = ["SIZES", "Effort", "Finding", "Probe", "Speed", "probe_store"]

SIZES = (64 * 1024, 1024 * 1024, 8 * 1024 * 1024, 32 * 1024 * 1024, 128 * 1024 * 1024)
PARALLEL = 4  # transfers at once, for the speed of several

Verdict = Literal["ok", "note", "fails"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One promise: whether it was kept, what was seen, and what that means for a run."""

    name: str
    verdict: Verdict
    seen: str
    means: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Transfers of `size_bytes`, `parallel` at once; bytes per second of all together."""

    size_bytes: int
    parallel: int
    up: float
    down: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is tried. Each write costs seconds in some stores."""

    writers: int = 8  # that create one key at once
    contests: int = 3  # such keys
    repeats: int = 10  # of small requests
    max_bytes: int = 32 * 1024 * 1024  # of the largest object
    seconds: float = 20.0  # sizes above the first that takes longer are left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    findings: tuple[Finding, ...]
    latency_seconds: dict[str, float]  # medians of small requests, by kind
    speeds: tuple[Speed, ...]
    clock_offset_seconds: float | None  # the store's clock minus this machine's; None: it doesn't tell

    @property
    def up(self) -> float:
        """Bytes per second of the largest transfer, or of several at once: what a round may reckon with."""
        return max(speed.up for speed in self.speeds[-2:])

    @property
    def down(self) -> float:
        return max(speed.down for speed in self.speeds[-2:])


def probe_store(
    open_again: Callable[[], ObjectStore],
    *,
    effort: Effort | None = None,
    blobs_only: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Probe:
    """Try the store that `open_again` opens: once to write with, once more to read with, as another process would.

    `blobs_only`: it shall hold a run's blobs and another store its pointers, so that creating only once isn't asked
    for. `say` is told what is being tried. Raises StoreError when the store can't be used at all.
    """
    effort = effort or Effort()
    scratch = f"doctor-{uuid.uuid4().hex[:12]}"
    writer, reader = _Scratch(open_again(), scratch), _Scratch(open_again(), scratch)
    with writer.cleaned():
        say("writing and reading")
        findings = [_read_after_write(writer, reader, effort)]
        say(f"{effort.writers} writers that create the same key")
        if not blobs_only:
            findings.insert(0, _create_if_absent(writer, reader, effort))
        say("listing and deleting")
        findings += [_list_after_write(writer, reader, effort)]
        say(f"looking at an object of {effort.max_bytes / 1e6:.0f} MB while it is written")
        findings += [_atomic(writer, reader, effort), _ranges(writer, reader)]
        offset, clock = _clock(writer)
        findings.append(clock)
        say("latency")
        creates = not blobs_only and findings[0].verdict == "ok"
        latency = _latency(writer, reader, effort, create=creates)
        speeds = tuple(_speeds(writer, reader, effort, say))
    return Probe(findings=tuple(findings), latency_seconds=latency, speeds=speeds, clock_offset_seconds=offset)


class _Scratch:
    """Keys below the scratch prefix of a store."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self.store = store
        self.prefix = prefix
        self._made: set[str] = set()

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def put(self, name: str, data: Buffer) -> None:
        self._made.add(self.key(name))
        self.store.put(self.key(name), data)

    def create(self, name: str, data: Buffer) -> None:
        self._made.add(self.key(name))
        self.store.put_if_absent(self.key(name), data)

    def get(self, name: str) -> bytes:
        return self.store.get(self.key(name))

    def get_in_the_end(self, name: str) -> bytes:
        """Also from a store that shows late what was written, which is another finding."""
        for _ in range(50):
            with suppress(ObjectMissing):
                return self.get(name)
            time.sleep(0.1)
        return self.get(name)

    def part(self, name: str, start: int, stop: int) -> bytes:
        return self.store.get_range(self.key(name), start, stop)

    def names(self) -> list[str]:
        return [key[len(self.prefix) + 1 :] for key in self.store.list(f"{self.prefix}/")]

    def delete(self, names: Sequence[str]) -> None:
        self.store.delete([self.key(name) for name in names])

    @contextmanager
    def cleaned(self) -> Generator[None, None, None]:
        try:
            yield
        except BaseException:
            with suppress(StoreError):  # what went wrong first is what counts
                self.store.delete(sorted(self._made))
            raise
        self.store.delete(sorted(self._made))


def _create_if_absent(writer: _Scratch, reader: _Scratch, effort: Effort) -> Finding:
    name = "create-if-absent"
    broken = "no round is safe here: use another store, or keep only the blobs here (control=..., docs/stores.md)"
    try:
        writer.create("once", b"first")
    except StoreRefused as error:
        return Finding(name=name, verdict="fails", seen=str(error), means=broken)
    try:
        writer.create("once", b"second")
        return Finding(
            name=name, verdict="fails", seen="the same key was created twice, one after another", means=broken
        )
    except ObjectExists:
        pass
    if reader.get_in_the_end("once") != b"first":
        return Finding(name=name, verdict="fails", seen="a refused write took effect all the same", means=broken)
    for contest in range(effort.contests):
        winners = _contest(writer, f"contest-{contest}", effort.writers)
        held = reader.get_in_the_end(f"contest-{contest}")
        if len(winners) != 1 or held != winners[0]:
            seen = f"of {effort.writers} writers at once {len(winners)} were told that they had created the key"
            return Finding(name=name, verdict="fails", seen=seen, means=broken)
    return Finding(
        name=name,
        verdict="ok",
        seen=f"one winner of {effort.writers} writers at once, {effort.contests} times; refused when it is there",
        means="replicas can agree on each round",
    )


def _contest(writer: _Scratch, name: str, writers: int) -> list[bytes]:
    start = threading.Barrier(writers)

    def one(index: int) -> bytes | None:
        content = f"writer {index}".encode()
        start.wait(timeout=60)
        try:
            writer.create(name, content)
        except ObjectExists:
            return None
        return content

    with ThreadPoolExecutor(writers) as pool:
        return [content for content in pool.map(one, range(writers)) if content is not None]


def _read_after_write(writer: _Scratch, reader: _Scratch, effort: Effort) -> Finding:
    misses = stale = 0
    for index in range(effort.repeats):
        writer.put(f"read-{index}", f"content {index}".encode())
        try:
            misses += reader.get(f"read-{index}") != f"content {index}".encode()
        except ObjectMissing:
            misses += 1
    writer.put("read-0", b"new content")
    with suppress(ObjectMissing):
        stale += reader.get("read-0") != b"new content"
    if misses:
        return Finding(
            name="read after write",
            verdict="fails",
            seen=f"{misses} of {effort.repeats} objects weren't there for another reader at once",
            means="a replica would take published objects for lost: use another store",
        )
    overwritten = "; overwritten content came late" if stale else ", also after overwriting"
    return Finding(
        name="read after write",
        verdict="note" if stale else "ok",
        seen=f"another reader found {effort.repeats} of {effort.repeats} at once{overwritten}",
        means="heartbeats may look old; rounds overwrite nothing" if stale else "what one publishes all others find",
    )


def _list_after_write(writer: _Scratch, reader: _Scratch, effort: Effort) -> Finding:
    names = [f"list-{index}" for index in range(max(2, effort.repeats // 2))]
    for name in names:
        writer.put(name, b"x")
    missing = set(names) - set(reader.names())
    writer.delete(names)
    left = set(names) & set(reader.names())
    gone = True
    with suppress(ObjectMissing):
        reader.get(names[0])
        gone = False
    if missing or left or not gone:
        seen = f"{len(missing)} of {len(names)} new keys not listed at once, {len(left)} listed after they were deleted"
        return Finding(
            name="list after write",
            verdict="note",
            seen=seen + ("" if gone else "; one can be read still"),
            means="rounds read keys by name; a listing that lags only delays starting and tidying up",
        )
    return Finding(
        name="list after write",
        verdict="ok",
        seen="listings show at once what was written and deleted",
        means="as needed",
    )


def _atomic(writer: _Scratch, reader: _Scratch, effort: Effort) -> Finding:
    content = _noise(effort.max_bytes)
    size, done = len(content), threading.Event()
    before = partial = 0
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(writer.put, "large", content)
        writing.add_done_callback(lambda _: done.set())
        while not done.is_set():
            try:
                # Its last byte first: an object that ends before that is one that is still being written.
                partial += reader.part("large", size - 1, size) != content[-1:]
            except ObjectMissing:
                before += 1
            done.wait(0.005)
        writing.result()
    whole = reader.get_in_the_end("large") == content
    if partial or not whole:
        seen = f"a reader saw the object unfinished {partial} times" if partial else "it doesn't read back as written"
        return Finding(
            name="atomic visibility",
            verdict="fails",
            seen=f"{seen} ({size / 1e6:.0f} MB)",
            means="objects must appear whole or not at all: use another store, or another kind of mount",
        )
    return Finding(
        name="atomic visibility",
        verdict="ok",
        seen=f"not there {before} time{'' if before == 1 else 's'} while {size / 1e6:.0f} MB were written, then whole",
        means="no replica reads half an object",
    )


def _ranges(writer: _Scratch, reader: _Scratch) -> Finding:
    content = _noise(256 * 1024)
    writer.put("ranges", content)
    size = len(content)
    reader.get_in_the_end("ranges")
    right = (
        reader.part("ranges", 1000, 70_000) == content[1000:70_000]
        and reader.part("ranges", size - 10, size + 10) == content[-10:]
        and reader.part("ranges", 5, 5) == b""
    )
    return Finding(
        name="ranged reads",
        verdict="ok" if right else "fails",
        seen="the bytes asked for, no more" if right else "other bytes than those asked for",
        means="large objects are read in parts, side by side"
        if right
        else "large objects can't be read: another store",
    )


def _clock(writer: _Scratch) -> tuple[float | None, Finding]:
    before = time.time()
    writer.put("clock", b"tick")
    after = time.time()
    try:
        written = details.modified_seconds(writer.store, writer.key("clock"))
    except StoreError:
        written = None
    if written is None:
        means = "nothing: no round goes by the time of day"
        return None, Finding(name="clock", verdict="ok", seen="the store doesn't tell the time", means=means)
    # Many stores tell whole seconds: within one of the write there is no telling.
    offset = 0.0 if before - 1.0 <= written <= after + 1.0 else written - (before + after) / 2
    far = abs(offset) > 60.0
    return offset, Finding(
        name="clock",
        verdict="note" if far else "ok",
        seen="the same as here, to a second" if offset == 0.0 else f"{offset:+.0f} s from this machine's",
        means="set this machine's clock: services refuse signatures that are 15 min off; rounds don't go by the time"
        if far
        else "as it should be; no round goes by the time of day",
    )


def _latency(writer: _Scratch, reader: _Scratch, effort: Effort, *, create: bool) -> dict[str, float]:
    content = b"x" * 1024
    timed: dict[str, list[float]] = {}

    def measure(kind: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        with suppress(ObjectMissing):
            call()
        timed.setdefault(kind, []).append(time.perf_counter() - began)

    for index in range(effort.repeats):
        measure("write", lambda: writer.put("small", content))
        measure("read", lambda: reader.get("small"))
        measure("look for a missing key", lambda: reader.get("missing"))
        if create:
            measure("create", lambda index=index: writer.create(f"small-{index}", content))
    return {kind: statistics.median(values) for kind, values in timed.items()}


def _speeds(writer: _Scratch, reader: _Scratch, effort: Effort, say: Callable[[str], None]) -> Iterator[Speed]:
    best = 0
    for size in [size for size in SIZES if size <= effort.max_bytes] or [effort.max_bytes]:
        say(f"transfers of {size / 1e6:.1f} MB")
        content = _noise(size)
        up = _timed(lambda content=content: writer.put("bulk", content))
        down = _timed(lambda: reader.get_in_the_end("bulk"))
        yield Speed(size_bytes=size, parallel=1, up=size / up, down=size / down)
        best = size
        if up + down > effort.seconds:
            return
    size = min(best, 8 * 1024 * 1024)
    say(f"{PARALLEL} transfers of {size / 1e6:.1f} MB at once")
    content = _noise(size)
    names = [f"bulk-{index}" for index in range(PARALLEL)]

    def write(name: str) -> None:
        writer.put(name, content)

    with ThreadPoolExecutor(PARALLEL) as pool:
        up = _timed(lambda: list(pool.map(write, names)))
        down = _timed(lambda: list(pool.map(reader.get_in_the_end, names)))
    total = size * PARALLEL
    yield Speed(size_bytes=size, parallel=PARALLEL, up=total / up, down=total / down)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return max(time.perf_counter() - began, 1e-9)


def _noise(size: int) -> bytes:
    """Bytes that no link compresses; always the same."""
    return random.Random(size).randbytes(size)
