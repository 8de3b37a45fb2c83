"""What else sets runs apart that are compared: their size, their outer step, whatever isn't the interval.

Invariant: says what is different in the settings, never which of it made a loss differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from composer_replication.report.groups import Group, first_losses, unlike
from composer_replication.report.runs import Run
from composer_replication.report.settings import differing_settings, flat, task_apart

__all__ = ["about_size", "about_task", "also_apart", "size_columns", "steps_words"]

_NO = "–"
_MOST = 3  # settings that are named one by one
_ADAPTING = ("outer.adapt_", "outer.max_scale", "outer.momentum_m")  # without effect where the interval is fixed
_ELSEWHERE = ("policy", "base_horizon", "replicas", "steps", "elements", "fleet")  # the interval, and what is said else
_REPEATED = tuple(f"training.{name}" for name in ("autoloco", "outer", "codec", "fleet", "training.steps"))


def steps_words(run: Run) -> str:
    """Inner steps of each replica: '260', or '260 of 700' of a run that hasn't come to its budget."""
    if run.steps and run.position < run.steps:
        return f"{run.position:,} of {run.steps:,}"
    return f"{run.position:,}"


def _budget(run: Run) -> str:
    return f"{run.steps or run.position:,}"


def _momentum(run: Run) -> str:
    return flat(run.settings).get("outer.momentum", _NO)


def _distinct(group: Group, of: Callable[[Run], str]) -> str:
    return ", ".join(dict.fromkeys(of(run) for run in group.runs))


_SIZE: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("steps", _budget),
    ("replicas", lambda run: f"{run.replicas:,}" if run.replicas else _NO),
    ("parameters", lambda run: f"{run.elements:,}" if run.elements else _NO),
)


def about_size(groups: Sequence[Group]) -> list[str]:
    """A notice if the groups' steps, replicas or parameters aren't the same."""
    differing = [(name, of) for name, of in _SIZE if _differs(groups, of)]
    if not differing:
        return []
    words = "; ".join(
        f"{group.label}: {', '.join(f'{_distinct(group, of)} {name}' for name, of in differing)}" for group in groups
    )
    names = " and ".join(name for name, _ in differing)
    return [f"the runs differ in {names} ({words}): losses, bytes and times of unlike runs can't be compared"]


def about_task(groups: Sequence[Group]) -> list[str]:
    """Notices about what they were trained on, where it isn't the same in all, or may not be."""
    firsts = [group.first for group in groups]
    said: list[str] = []
    names = task_apart(firsts)
    if names:
        words = "; ".join(_who_has(groups, name) for name in names[:_MOST])
        rest = f"; and {len(names) - _MOST} more" if len(names) > _MOST else ""
        weight = (
            "their losses can't be compared"
            if task_apart(firsts, losses_only=True)
            else "some of the difference in their losses may be due to that"
        )
        said.append(f"the runs weren't trained on the same: {words}{rest}: {weight}")
    silent = [group.label for group in groups if group.first.task is None]
    if silent and len(silent) < len(groups):
        said.append(
            f"what the runs of {_listed(silent)} were trained on isn't recorded: whether it is the same as in the "
            "others isn't known"
        )
    return said + _unsaid(groups)


def _who_has(groups: Sequence[Group], name: str) -> str:
    labels: dict[str, list[str]] = {}
    for group in groups:
        if group.first.task is not None:
            labels.setdefault(flat(group.first.settings).get(name, "none")[:40], []).append(group.label)
    return f"{name.removeprefix('task.')} " + ", ".join(f"{value} ({_listed(who)})" for value, who in labels.items())


def _listed(labels: Sequence[str]) -> str:
    rest = f" and {len(labels) - _MOST} more" if len(labels) > _MOST else ""
    return ", ".join(labels[:_MOST]) + rest


def _unsaid(groups: Sequence[Group]) -> list[str]:
    """Of runs that don't say what they were trained on: what can be told from their rounds all the same."""
    said: list[str] = []
    silent = [group for group in groups if group.first.task is None]
    found = [(group, other) for group in silent for other in groups if other is not group and unlike(group, other)]
    pair = next(iter(found), None)
    losses = first_losses(*pair) if pair else None
    if pair and losses:
        more = len({frozenset((group.label, other.label)) for group, other in found}) - 1
        said.append(
            f"the same seed gave another loss in the first round, before anything was exchanged ({pair[0].label}: "
            f"{losses[0]:.4f}; {pair[1].label}: {losses[1]:.4f}{f'; and {more} pairs more' if more else ''}): they "
            "weren't trained on the same data and model in the same way, so their losses aren't compared"
        )
    for index, group in enumerate(groups):
        others = [other for other in groups[index + 1 :] if not differing_settings([group.first, other.first])]
        alike = [other.label for other in others if {*group.by_seed} & {*other.by_seed}]
        if alike:
            said.append(
                f"{group.label} and {_listed(alike)} have the same settings and seeds, and yet other rounds: something "
                "that isn't recorded differs (data, a disturbance, software)"
            )
    return said


def _differs(groups: Sequence[Group], of: Callable[[Run], str]) -> bool:
    told = {of(run) for group in groups for run in group.runs} - {_NO}
    return len(told) > 1


def size_columns(groups: Sequence[Group]) -> list[tuple[str, list[str]]]:
    """Columns of the comparison (name, a cell for each group), of what isn't the same in all."""
    wanted = [("steps", steps_words), _SIZE[1], ("outer momentum", _momentum)]
    return [(name, [_distinct(group, of) for group in groups]) for name, of in wanted if _differs(groups, of)]


def also_apart(group: Group, other: Group) -> str:
    """A sentence about what may have made their losses differ beside the intervals; "" if nothing is known to."""
    mine, theirs = group.first, other.first
    found = [f"{steps_words(mine)} steps, not {steps_words(theirs)}"] if mine.position != theirs.position else []
    found += _settings_apart(mine, theirs)
    if not found:
        return ""
    rest = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return f"The intervals aren't all that differs: {'; '.join(found[:_MOST])}{rest}."


def _settings_apart(mine: Run, theirs: Run) -> list[str]:
    """Of settings that both have: what one of them doesn't say may well be the same."""
    here, there = flat(mine.settings), flat(theirs.settings)
    known = [name for name in here if name in there and not name.startswith((*_ELSEWHERE, *_REPEATED))]
    policies = {mine.policy, theirs.policy}
    found: list[str] = []
    for name in sorted(known, key=lambda name: (name != "outer.momentum", not name.startswith("outer."))):
        idle = "fixed" in policies and name.startswith(_ADAPTING)
        if here[name] == there[name] or idle or ("ddp" in policies and name == "codec"):
            continue
        words = {"outer.lr": "outer learning rate"}.get(name, name.replace("outer.", "outer ").removeprefix("task."))
        found.append(f"{words} {here[name][:40]}, not {there[name][:40]}")
    return found
