"""Runs that differ in nothing but their seed belong together: they are shown as one, with their spread.

Invariant: no run is in two groups, and none is dropped without a notice. Runs that differ in a setting are never in one
group, nor are two of the same seed that something tells apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from composer_replication.autoloco.config import AutoLoCoConfig, OuterConfig
from composer_replication.report.rounds import Round
from composer_replication.report.runs import Run
from composer_replication.report.settings import TASK, differing_settings, shown_settings, task_apart

__all__ = [
    "COLOURS",
    "Group",
    "baseline_of",
    "comparable",
    "first_losses",
    "focus_of",
    "group_runs",
    "policy_name",
    "unlike",
]

COLOURS = 8  # lines that can be told apart
_STROKES = ("", "dot", "longdash", "dashdot")  # and then again, in another stroke
_MOST_NAMES = 6  # settings in a notice
_SAME = 0.005  # by how much losses of equal training may differ, relatively: machines don't add up alike
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
    stroke: str = ""  # of its lines, where there are more groups than colours

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def seeds(self) -> tuple[int | None, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def by_seed(self) -> dict[int, Run]:
        """The runs by their seed; none at all where a seed isn't known, or occurs twice."""
        found = {run.seed: run for run in self.runs if run.seed is not None}
        return found if len(found) == len(self.runs) else {}


def policy_name(run: Run) -> str:
    """The policy in the words of the page."""
    if run.policy == "fixed":
        base = run.base_horizon
        return f"Fixed interval of {base}" if base else "Fixed interval"
    return _NAMES.get(run.policy, run.policy)


