"""What fixed fleets (threads, process groups) check before they begin, and when a round closes.

Invariant: pure functions of what all replicas said, so that each of them comes to the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer_replication.collective.base import Report
from composer_replication.collective.guards import Guards
from composer_replication.collective.layout import Layout
from composer_replication.collective.membership import Treatment, select_members, treat
from composer_replication.errors import Diverged, FleetMismatch

__all__ = ["Closing", "Offer", "check_layouts", "check_offers", "close_round", "differing_settings", "without_mean"]

_SHOWN = 8  # lines of a difference that an error spells out


@dataclass(frozen=True, slots=True)
class Offer:
    """What one replica brings to `start`."""

    replica: int
    round: int
    digest: str
    layout: Layout
    settings: Mapping[str, Any]
    resumed: bool


@dataclass(frozen=True, slots=True)
class Closing:
    """Who is averaged in a round, and whom the next one waits for."""

    members: tuple[Report, ...]
    others: tuple[Report, ...]
    absent: Mapping[int, str]
    expected_next: tuple[int, ...]
    treatment: Treatment


def without_mean(closing: Closing) -> Closing:
    """The sum of finite contributions overflows: a round that averaged nobody."""
    everyone = sorted((*closing.members, *closing.others), key=lambda report: report.replica)
    absent = {**closing.absent, **{report.replica: "the mean is not finite" for report in closing.members}}
    return replace(closing, members=(), others=tuple(everyone), absent=dict(sorted(absent.items())))


def differing_settings(theirs: Mapping[str, Any], mine: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One line for each setting that differs, nested ones by their path, ascending."""
    lines: list[str] = []
    for key in sorted(theirs.keys() | mine.keys()):
        name = f"{prefix}{key}"
        if key not in mine or key not in theirs:
            lines.append(f"{name}: only {'there' if key in theirs else 'here'}")
        elif isinstance(mine[key], Mapping) and isinstance(theirs[key], Mapping):
            lines += differing_settings(theirs[key], mine[key], f"{name}.")
        elif mine[key] != theirs[key]:
            lines.append(f"{name}: {mine[key]!r} here, {theirs[key]!r} there")
    return lines


def check_offers(offers: Sequence[Offer]) -> int:
    """Whose state all begin with: the lowest id's, or the lowest id's among those that resume.

    Raises FleetMismatch, naming the replica and its settings or tensors, if they can't be one fleet; Diverged if two
    of them resume from unequal states.
    """
    ordered = sorted(offers, key=lambda offer: offer.replica)
    first = ordered[0]
    for offer in ordered[1:]:
        lines = differing_settings(first.settings, offer.settings)
        if lines:
            raise FleetMismatch(_spell(f"replica {offer.replica}'s settings aren't replica {first.replica}'s", lines))
    resumed = [offer for offer in ordered if offer.resumed]
    source = resumed[0] if resumed else first
    for offer in resumed:
        if (offer.round, offer.digest) != (source.round, source.digest):
            raise Diverged(
                f"replica {offer.replica} resumes at round {offer.round} with digest {offer.digest!r},"
                f" replica {source.replica} at round {source.round} with {source.digest!r}"
            )
    for offer in ordered:
        # A run that goes on may have unfrozen tensors since its start, which a newcomer still has frozen.
        if offer.resumed == source.resumed:
            check_layouts(source.replica, source.layout, offer.replica, offer.layout)
    return source.replica


def check_layouts(reference: int, expected: Layout, replica: int, found: Layout) -> None:
    """Raises FleetMismatch, naming the tensors, unless the layouts are equal."""
    lines = found.differences(expected)
    if lines:
        raise FleetMismatch(_spell(f"replica {replica}'s tensors aren't replica {reference}'s", lines))


def _spell(what: str, lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return f"{what} (here: replica at fault): {'; '.join(lines[:_SHOWN])}{more}"


def close_round(reports: Sequence[Report], layouts: Mapping[int, Layout], guards: Guards) -> Closing:
    """Decide a round in which every expected replica has reported.

    Raises FleetMismatch for a replica that trained other tensors than the lowest id, and Diverged for one whose
    interval began from another state: in a fixed fleet nobody could go on without it.
    """
    ordered = sorted(reports, key=lambda report: report.replica)
    first = ordered[0]
    for report in ordered[1:]:
        check_layouts(first.replica, layouts[first.replica], report.replica, layouts[report.replica])
        if report.base != first.base:
            raise Diverged(
                f"replica {report.replica}'s interval began from state {report.base or 'without a digest'},"
                f" replica {first.replica}'s from {first.base or 'one without a digest'}"
            )
    chosen = select_members(ordered, guards=guards)
    others = tuple(report for report in ordered if report.replica in chosen.absent)
    expected_next = tuple(report.replica for report in ordered if not report.leaving)
    return Closing(chosen.members, others, chosen.absent, expected_next, treat(chosen.members, guards))
