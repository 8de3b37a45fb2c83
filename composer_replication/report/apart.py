"""What else sets runs apart that are compared: their size, their outer step, whatever isn't the interval.

Invariant: says what is different in the settings, never which of it made a loss differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from composer_replication.report.groups import Group, flat
from composer_replication.report.runs import Run

__all__ = ["about_size", "also_apart", "size_columns", "steps_words"]

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
        words = {"outer.lr": "outer learning rate"}.get(name, name.replace("outer.", "outer "))
        found.append(f"{words} {here[name][:40]}, not {there[name][:40]}")
    return found
