"""What a replica expects of a round before its roster exists, so that it can begin early: in which order to write its
chunks, and whose chunks it will have to average. Pure functions.

Invariant: only a guess. Nothing that is fetched because of it is used before the roster and the readies name its hash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from composer_replication.collective.object_store.roster import Mode, divide, shard_range, takeover_order

__all__ = ["Forecast", "forecast"]


@dataclass(frozen=True, slots=True)
class Forecast:
    order: tuple[int, ...]  # all chunks, as this replica writes them
    wanted: Mapping[int, tuple[int, ...]]  # each other member's chunks that it will average, as that one writes them
    kept: frozenset[int]  # its own chunks that it will average without reading them from the store


def forecast(mode: Mode, expected: Sequence[int], replica: int, round: int, chunk_bytes: Sequence[int]) -> Forecast:
    """The forecast for `replica` if exactly the `expected` replicas (and it) are averaged."""
    members = tuple(sorted({*expected, replica}))
    chunks = len(chunk_bytes)
    direct, owners = divide(mode, members, round, chunks=chunks, payload_bytes=sum(chunk_bytes))
    if direct:
        # Everyone averages what the store holds: a contribution that was damaged on its way is then void for all, its
        # writer too, which would otherwise go on alone.
        everything = tuple(range(chunks))
        return Forecast(everything, {other: everything for other in members if other != replica}, frozenset())
    order = takeover_order(members, round)
    parts: dict[int, list[range]] = {member: [] for member in members}
    for shard, owner in enumerate(owners):
        parts[owner].append(shard_range(len(owners), shard, chunks))
    own = frozenset(chunk for part in parts[replica] for chunk in part)
    wanted = {
        other: tuple(chunk for chunk in _writes(order, parts, other) if chunk in own)
        for other in members
        if other != replica
    }
    return Forecast(_writes(order, parts, replica), wanted, own)


def _writes(order: tuple[int, ...], parts: Mapping[int, Sequence[range]], writer: int) -> tuple[int, ...]:
    """A shard for each owner in turn, so that all can begin, and each from another member first; one's own part, which
    nobody else waits for, last."""
    place = order.index(writer)
    others = order[place + 1 :] + order[:place]
    most = max((len(part) for part in parts.values()), default=0)
    chunks = [
        chunk for level in range(most) for owner in others if level < len(parts[owner]) for chunk in parts[owner][level]
    ]
    return (*chunks, *(chunk for part in parts[writer] for chunk in part))
