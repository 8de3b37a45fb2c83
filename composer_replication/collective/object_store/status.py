"""What a run's store tells people: who is there, how far the fleet is, and what each round was.

Invariant: read-only, and nothing here takes part in any decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.fleet import heartbeat
from composer_replication.collective.object_store.history import decided
from composer_replication.collective.object_store.pointers import Roster
from composer_replication.collective.object_store.requests import there
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES, load
from composer_replication.errors import ObjectMissing
from composer_replication.store.base import ObjectStore

__all__ = ["ReplicaStatus", "RunStatus", "read_status", "rounds_log"]

_Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    replica: int
    state: str  # "not seen", "running", "closed", "fenced"
    host: str = ""
    incarnation: int = 0
    last_round: int | None = None  # the last one that it took part in
    status: Mapping[str, Any] = field(default_factory=dict[str, Any])  # what it last published
    last_error: str = ""
    result: Mapping[str, Any] | None = None  # how it ended


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    run: str
    policy: str
    rounds: int  # closed
    finished: bool
    replicas: tuple[ReplicaStatus, ...]
    trouble: str = ""  # why the open round's last attempt was given up


def _read(store: ObjectStore, key: str) -> _Json:
    try:
        return load(store.get(key, max_bytes=MAX_POINTER_BYTES), key)
    except ObjectMissing:
        return {}


def _rosters(store: ObjectStore, run: str) -> tuple[list[Roster], str]:
    """The roster that holds for each closed round, and why the open one's last attempt was given up."""
    rosters: list[Roster] = []
    while True:
        attempt, holds, trouble = 0, None, ""
        while (found := decided(store, run, len(rosters), attempt)) is not None:
            if found.roster.kind == "roster":  # a void attempt is followed by another one
                holds = found.roster
            else:
                trouble = found.roster.reason or found.roster.kind
            attempt += 1
        if holds is None:
            return rosters, trouble
        rosters.append(holds)


def read_status(store: ObjectStore) -> RunStatus:
    """How a run stands. A store without a run gives one with no replicas."""
    fleet = _read(store, keys.FLEET)
    run = str(fleet.get("nonce", ""))
    rosters, trouble = _rosters(store, run) if fleet else ([], "")
    last = {replica: roster.round for roster in rosters for replica in roster.present}
    replicas: list[ReplicaStatus] = []
    for replica in range(int(fleet.get("replicas", 0))):
        beat = heartbeat(store, replica)
        result = _read(store, keys.result(replica)).get("result")
        replicas.append(
            ReplicaStatus(
                replica=replica,
                state=str(beat.get("state", "not seen")),
                host=str(beat.get("host", "")),
                incarnation=int(beat.get("incarnation", 0)),
                last_round=last.get(replica),
                status=cast(_Json, beat.get("status") or {}),
                last_error=str(beat.get("last_error", "")),
                result=cast("_Json | None", result),
            )
        )
    return RunStatus(
        run=run,
        policy=str(fleet.get("failure_policy", "")),
        rounds=len(rosters),
        finished=there(store, keys.FINAL),
        replicas=tuple(replicas),
        trouble=trouble,
    )


def rounds_log(store: ObjectStore) -> list[_Json]:
    """The facts of every closed round, for reports: plain values, in order."""
    run = str(_read(store, keys.FLEET).get("nonce", ""))
    rosters, _ = _rosters(store, run) if run else ([], "")
    log: list[_Json] = []
    for roster in rosters:
        members = roster.members
        log.append(
            {
                "round": roster.round,
                "attempt": roster.attempt,
                "members": [report.replica for report in members],
                "others": [report.replica for report in roster.others],
                "absent": {str(replica): why for replica, why in roster.absent.items()},
                "leaving": [r.replica for r in (*members, *roster.others) if r.leaving],
                "steps": max((report.steps for report in members), default=0),
                "tokens": sum(r.tokens or 0 for r in members) if all(r.tokens is not None for r in members) else None,
                "mass": sum(report.mass for report in members) / len(members) if members else None,
                "drift": sum(report.square_norm for report in members) / len(members) if members else None,
                "mean_square_norm": _mean_square_norm(store, roster),
                "mode": roster.mode,
                "metrics": {str(report.replica): dict(report.metrics) for report in members},
            }
        )
    return log


def _mean_square_norm(store: ObjectStore, roster: Roster) -> float | None:
    total = 0.0
    for shard in range(roster.shards):
        verdict = _read(store, keys.mean(roster.round, roster.attempt, shard))
        if not verdict or verdict.get("void"):
            return None
        for _, _, square_norm, _ in verdict["chunks"]:
            total += float.fromhex(square_norm)
    return total if roster.members else None
