"""Charts of all runs on one page: loss, communication, intervals, drift and coherence.

Invariant: a group has the same colour in each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from composer_replication.autoloco.schedule import fixed_intervals
from composer_replication.report.figures import axis, band_traces, chart, line, log_axis, wall_clock
from composer_replication.report.groups import COLOURS, Group
from composer_replication.report.measures import bytes_of
from composer_replication.report.rounds import Round
from composer_replication.report.runs import Run
from composer_replication.report.series import AXES, Axis, band, band_of_logs, points

__all__ = ["compare_charts"]

Chart = dict[str, Any]
_FALL = 0.1  # the share of the steps in which losses fall most
_SCALE = (
    " The scale is that of the losses after the first tenth of the steps; double-click, or “whole scale”, shows all."
)
_FEW = 20  # points of a curve that can all be seen


def compare_charts(groups: Sequence[Group]) -> list[Chart]:
    """The charts that can be drawn from what was recorded."""
    found = [_loss(groups), _communication(groups)]
    if sum(len(group.runs) for group in groups) > 1:
        found += [_intervals(groups), _measured(groups)]
    return [one for one in found if one is not None]


def _curves(
    groups: Sequence[Group],
    along: Axis,
    value: Callable[[Round], float | None],
    words: str,
    *,
    logs: bool = False,
    held: bool = False,
) -> list[dict[str, Any]]:
    """With `logs` mean and spread are those of the logarithms: what is drawn on such a scale can't fall below zero."""
    unit = _unit(groups, along)
    found: list[dict[str, Any]] = []
    for group in groups:
        each = [[(x / unit[0], y) for x, y in points(run, along, value) if y > 0 or not logs] for run in group.runs]
        each = [[(0.0, one[0][1]), *one] if held else one for one in each if one]
        curve = band_of_logs(each) if logs else band(each, held=held)
        if curve.x:
            hover = f"{words} %{{y:.4g}}<br>{unit[1]} %{{x:,.4~g}}<extra>%{{fullData.name}}</extra>"
            found += band_traces(
                group.label, curve, group.colour, hover, len(each), **_stroke(group, groups, held=held)
            )
    return found


def _stroke(group: Group, groups: Sequence[Group], *, held: bool = False) -> dict[str, Any]:
    """More groups than colours are told apart by their strokes; their bands would cover one another."""
    line = {"dash": group.stroke} if group.stroke else {}
    return {"line": {**line, "shape": "vh"} if held else line, "banded": len(groups) <= COLOURS}


def _unit(groups: Sequence[Group], along: Axis) -> tuple[float, str]:
    if along.name != "wall-clock":
        return 1.0, along.title
    ends = [found[-1] for group in groups for run in group.runs if (found := along.of(run))]
    seconds, name = wall_clock(max(ends, default=0.0))
    return seconds, f"{name} since the first step"


def _loss(groups: Sequence[Group]) -> Chart | None:
    variants: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = []
    runs = [run for group in groups for run in group.runs]
    for along in AXES:
        curves = _curves(groups, along, lambda one: one.loss, "loss")
        if len(runs) == 1:
            curves = [*_each_replica(runs[0], along, _unit(groups, along)[0]), *curves]
        layout = {"xaxis": axis(_unit(groups, along)[1]), "yaxis": axis("Training loss of the interval")}
        variants.append((along.name, curves, layout))
    several = any(len(group.runs) > 1 for group in groups)
    note = "Mean over the replicas that were averaged, and over the steps of each interval"
    if several:
        spread = ", with one standard deviation to both sides" if len(groups) <= COLOURS else ""
        note += f"; of several seeds their mean{spread}"
    note += "."
    span = _after_the_fall(variants)
    for _, _, layout in variants if span else ():
        layout["yaxis"]["range"] = span
    note += _SCALE if span else ""
    return chart("loss", "Loss", variants, note=note, height=400, axis_switch="against")


def _after_the_fall(variants: Sequence[tuple[str, list[dict[str, Any]], dict[str, Any]]]) -> list[float] | None:
    """The range of the losses behind the first tenth of the steps, where the fall before would hide what is in it."""
    curves = next((curves for name, curves, _ in variants if name == "steps"), [])
    rest = [
        y
        for curve in curves
        for x, y in zip(curve["x"], curve["y"], strict=True)
        if x > _FALL * curve["x"][-1] and y is not None
    ]
    every = [y for curve in curves for y in curve["y"] if y is not None]
    if max((len(curve["x"]) for curve in curves), default=0) < _FEW or not rest:
        return None
    low, high = min(rest), max(rest)
    if high - low > 0.8 * (max(every) - min(every)) or high == low:
        return None
    room = 0.04 * (high - low)
    return [low - room, high + room]


