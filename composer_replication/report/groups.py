"""Runs that differ in nothing but their seed belong together: they are shown as one, with their spread.

Invariant: no run is in two groups, and none is dropped without a notice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer_replication.report.runs import Run

__all__ = ["COLOURS", "Group", "baseline_of", "comparable", "differing_settings", "flat", "group_runs", "policy_name"]

COLOURS = 8  # lines that can be told apart
_NAMES = {
    "autoloco": "AutoLoCo",
    "staircase": "Staircase",
    "qsr": "QSR",
    "linear": "Linear interval",
    "ddp": "Data parallel",
}


@dataclass(frozen=True, kw_only=True)
class Group:
    """One or several runs of the same settings. `colour` is an index into the palette."""

    label: str
    runs: tuple[Run, ...]
    colour: int

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def seeds(self) -> tuple[int | None, ...]:
        return tuple(run.seed for run in self.runs)


def policy_name(run: Run) -> str:
    """The policy in the words of the page."""
    if run.policy == "fixed":
        base = run.base_horizon
        return f"Fixed interval of {base}" if base else "Fixed interval"
    return _NAMES.get(run.policy, run.policy)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as dotted names, values as text."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif value is not None:
            found[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Names of settings that aren't the same in all runs, the plain ones first."""
    each = [flat(run.settings) for run in runs]
    names = dict.fromkeys(name for one in each for name in one)
    return [name for name in names if len({one.get(name) for one in each}) > 1]


def group_runs(runs: Iterable[Run]) -> tuple[list[Group], list[str]]:
    """(the groups in the order of their first runs, what to say about them)."""
    kept, said = _without_copies(runs)
    keyed: dict[str, list[Run]] = {}
    for run in kept:
        keyed.setdefault(json.dumps(run.settings, sort_keys=True, default=str), []).append(run)
    several = [sorted(found, key=lambda run: (run.seed is None, run.seed or 0)) for found in keyed.values()]
    if len(several) > COLOURS:
        several = _fewer(several)
        said.append(f"more than {COLOURS} kinds of runs: those of one policy are shown together, with their spread")
    labels = _labels(several)
    groups = [Group(label=labels[i], runs=tuple(found), colour=i) for i, found in enumerate(several)]
    if len(groups) > 1:
        said += _about_seeds(groups)
    return groups, said


def _without_copies(runs: Iterable[Run]) -> tuple[list[Run], list[str]]:
    kept, said, seen = list[Run](), list[str](), dict[str, str]()
    for run in runs:
        whole = json.dumps([run.raw.get("rounds"), run.seed, run.settings], sort_keys=True, default=str)
        if run.rounds and whole in seen:
            said.append(f"{run.source}: the same run as in {seen[whole]}, shown once")
            continue
        seen.setdefault(whole, run.source)
        kept.append(run)
    return kept, said


def _fewer(several: list[list[Run]]) -> list[list[Run]]:
    policies: dict[str, list[Run]] = {}
    for found in several:
        policies.setdefault(found[0].policy, []).extend(found)
    merged = list(policies.values())
    rest = [run for found in merged[COLOURS - 1 :] for run in found]
    return merged if len(merged) <= COLOURS else [*merged[: COLOURS - 1], rest]


def _labels(several: Sequence[Sequence[Run]]) -> list[str]:
    """By the policy; what else differs among runs of one policy is added, or their names."""
    labels = [policy_name(found[0]) for found in several]
    for label in {one for one in labels if labels.count(one) > 1}:
        same = [i for i, one in enumerate(labels) if one == label]
        names = differing_settings([several[i][0] for i in same])
        if len(names) > 2 and len({several[i][0].name for i in same}) == len(same):
            continue  # their own names tell them apart in fewer words
        for i in same:
            values = flat(several[i][0].settings)
            labels[i] = ", ".join([label, *(_in_words(name, values.get(name, "default")) for name in names[:3])])
    clashing = {label for label in labels if labels.count(label) > 1}
    labels = [f"{one} ({several[i][0].name})" if one in clashing else one for i, one in enumerate(labels)]
    return [f"{label} #{i + 1}" if labels.count(label) > 1 else label for i, label in enumerate(labels)]


def _in_words(name: str, value: str) -> str:
    if name in ("replicas", "steps"):
        return f"{value} {name}"
    return value if name == "codec" else f"{name.rpartition('.')[2]} {value}"[:60]


def _about_seeds(groups: Sequence[Group]) -> list[str]:
    alike = [group for group in groups if comparable(groups, group)]
    told = {group.label: sorted({seed for seed in group.seeds if seed is not None}) for group in alike}
    known = {label: seeds for label, seeds in told.items() if seeds}
    if len({tuple(seeds) for seeds in known.values()}) < 2:
        return []
    words = "; ".join(f"{label}: {', '.join(map(str, seeds))}" for label, seeds in known.items())
    return [f"the seeds differ ({words}): some of the difference between them may be the seeds'"]


def comparable(groups: Sequence[Group], group: Group) -> list[Group]:
    """The other groups of as many steps and replicas."""
    mine = (group.first.steps, group.first.replicas)
    return [other for other in groups if other is not group and (other.first.steps, other.first.replicas) == mine]


def baseline_of(groups: Sequence[Group], group: Group) -> Group | None:
    """The group with the fixed interval that `group` can be compared with: as many steps and replicas, and of several
    the one whose other settings differ least."""
    found = [other for other in comparable(groups, group) if other.first.policy == "fixed"]
    return min(found, key=lambda other: len(differing_settings([group.first, other.first])), default=None)
