"""The pointers as values: what a replica declares, what a round agreed, what a shard's mean is.

Invariant: `parse_x(dump_x(value)) == value`, and nothing that fails a check here reaches the protocol: each `parse_…`
raises ObjectCorrupt with the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from composer_replication.collective.base import Report
from composer_replication.collective.object_store.wire import (
    WIRE_VERSION,
    Fields,
    dump,
    load,
    number,
    report_from_json,
    report_to_json,
    text,
    whole,
)
from composer_replication.errors import ObjectCorrupt

__all__ = [
    "ChunkFact",
    "Ready",
    "Roster",
    "Verdict",
    "dump_ready",
    "dump_roster",
    "dump_verdict",
    "parse_ready",
    "parse_roster",
    "parse_verdict",
]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ChunkFact:
    """One encoded chunk: what its bytes must be, and of a mean the squared norm over parameters."""

    hash: str
    size: int
    square_norm: float = 0.0
    finite: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What one replica declares for one attempt at a round."""

    run: str
    round: int
    attempt: int
    replica: int
    incarnation: int
    # late: nothing to average, written after the roster: "I'm alive, expect me again"
    late: bool = False
    report: Report | None = None
    prev: str = ""
    blob_attempt: int = 0  # under which attempt and incarnation its blobs lie
    blob_incarnation: int = 0
    chunks: tuple[ChunkFact, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """What a round agreed on: the one commit."""

    run: str
    round: int
    attempt: int
    writer: tuple[int, int]  # replica, incarnation
    kind: str  # roster | abort | sealed
    reason: str = ""  # of an abort or a seal
    missing: tuple[int, ...] = ()  # of an abort
    differing: Mapping[int, str] = field(
        default_factory=dict[int, str]
    )  # of an abort: whose state isn't the fleet's, and how
    prev: str = ""
    base: str = ""
    layout: str = ""
    mode: str = "direct"  # direct | sharded
    shards: int = 0
    owners: tuple[int, ...] = ()  # first owner of each shard; the next in this order take over
    members: tuple[Report, ...] = ()
    hashes: tuple[str, ...] = ()  # of the members' readies
    others: tuple[Report, ...] = ()
    absent: Mapping[int, str] = field(default_factory=dict[int, str])
    misses: Mapping[int, int] = field(
        default_factory=dict[int, int]
    )  # rounds in a row that an expected replica has missed
    expected_next: tuple[int, ...] = ()

    @property
    def present(self) -> frozenset[int]:
        return frozenset(report.replica for report in (*self.members, *self.others))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A shard's mean, or that there can't be one."""

    run: str
    round: int
    attempt: int
    shard: int
    writer: tuple[int, int]
    roster: str
    chunks: tuple[ChunkFact, ...] = ()
    void: str = ""  # why there is no mean
    culprits: tuple[int, ...] = ()


def _facts_to_json(chunks: tuple[ChunkFact, ...]) -> list[Any]:
    return [[fact.hash, fact.size, float(fact.square_norm).hex(), fact.finite] for fact in chunks]


def dump_ready(ready: Ready) -> bytes:
    return dump(
        {
            "wire": WIRE_VERSION,
            "run": ready.run,
            "round": ready.round,
            "attempt": ready.attempt,
            "replica": ready.replica,
            "incarnation": ready.incarnation,
            "late": ready.late,
            "report": None if ready.report is None else report_to_json(ready.report),
            "prev": ready.prev,
            "blob_attempt": ready.blob_attempt,
            "blob_incarnation": ready.blob_incarnation,
            "chunks": _facts_to_json(ready.chunks),
        }
    )


def dump_roster(roster: Roster) -> bytes:
    return dump(
        {
            "wire": WIRE_VERSION,
            "run": roster.run,
            "round": roster.round,
            "attempt": roster.attempt,
            "writer": list(roster.writer),
            "kind": roster.kind,
            "reason": roster.reason,
            "missing": list(roster.missing),
            "differing": {str(replica): why for replica, why in roster.differing.items()},
            "prev": roster.prev,
            "base": roster.base,
            "layout": roster.layout,
            "mode": roster.mode,
            "shards": roster.shards,
            "owners": list(roster.owners),
            "members": [report_to_json(report) for report in roster.members],
            "hashes": list(roster.hashes),
            "others": [report_to_json(report) for report in roster.others],
            "absent": {str(replica): why for replica, why in roster.absent.items()},
            "misses": {str(replica): count for replica, count in roster.misses.items()},
            "expected_next": list(roster.expected_next),
        }
    )


def dump_verdict(verdict: Verdict) -> bytes:
    return dump(
        {
            "wire": WIRE_VERSION,
            "run": verdict.run,
            "round": verdict.round,
            "attempt": verdict.attempt,
            "shard": verdict.shard,
            "writer": list(verdict.writer),
            "roster": verdict.roster,
            "chunks": _facts_to_json(verdict.chunks),
            "void": verdict.void,
            "culprits": list(verdict.culprits),
        }
    )


def _hash(value: Any, name: str) -> str:
    found = text(value, name)
    if not 16 <= len(found) <= 64 or set(found) - set("0123456789abcdef"):
        raise ValueError(f"{name!r} holds something that is not a hash")
    return found


def _fact(value: Any, name: str) -> ChunkFact:
    if not isinstance(value, list) or len(cast(list[Any], value)) != 4:
        raise ValueError(f"{name!r} holds something that is not a chunk")
    content_hash, size, square_norm, finite = cast(list[Any], value)
    if not isinstance(finite, bool):
        raise ValueError(f"{name!r} holds something that is not a chunk")
    return ChunkFact(_hash(content_hash, name), whole(size, name), number(square_norm, name), finite)


def _writer(fields: Fields) -> tuple[int, int]:
    replica, incarnation = fields.several("writer", whole)
    return replica, incarnation


def _parse(data: bytes, key: str, build: Callable[[Fields], _T], expect: Mapping[str, Any]) -> _T:
    content = load(data, key)
    if content.get("wire") != WIRE_VERSION:
        raise ObjectCorrupt(f"{key} has wire version {str(content.get('wire'))[:20]}, this process {WIRE_VERSION}")
    try:
        value = build(Fields(content))
    except (ValueError, OverflowError) as error:
        raise ObjectCorrupt(f"{key} is damaged: {error}") from error
    for name, right in expect.items():
        if getattr(value, name) != right:
            raise ObjectCorrupt(f"{key} says {name} {str(getattr(value, name))[:40]!r}, expected {right!r}")
    return value


def parse_ready(data: bytes, key: str, *, run: str, round: int, attempt: int, replica: int) -> Ready:
    def build(fields: Fields) -> Ready:
        report = None if fields.raw("report") is None else report_from_json(fields.raw("report"))
        late = fields.flag("late")
        if late != (report is None) or (report is not None and report.replica != fields.whole("replica")):
            raise ValueError("the report is not of this replica")
        return Ready(
            run=fields.text("run"),
            round=fields.whole("round"),
            attempt=fields.whole("attempt"),
            replica=fields.whole("replica"),
            incarnation=fields.whole("incarnation"),
            late=late,
            report=report,
            prev=fields.text("prev"),
            blob_attempt=fields.whole("blob_attempt"),
            blob_incarnation=fields.whole("blob_incarnation"),
            chunks=fields.several("chunks", _fact),
        )

    return _parse(data, key, build, {"run": run, "round": round, "attempt": attempt, "replica": replica})


def parse_roster(data: bytes, key: str, *, run: str, round: int, attempt: int) -> Roster:
    def build(fields: Fields) -> Roster:
        kind, mode = fields.text("kind"), fields.text("mode")
        members = tuple(report_from_json(item) for item in fields.several("members", lambda item, _: item))
        others = tuple(report_from_json(item) for item in fields.several("others", lambda item, _: item))
        hashes = fields.several("hashes", _hash)
        ids = [report.replica for report in members]
        if kind not in ("roster", "abort", "sealed") or mode not in ("direct", "sharded"):
            raise ValueError(f"unknown kind {kind[:20]!r} or mode {mode[:20]!r}")
        if len(hashes) != len(members) or ids != sorted(set(ids)):
            raise ValueError("the members are not in order, or without their hashes")
        owners, shards = fields.several("owners", whole), fields.whole("shards")
        if members and (not 1 <= shards == len(owners) or not set(owners) <= set(ids)):
            raise ValueError("a shard has no owner among the members")
        return Roster(
            run=fields.text("run"),
            round=fields.whole("round"),
            attempt=fields.whole("attempt"),
            writer=_writer(fields),
            kind=kind,
            reason=fields.text("reason"),
            missing=fields.several("missing", whole),
            differing=fields.by_replica("differing", text),
            prev=fields.text("prev"),
            base=fields.text("base"),
            layout=fields.text("layout"),
            mode=mode,
            shards=shards,
            owners=owners,
            members=members,
            hashes=hashes,
            others=others,
            absent=fields.by_replica("absent", text),
            misses=fields.by_replica("misses", whole),
            expected_next=fields.several("expected_next", whole),
        )

    return _parse(data, key, build, {"run": run, "round": round, "attempt": attempt})


def parse_verdict(data: bytes, key: str, *, run: str, round: int, attempt: int, shard: int, roster: str) -> Verdict:
    def build(fields: Fields) -> Verdict:
        return Verdict(
            run=fields.text("run"),
            round=fields.whole("round"),
            attempt=fields.whole("attempt"),
            shard=fields.whole("shard"),
            writer=_writer(fields),
            roster=fields.text("roster"),
            chunks=fields.several("chunks", _fact),
            void=fields.text("void"),
            culprits=fields.several("culprits", whole),
        )

    expect = {"run": run, "round": round, "attempt": attempt, "shard": shard, "roster": roster}
    return _parse(data, key, build, expect)
