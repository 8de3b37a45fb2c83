"""A run in a store as records: its rosters hold every report, and its policy decides the same again.

Invariant: reads only; what the records say of decisions is the policy's own answer to what the rounds observed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from composer_replication.autoloco.config import AutoLoCoConfig, OuterConfig
from composer_replication.autoloco.policies import POLICIES, make_policy
from composer_replication.autoloco.values import Policy
from composer_replication.cli.view import RunReader
from composer_replication.collective.guards import Guards
from composer_replication.collective.membership import treat
from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.pointers import Roster
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES, load
from composer_replication.diloco.observed import drift_of, observe, steps_of, successor, tokens_of
from composer_replication.diloco.round_record import RECORD_VERSION, Observed, replay, told_before
from composer_replication.diloco.told import of_interval
from composer_replication.errors import ObjectCorrupt, ObjectMissing

__all__ = ["record_from_store", "policy_from_settings"]


def record_from_store(reader: RunReader, *, name: str, source: str) -> dict[str, Any]:
    """The run as the report reads it, and `simulate -o` writes it. Raises StoreError if the store fails."""
    fleet = reader.fleet or {}
    settings = fleet.get("settings") or {}
    chosen = settings.get("policy") or {}
    policy, problem = policy_from_settings(chosen)
    seen = _observed(reader, policy)
    notices = [problem] if problem and seen else []
    if reader.trouble:
        notices.append(f"round {len(reader.rounds)} was given up: {reader.trouble}")
    records: list[dict[str, Any]] = []
    if policy is not None:
        outer = OuterConfig(**_known(OuterConfig, settings.get("outer") or {}))
        records = [record.to_json() for record in replay(policy, outer, seen)]
    else:
        records = [_without_policy(one) for one in seen]
    return {
        "version": RECORD_VERSION,
        "kind": "run",
        "name": name,
        "source": source,
        "replicas": reader.replicas,
        "seed": None,
        "steps": _budget(reader.rosters, reader),
        "codec": fleet.get("codec"),
        "elements": _elements(reader),
        "policy": {"name": chosen.get("policy"), "settings": {k: v for k, v in chosen.items() if k != "policy"}},
        "outer": settings.get("outer") or {},
        "fleet": {name: fleet[name] for name in ("failure_policy", "min_replicas", "guards") if name in fleet},
        "versions": {},
        "ended": reader.ended,
        "notices": notices,
        "rounds": records,
        "result": None,
    }


def policy_from_settings(settings: Mapping[str, Any]) -> tuple[Policy | None, str]:
    """(the policy that a fleet agreed on, ""), or (None, why it can't be asked)."""
    name = settings.get("policy")
    if name is None:  # a store that was used for plain averaging
        return None, ""
    if name not in POLICIES:
        return None, f"its policy {name!r} isn't one of this package: what it decided isn't shown"
    values = dict(_known(AutoLoCoConfig, settings))
    values.setdefault("base_horizon", settings.get("horizon") or settings.get("increment") or 1)
    options = {key: settings[key] for key in ("alpha", "increment") if key in settings}
    try:
        return make_policy(str(name), AutoLoCoConfig(**values), **options), ""
    except (TypeError, ValueError) as error:
        return None, f"its policy can't be asked again ({error}): what it decided isn't shown"


def _known(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


# -- what the rounds observed ----------------------------------------------------------------------------------------


def _observed(reader: RunReader, policy: Policy | None) -> list[Observed]:
    guards = Guards(**_known(Guards, (reader.fleet or {}).get("guards") or {}))
    grid = policy.grid if policy is not None else ()
    found: list[Observed] = []
    later = _told_later(reader)
    for roster, closed, told in zip(reader.rosters, reader.rounds, later, strict=True):
        found.append(_one(roster, closed.position, told, reader, guards, grid))
    return found


def _told_later(reader: RunReader) -> list[dict[int, dict[str, float]]]:
    """What each round's replicas said of it afterwards: with the next report or, of the last round, their result."""
    rosters = reader.rosters
    found: list[dict[int, dict[str, float]]] = [{} for _ in rosters]
    replicas: set[int] = set()
    for index, roster in enumerate(rosters):
        for report in (*roster.members, *roster.others):
            replicas.add(report.replica)
            if index:
                found[index - 1][report.replica] = dict(report.metrics)
    for replica in replicas:
        last = _result(reader, replica).get("last")
        if not isinstance(last, Mapping):
            continue
        round = last.get("round")
        if isinstance(round, (int, float)) and 0 <= round < len(found):
            numbers = {k: float(v) for k, v in last.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
            found[int(round)].setdefault(replica, numbers)
    return found


def _one(
    roster: Roster,
    position: int,
    later: Mapping[int, Mapping[str, float]],
    reader: RunReader,
    guards: Guards,
    grid: Sequence[int],
) -> Observed:
    members, absent = roster.members, dict(roster.absent)
    told = next((told for told in later.values() if "last_mean_square_norm" in told), None)
    mean = _mean_square_norm(reader, roster) if told is None else told["last_mean_square_norm"]
    open_still = mean is None  # its means aren't all there: who was averaged is agreed, what came out isn't known yet
    mean = math.nan if mean is None else mean
    if told is not None and mean == 0.0 and "last_drift" not in told:  # in the words of those who averaged nobody
        mean = math.nan
    if members and not open_still and not math.isfinite(mean):
        absent |= {report.replica: "the mean is not finite" for report in members}
        members = ()
    treatment = treat(members, guards)
    reports = sorted((*roster.members, *roster.others), key=lambda report: report.replica)
    steps, following = steps_of(reports), successor(reports)
    observation = None
    if not open_still and following is not None and len(following.preview) == len(grid):
        observation = observe(
            reports,
            members,
            drift=treatment.drift,
            mean_square_norm=mean,
            fleet=_size(reader, roster.round),
            planned=steps,
            cut=following.remaining == 0,
            position=position,
            grid=grid,
        )
    return Observed(
        round=roster.round,
        position=position,
        members=tuple(report.replica for report in members),
        observation=observation,
        steps=steps,
        tokens=tokens_of(members),
        drift=drift_of(members, treatment.drift),
        mean_square_norm=mean,
        absent=absent,
        outliers=treatment.outliers,
        replicas={
            report.replica: {
                **of_interval(report.metrics),
                **told_before(later.get(report.replica, {})),
                **{k: v for k, v in later.get(report.replica, {}).items() if k.startswith("straggler")},
            }
            for report in reports
        },
    )


def _size(reader: RunReader, round: int) -> int:
    sizes = reader.sizes
    return sizes[max(first for first in sizes if first <= round)]


def _mean_square_norm(reader: RunReader, roster: Roster) -> float | None:
    """Of a round that nobody has told of yet: from the means themselves. None while one of them isn't there."""
    total = 0.0
    for shard in range(roster.shards):
        mean = _pointer(reader, keys.mean(roster.round, roster.attempt, shard))
        if not mean:
            return None
        chunks = mean.get("chunks")
        if not isinstance(chunks, list) or not chunks:
            return math.nan
        for chunk in chunks:
            try:
                total += float.fromhex(chunk[2]) if chunk[3] else math.nan
            except (IndexError, TypeError, ValueError):
                return math.nan
    return total if roster.members else math.nan


def _without_policy(seen: Observed) -> dict[str, Any]:
    """A record of what is known without asking anyone."""
    told = {str(r): {k: v for k, v in values.items() if math.isfinite(v)} for r, values in seen.replicas.items()}
    return {
        "version": RECORD_VERSION,
        "round": seen.round,
        "steps": seen.steps,
        "position": seen.position,
        "horizon": seen.steps,
        "members": list(seen.members),
        "absent": {str(replica): why for replica, why in seen.absent.items()},
        "outliers": {str(replica): what for replica, what in seen.outliers.items()},
        "tokens": seen.tokens,
        "drift": seen.drift if math.isfinite(seen.drift) else None,
        "replicas": told,
    }


# -- what else the store says ----------------------------------------------------------------------------------------


def _pointer(reader: RunReader, key: str) -> Mapping[str, Any]:
    try:
        return load(reader.store.get(key, max_bytes=MAX_POINTER_BYTES), key)
    except (ObjectMissing, ObjectCorrupt):
        return {}


def _result(reader: RunReader, replica: int) -> Mapping[str, Any]:
    found = _pointer(reader, keys.result(replica)).get("result")
    return found if isinstance(found, Mapping) else {}


def _elements(reader: RunReader) -> int | None:
    """Of the parameters that the newest round averaged."""
    print_of = next((roster.layout for roster in reversed(reader.rosters) if roster.layout), "")
    slots = _pointer(reader, keys.layout(print_of)).get("slots") if print_of else None
    try:
        return sum(math.prod(slot[1]) for slot in slots or () if slot[3] == "parameter") or None
    except (IndexError, TypeError):
        return None


def _budget(rosters: Sequence[Roster], reader: RunReader) -> int | None:
    """Inner steps of the whole run: those behind it, and those that are left."""
    for roster, closed in zip(reversed(rosters), reversed(reader.rounds), strict=True):
        left = [report.remaining for report in (*roster.members, *roster.others) if report.remaining is not None]
        if left:
            return closed.position + max(left)
    return None