def group_runs(runs: Iterable[Run]) -> tuple[list[Group], list[str]]:
    """(the groups in the order of their first runs, what to say about them)."""
    kept, said = _without_copies(runs)
    keyed: dict[str, list[Run]] = {}
    for run in kept:
        keyed.setdefault(json.dumps(run.settings, sort_keys=True, default=str), []).append(run)
    several = [part for found in keyed.values() for part in _each_seed_once(found)]
    place = {id(run): index for index, run in enumerate(kept)}
    several.sort(key=lambda found: place[id(found[0])])
    several = [sorted(found, key=lambda run: (run.seed is None, run.seed or 0)) for found in several]
    if len(several) > COLOURS:
        said.append(_many(several))
    labels = _labels(several)
    groups = [
        Group(label=labels[i], runs=tuple(found), colour=i % COLOURS, stroke=_STROKES[i // COLOURS % len(_STROKES)])
        for i, found in enumerate(several)
    ]
    twice = [group.label for group in groups if len(group.runs) > 1 and not group.by_seed]
    if twice:
        said.append(f"{', '.join(twice)}: seeds aren't known, or occur twice: nothing is compared seed by seed")
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


def _each_seed_once(found: list[Run]) -> list[list[Run]]:
    """Where a seed occurs twice, something else sets runs apart: by their names, or else by where they were read."""
    parts = [found]
    tellers: tuple[Callable[[Run], str], ...] = (lambda run: run.name, lambda run: run.source)
    for tell in tellers:
        parts = [one for part in parts for one in (_apart(part, tell) if _seed_twice(part) else [part])]
    return parts


def _seed_twice(found: Sequence[Run]) -> bool:
    return len({run.seed for run in found}) < len(found)


def _apart(found: Sequence[Run], tell: Callable[[Run], str]) -> list[list[Run]]:
    keyed: dict[str, list[Run]] = {}
    for run in found:
        keyed.setdefault(tell(run), []).append(run)
    return list(keyed.values())


def _many(several: Sequence[Sequence[Run]]) -> str:
    kinds = _apart([found[0] for found in several], policy_name)
    names = list(dict.fromkeys(name for kind in kinds for name in _telling(kind)))
    rest = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    what = f"; those of one policy differ in {', '.join(names[:_MOST_NAMES])}{rest}" if names else ""
    return (
        f"more than {COLOURS} kinds of runs: colours occur again, with other strokes, and curves are drawn without "
        f"their bands{what}"
    )


def _labels(several: Sequence[Sequence[Run]]) -> list[str]:
    """By the policy; what else differs among runs of one policy is added, or their names."""
    labels = [policy_name(found[0]) for found in several]
    for label in {one for one in labels if labels.count(one) > 1}:
        same = [i for i, one in enumerate(labels) if one == label]
        names = _telling([several[i][0] for i in same])
        if len(names) > 2 and len({several[i][0].name for i in same}) == len(same):
            continue  # their own names tell them apart in fewer words
        for i in same:
            values = shown_settings(several[i][0])
            labels[i] = ", ".join([label, *(_in_words(name, values.get(name)) for name in names[:3])])
    clashing = {label for label in labels if labels.count(label) > 1}
    labels = [f"{one} ({several[i][0].name})" if one in clashing else one for i, one in enumerate(labels)]
    return [f"{label} #{i + 1}" if labels.count(label) > 1 else label for i, label in enumerate(labels)]


def _telling(runs: Sequence[Run]) -> list[str]:
    """What differs; what they were trained on only where all say it: else runs that may be alike would seem not to."""
    known = all(run.task is not None for run in runs)
    return [name for name in differing_settings(runs) if known or not name.startswith(TASK)]


def _in_words(name: str, value: str | None) -> str:
    if value is None:
        return f"no {name.rpartition('.')[2]}"[:60]
    if name in ("replicas", "steps"):
        return f"{value} {name}"
    return value if name == "codec" else f"{name.rpartition('.')[2]} {value}"[:60]


def _about_seeds(groups: Sequence[Group]) -> list[str]:
    alike = [group for group in groups if comparable(groups, group)]
    told = {group.label: sorted({seed for seed in group.seeds if seed is not None}) for group in alike}
    known = {label: seeds for label, seeds in told.items() if seeds}
    if len({tuple(seeds) for seeds in known.values()}) < 2:
        return []
    each = {label: ", ".join(map(str, seeds)) for label, seeds in known.items()}
    words = "; ".join(f"{label}: {seeds}" for label, seeds in each.items())
    if len(each) > _MOST_NAMES:
        most = max(dict.fromkeys(each.values()), key=list(each.values()).count)
        words = "; ".join([f"most have {most}", *(f"{label}: {own}" for label, own in each.items() if own != most)])
    return [f"the seeds differ ({words}): some of the difference between them may be the seeds'"]


# -- what can be compared with what ----------------------------------------------------------------------------------


def comparable(groups: Sequence[Group], group: Group) -> list[Group]:
    """The other groups of as many steps and replicas, that aren't known to have been trained on something else."""
    mine = (group.first.steps, group.first.replicas)
    alike = [other for other in groups if other is not group and (other.first.steps, other.first.replicas) == mine]
    return [other for other in alike if not unlike(group, other)]


def unlike(group: Group, other: Group) -> bool:
    """Whether they are known to have been trained on other data, another model, or with another disturbance.

    Of simulated ones that don't say it the first round tells: before anything is exchanged, the same seed gives the
    same loss.
    """
    if group.first.task is not None and other.first.task is not None:
        return bool(task_apart([group.first, other.first], losses_only=True))
    return first_losses(group, other) is not None


def first_losses(group: Group, other: Group) -> tuple[float, float] | None:
    """Losses of the first rounds of a seed that both have simulated, if they aren't the same; None if they are, or
    can't be compared."""
    mine, theirs = _begun(group), _begun(other)
    for seed, one in mine.items():
        two = theirs.get(seed)
        if two is None or one.loss is None or two.loss is None:
            continue
        alike = (one.steps, one.members) == (two.steps, two.members)
        if alike and abs(one.loss - two.loss) > _SAME * max(abs(one.loss), abs(two.loss)):
            return one.loss, two.loss
    return None


def _begun(group: Group) -> dict[int, Round]:
    """The first rounds of simulated runs, whose start is the seed's; data parallelism exchanges within them."""
    runs = {seed: run for seed, run in group.by_seed.items() if run.simulated and run.policy != "ddp" and run.rounds}
    return {seed: run.rounds[0] for seed, run in runs.items() if run.rounds[0].round == 0}


def baseline_of(groups: Sequence[Group], group: Group) -> Group | None:
    """The group with the fixed interval that `group` can be compared with: as many steps and replicas, and of several
    the one whose other settings differ least."""
    found = [other for other in comparable(groups, group) if other.first.policy == "fixed"]
    return min(found, key=lambda other: len(differing_settings([group.first, other.first])), default=None)


def focus_of(groups: Sequence[Group]) -> int:
    """The group that the page opens on: the adaptive policy, of several the one nearest to its defaults."""
    adaptive = [index for index, group in enumerate(groups) if group.first.policy == "autoloco"]
    return min(adaptive, key=lambda index: _departures(groups[index].first), default=0)


def _departures(run: Run) -> int:
    outer, policy = run.settings.get("outer"), run.settings.get("policy")
    inner = policy.get("settings") if isinstance(policy, Mapping) else None
    usual = AutoLoCoConfig(base_horizon=run.base_horizon or 1).settings()
    usual.pop("warmup_steps")  # those of the task
    pairs: list[tuple[Any, dict[str, Any]]] = [(outer, asdict(OuterConfig().resolved("autoloco"))), (inner, usual)]
    count = sum(
        told.get(name, value) != value
        for told, defaults in pairs
        if isinstance(told, Mapping)
        for name, value in defaults.items()
    )
    return count + bool((run.task or {}).get("disturbance"))
