"""The page's tables as plain text cells: comparison, settings, rounds, who is there now.

Invariant: cells are text, never markup; the page puts them in as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from composer_replication.readable import byte_count, duration
from composer_replication.report.apart import size_columns
from composer_replication.report.facts import percent, spread
from composer_replication.report.groups import Group, baseline_of
from composer_replication.report.measures import (
    away,
    bytes_of,
    diverged,
    fixed_rounds,
    last_loss,
    late,
    since,
    times_of,
    validation,
)
from composer_replication.report.rounds import number, object_of
from composer_replication.report.runs import Run
from composer_replication.report.series import AXES
from composer_replication.report.settings import differing_settings, flat, shown_settings

__all__ = ["comparison", "rounds_table", "settings_table"]

Table = dict[str, Any]
_MOST_ROWS = 500
_NO = "–"
_ABOUT_ROUNDS = "Of fixed: rounds, as a share of those that a fixed interval takes for the same steps."
_ABOUT_DDP = "Data parallel: a round is a step; sent: one {} gradient of each replica in each step, which is the least."
_ABOUT_TIME = (
    "Wall-clock: from the first step to the last round's end, that is the longest replica's training, waiting and "
    "exchange of each round, added up; starting and the validation at the end are not in it. Training: the share of "
    "the replicas' time in which they trained."
)

_ABOUT_TASK = "What these runs were trained on isn't recorded: that it is the same in all can't be told from here."


def comparison(groups: Sequence[Group]) -> Table:
    """A line for each group."""
    columns: list[tuple[str, list[str]]] = [
        ("", [group.label for group in groups]),
        ("seeds", [", ".join(_NO if seed is None else str(seed) for seed in group.seeds) for group in groups]),
        ("rounds", [_over(group, lambda run: float(run.exchanges), "{:,.0f}") for group in groups]),
        ("of fixed", [_of_fixed(group, groups) for group in groups]),
        ("sent", [_sent(group) for group in groups]),
        ("training loss", [_trained(group) for group in groups]),
        ("validation loss", [_over(group, validation) for group in groups]),
        *size_columns(groups),
        ("wall-clock", [_wall_clock(group) for group in groups]),
        ("training", [_training(group) for group in groups]),
    ]
    columns = [(name, cells) for name, cells in columns if set(cells) != {_NO}]  # what nobody knows takes no room
    rows = [list(cells) for cells in zip(*(cells for _, cells in columns), strict=True)]
    notes = [_ABOUT_ROUNDS]
    notes += [_ABOUT_DDP.format(group.first.codec) for group in groups if group.first.policy == "ddp"][:1]
    if any(times_of(run) for group in groups for run in group.runs):
        notes.append(_ABOUT_TIME)
    if len(groups) > 1 and all(group.first.task is None for group in groups):
        notes.append(_ABOUT_TASK)
    return {
        "columns": [name for name, _ in columns],
        "rows": rows,
        "colours": [group.colour for group in groups],
        "note": " ".join(notes),
    }


def _over(group: Group, measure: Callable[[Run], float | None], form: str = "{:.4f}") -> str:
    known = [value for run in group.runs if run.rounds and (value := measure(run)) is not None]
    return spread(known, form) if known else _NO


def _of_fixed(group: Group, groups: Sequence[Group]) -> str:
    runs = [run for run in group.runs if run.rounds]
    horizon = (baseline_of(groups, group) or group).first.base_horizon
    fixed = [one for run in runs if (one := fixed_rounds(run, horizon)) is not None]
    return percent(sum(run.exchanges for run in runs) / sum(fixed)) if fixed and len(fixed) == len(runs) else _NO


def _sent(group: Group) -> str:
    sent = [found.sent for run in group.runs if (found := bytes_of(run)) is not None]
    return byte_count(fmean(sent)) if sent else _NO


def _trained(group: Group) -> str:
    lost = [one for run in group.runs if (one := diverged(run)) is not None]
    if not lost:
        return _over(group, last_loss)
    words = f"not finite from {since(min(lost, key=lambda one: one.position))} on"
    return words if len(group.runs) == 1 else f"{words} (in {len(lost)} of {len(group.runs)})"


def _wall_clock(group: Group) -> str:
    ends = [seconds for run in group.runs if (seconds := _seconds(run)) is not None]
    return duration(fmean(ends)) if ends else _NO


def _seconds(run: Run) -> float | None:
    """As the rounds tell, or as `simulate` worked it out."""
    along = AXES[2].of(run)
    return along[-1] if along else number(object_of(run.raw.get("time")), "seconds")


def _training(group: Group) -> str:
    times = [found for run in group.runs if (found := times_of(run)) is not None]
    return percent(fmean(one.train / one.whole for one in times)) if times else _NO


def settings_table(groups: Sequence[Group]) -> list[Table]:
    """What differs between the groups, then what is the same, then the versions."""
    if not groups:
        return []
    each = [shown_settings(group.first) for group in groups]
    names = list(dict.fromkeys(name for one in each for name in one))
    differing = set(differing_settings([group.first for group in groups]))
    labels = [group.label for group in groups]
    found: list[Table] = []
    if differing:
        told = sorted(differing, key=lambda name: (not all(name in one for one in each), names.index(name)))
        rows = [[name, *(one.get(name, _NO) for one in each)] for name in told]
        found.append({"title": "What differs", "columns": ["setting", *labels], "rows": rows})
    same = [[name, each[0][name]] for name in names if name not in differing]
    if same:
        title = "The same in all" if len(groups) > 1 else "Settings"
        found.append({"title": title, "columns": ["setting", "value"], "rows": same})
    versions = [flat(group.first.versions) for group in groups]
    kinds = list(dict.fromkeys(name for one in versions for name in one))
    if kinds:
        alike = all(one == versions[0] for one in versions)
        shown = versions[:1] if alike else versions
        rows = [[name, *(one.get(name, _NO) for one in shown)] for name in kinds]
        columns = ["software", *(["version"] if alike else labels)]
        found.append({"title": "Versions", "columns": columns, "rows": rows})
    return found


def rounds_table(run: Run) -> Table:
    """Each round in a line, the last first."""
    columns = [
        "round",
        "at step",
        "steps",
        "loss",
        "drift",
        "coherence",
        "assessed",
        "decision",
        "took part",
        "last to come",
    ]
    shown = run.rounds[::-1][:_MOST_ROWS]
    rows = []
    gone = away(run)
    for one in shown:
        came = late(one)
        missing = "; ".join(f"without {replica}: {why}" for replica, why in {**one.absent, **gone[one.round]}.items())
        odd = "; ".join(f"{replica}: {what}" for replica, what in one.outliers.items())
        rows.append(
            [
                str(one.round),
                str(one.position),
                str(one.steps),
                _NO if one.loss is None else f"{one.loss:.4f}",
                _form(one.numbers, "drift"),
                _form(one.numbers, "coherence"),
                one.assessment or _NO,
                one.action or _NO,
                "; ".join(part for part in (_members(one.members), missing, odd) if part),
                _NO if came is None or came[1] < 0.05 else f"{came[0]} ({duration(came[1])})",
            ]
        )
    note = "" if len(shown) == len(run.rounds) else f"the last {len(shown)} of {len(run.rounds)} rounds"
    return {"columns": columns, "rows": rows, "note": note}


def _form(values: Mapping[str, float], name: str) -> str:
    return f"{values[name]:.4g}" if name in values else _NO


def _members(members: Sequence[int]) -> str:
    if len(members) > 3 and members[-1] - members[0] == len(members) - 1:
        return f"{members[0]} to {members[-1]}"
    return ", ".join(map(str, members)) if members else "nobody"