def _each_replica(run: Run, along: Axis, unit: float) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if len(run.ids) > 16:
        return found
    for index, replica in enumerate(run.ids):
        own = points(run, along, lambda one, replica=replica: one.of(replica, "loss"))
        more = {"legendgroup": "each", "showlegend": index == 0, "width": 1, "hoverinfo": "skip"}
        found.append(line("each replica", [x / unit for x, _ in own], [y for _, y in own], "@muted/0.45", **more))
    return found


def _communication(groups: Sequence[Group]) -> Chart | None:
    adaptive = [group for group in groups if group.first.policy != "ddp"]  # one in every step would hide the others
    rounds = _curves(adaptive, AXES[0], lambda one: float(one.round + 1), "round")
    layout = {"xaxis": axis("Inner steps of each replica"), "yaxis": axis("Rounds so far", rangemode="tozero")}
    variants = [("rounds", [*rounds, *_at_fixed(groups, None)], layout)]
    sent: list[dict[str, Any]] = []
    for group in adaptive:
        each = [list(zip(AXES[0].of(run) or [], AXES[4].of(run) or [], strict=False)) for run in group.runs]
        each = [one for one in each if one]
        curve = band(each)
        if curve.x:
            hover = "%{y:.4g} MB sent<br>after %{x:,} steps<extra>%{fullData.name}</extra>"
            sent += band_traces(group.label, curve, group.colour, hover, len(each), **_stroke(group, groups))
    if sent:
        layout = {
            "xaxis": axis("Inner steps of each replica"),
            "yaxis": axis("MB sent so far, all replicas together", rangemode="tozero"),
        }
        variants.append(("bytes", [*sent, *_at_fixed(groups, bytes_of)], layout))
    note = "How often the replicas had exchanged by then."
    note += " The dashed line is a fixed interval of the base horizon." if _at_fixed(groups, None) else ""
    return chart("communication", "Communication", variants, note=note, axis_switch="in")


def _at_fixed(groups: Sequence[Group], spent: Callable[[Run], Any] | None) -> list[dict[str, Any]]:
    """A fixed interval as a dashed line, unless such a run is among those that are shown."""
    run = next((group.first for group in groups if group.first.rounds and group.first.base_horizon), None)
    if run is None or any(group.first.policy == "fixed" for group in groups):
        return []
    base = run.base_horizon or 1
    value = fixed_intervals(run.position, base)
    if spent is not None:
        found = spent(run)
        if found is None:
            return []
        value = found.sent / 1e6 / len(run.rounds) * value
    dashed = {"line": {"dash": "dash"}, "hovertemplate": "%{y:.4g}<extra>fixed interval</extra>"}
    return [line(f"fixed interval of {base}", [0, run.position], [0.0, value], "@muted", **dashed)]


def _intervals(groups: Sequence[Group]) -> Chart | None:
    curves = _curves(groups, AXES[0], lambda one: float(one.steps), "interval of", held=True)
    layout = {"xaxis": axis("Inner steps of each replica"), "yaxis": axis("Interval (steps)", rangemode="tozero")}
    note = "Inner steps that were taken between two exchanges"
    if len(groups) <= COLOURS and any(len(group.runs) > 1 for group in groups):
        note += "; of several seeds their mean, with one standard deviation, at most the seeds' range, to both sides"
    return chart("intervals", "Intervals", [("", curves, layout)], note=f"{note}.")


def _measured(groups: Sequence[Group]) -> Chart | None:
    variants: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = []
    for name, title, kind in (("drift", "Drift D", "log"), ("coherence", "Coherence C", "linear")):
        curves = _curves(groups, AXES[0], lambda one, name=name: one.numbers.get(name), name, logs=kind == "log")
        heights = [y for curve in curves for y in curve["y"]]
        scale = log_axis(heights) if kind == "log" else {}
        layout = {"xaxis": axis("Inner steps of each replica"), "yaxis": axis(title, **scale)}
        variants.append((name, curves, layout))
    note = (
        "Drift: mean squared norm of the replicas' pseudo-gradients. Coherence: 0 to the number of replicas; the "
        "higher, the more they agree."
    )
    return chart("measured", "Drift and coherence", variants, note=note, axis_switch="show")
