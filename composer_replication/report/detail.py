"""Charts of one run: what was decided and why, the outer step, and where each replica's time and bytes went.

Invariant: an assessment has the same colour, and a decision the same symbol, wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from composer_replication.readable import byte_count, duration
from composer_replication.report.figures import axis, chart, line, log_axis, marks, safe, wall_clock
from composer_replication.report.measures import bytes_of, late, times_of
from composer_replication.report.rounds import Round
from composer_replication.report.runs import Run
from composer_replication.report.series import thinned

__all__ = ["ACTIONS", "ASSESSMENTS", "detail_charts"]

Chart = dict[str, Any]

ASSESSMENTS = {"supporting": "@good", "consistent": "@plain", "moderate": "@warn", "severe": "@bad"}
ACTIONS = {  # symbol, in words
    "keep": ("circle", "kept"),
    "grow": ("triangle-up", "try longer"),
    "confirm": ("diamond", "confirm once more"),
    "adopt": ("star", "longer adopted"),
    "reject": ("x", "longer rejected"),
    "reduce": ("triangle-down", "shortened"),
    "fallback": ("hourglass", "back to the shortest"),
    "re-estimate": ("square", "measured anew"),
}
_SIZES = {"star": 14, "triangle-up": 12, "triangle-down": 12, "x": 10}  # that look alike
_STEPS = "Inner steps of each replica"
_MOST_ROWS = 64  # replicas in the timeline
_MOST_SEGMENTS = 3000  # of the timeline: some thousand rectangles are what a page draws at once


def detail_charts(run: Run, *, segments: int = _MOST_SEGMENTS) -> list[Chart]:
    """The charts that can be drawn from what was recorded."""
    if run.policy == "ddp":
        return []
    found = [_decisions(run), _measured(run), _outer(run), _shares(run), _bytes(run), _timeline(run, segments)]
    return [one for one in found if one is not None]


# -- decisions -------------------------------------------------------------------------------------------------------


def _decisions(run: Run) -> Chart | None:
    ends = [0, *(one.position for one in run.rounds)]
    lengths = [_interval(run, one) for one in run.rounds]
    traces = [
        line("interval", ends, [*lengths, *lengths[-1:]], "@muted", width=1.5, line={"shape": "hv"}, hoverinfo="skip")
    ]
    kinds: dict[tuple[str, str], list[Round]] = {}
    for one in run.rounds:
        kinds.setdefault((one.assessment, one.action if one.assessment else ""), []).append(one)
    order = ["", *ASSESSMENTS]
    for (assessment, action), found in sorted(kinds.items(), key=lambda item: _place(order, item[0][0])):
        symbol, words = ACTIONS.get(action, ("circle-open", action))
        name = f"{assessment}: {words}" if assessment else "not assessed"
        traces.append(
            marks(
                name,
                [one.position for one in found],
                [_interval(run, one) for one in found],
                ASSESSMENTS.get(assessment, "@muted"),
                symbol if assessment else "circle-open",
                size=_SIZES.get(symbol, 9) if assessment else 7,
                text=[_told(one) for one in found],
                hovertemplate="%{text}<extra></extra>",
            )
        )
    layout = {"xaxis": axis(_STEPS), "yaxis": axis("Interval (token-equivalent steps)", rangemode="tozero")}
    note = "Each mark is a round: its colour says how the interval was assessed, its shape what was decided."
    return chart("decisions", "Intervals and decisions", [("", traces, layout)], note=note, height=400)


def _interval(run: Run, one: Round) -> int:
    """What was planned; of the last one, which the end of the run cuts short, what was trained of it."""
    return min(one.horizon, one.steps) if run.steps and one.position >= run.steps else one.horizon


def _place(order: Sequence[str], name: str) -> int:
    return order.index(name) if name in order else len(order)


def _told(one: Round) -> str:
    words = [f"<b>round {one.round}</b>, {one.steps} steps, at step {one.position}"]
    if one.assessment:
        words.append(f"assessed as {safe(one.assessment)}")
    if one.action:
        words.append(f"decision: {safe(one.action)}" + (f" ({safe(one.phase)})" if one.phase else ""))
    if one.next_horizon is not None:
        words.append(f"next interval {one.next_horizon}")
    if one.loss is not None:
        words.append(f"loss {one.loss:.4f}")
    words += [f"without replica {replica}: {safe(why)[:120]}" for replica, why in list(one.absent.items())[:4]]
    return "<br>".join(words)


# -- what was measured, and the outer step ---------------------------------------------------------------------------


def _stack(
    run: Run, name: str, title: str, rows: Sequence[tuple[str, str, str]], note: str, height: int
) -> Chart | None:
    """One above the other, over the same steps. `rows` are (field, title, kind of axis)."""
    shown = [row for row in rows if any(row[0] in one.numbers for one in run.rounds)]
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"showlegend": False, "hovermode": "x unified"}
    for index, (field, words, kind) in enumerate(shown):
        number = "" if index == 0 else str(index + 1)
        along = thinned([(float(one.position), one.numbers[field]) for one in run.rounds if field in one.numbers])
        template = f"{words.split(' (')[0]} %{{y:.4g}}<extra></extra>"
        x, y = [x for x, _ in along], [y for _, y in along]
        traces.append(line(words, x, y, f"@c{index}", yaxis=f"y{number}", hovertemplate=template))
        room = 1 / len(shown)
        low, high = 1 - (index + 1) * room + (0.05 if index < len(shown) - 1 else 0.0), 1 - index * room - 0.02
        scale = log_axis(y) if kind == "log" else {}
        layout[f"yaxis{number}"] = axis(words, domain=[low, high], nticks=5, **scale)
    layout["xaxis"] = axis(_STEPS, anchor=f"y{len(shown)}" if len(shown) > 1 else "y")
    return chart(name, title, [("", traces, layout)], note=note, height=height)


def _measured(run: Run) -> Chart | None:
    rows = (("drift", "Drift D", "log"), ("coherence", "Coherence C", "linear"))
    note = (
        "Drift: mean squared norm of the pseudo-gradients, how far replicas move in an interval. Coherence: "
        f"0 to {run.replicas or 'the number of replicas'}; the higher, the more they agree on the direction."
    )
    return _stack(run, "signals", "What the policy sees", rows, note, 420)


def _outer(run: Run) -> Chart | None:
    rows = (("rho", "ρ", "linear"), ("momentum", "Momentum μ", "linear"), ("outer_lr", "Outer step η", "linear"))
    note = "ρ: learning-rate mass of the interval over that of a base interval. μ and η follow from it."
    return _stack(run, "outer", "The outer step", rows, note, 480)


# -- time ------------------------------------------------------------------------------------------------------------

_MEASURED = (
    "Of {} rounds, from the first step on: training (validation and checkpoints between two steps count), waiting for "
    "others, exchange (encoding, transfers, averaging). Starting, and what follows the last round, are not in it."
)
_WORKED_OUT = "As simulate worked it out for given machines; waiting is also what was trained in vain, and being gone."
_SPENT = (("training", "@c0"), ("waiting", "@c4"), ("exchange", "@c2"))


def _rows(count: int) -> int:
    return max(220, 120 + 34 * min(count, 24))


def _replica_axis(ids: Sequence[int]) -> dict[str, Any]:
    names = [f"replica {replica}" for replica in ids]
    return axis("", type="category", categoryorder="array", categoryarray=names[::-1], ticksuffix="  ")


def _shares(run: Run) -> Chart | None:
    times = times_of(run)
    if times is None:
        return None
    traces: list[dict[str, Any]] = []
    names = [f"replica {replica}" for replica in times.by_replica]
    for index, (what, colour) in enumerate(_SPENT):
        parts = [own[index] / sum(own) if sum(own) else 0.0 for own in times.by_replica.values()]
        texts = [
            f"{name}: {what} {duration(own[index])}, {share:.1%}"
            for name, own, share in zip(names, times.by_replica.values(), parts, strict=True)
        ]
        traces.append(
            _bar(
                what,
                names,
                [100 * share for share in parts],
                colour,
                text=[f"{s:.0%}" if s >= 0.06 else "" for s in parts],
            )
        )
        traces[-1] |= {"hovertext": texts, "hovertemplate": "%{hovertext}<extra></extra>"}
    layout = {
        "barmode": "stack",
        "uniformtext": {"minsize": 12, "mode": "hide"},
        "xaxis": axis("Share of the replica's time", ticksuffix=" %", range=[0, 100], dtick=25),
        "yaxis": _replica_axis(list(times.by_replica)),
    }
    what = _MEASURED if times.measured else _WORKED_OUT
    note = f"{what.format(times.rounds)} Utilisation is the share spent training."
    return chart(
        "shares", "Where each replica's time went", [("", traces, layout)], note=note, height=_rows(len(names))
    )


def _bar(name: str, y: Sequence[str], x: Sequence[float], colour: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(y),
        "x": list(x),
        "marker": {"color": colour},
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        **more,
    }


def _timeline(run: Run, segments: int) -> Chart | None:
    """The last rounds, as many as can be drawn."""
    ids = run.ids[:_MOST_ROWS]
    rounds = [one for one in run.rounds if one.seconds is not None]
    shown = rounds[-max(1, segments // (3 * max(1, len(ids)))) :]
    if not shown:
        return None
    lasts = [one.seconds or 0.0 for one in rounds]
    start = sum(lasts[: len(rounds) - len(shown)])
    unit, unit_name = wall_clock(sum(lasts))
    bars: dict[str, dict[str, list[Any]]] = {what: {"x": [], "y": [], "base": [], "text": []} for what, _ in _SPENT}
    for one in shown:
        came = late(one)
        for replica in ids:
            spent = one.spent.get(replica)
            at = start
            for (what, _), seconds in zip(_SPENT, spent or (), strict=False):
                own = bars[what]
                own["x"].append(seconds / unit)
                own["y"].append(f"replica {replica}")
                own["base"].append(at / unit)
                last = f"<br>last to come: replica {came[0]} ({duration(came[1])})" if came and came[1] > 0 else ""
                own["text"].append(f"round {one.round}, replica {replica}<br>{what} {duration(seconds)}{last}")
                at += seconds
        start += one.seconds or 0.0
    traces: list[dict[str, Any]] = []
    for what, colour in _SPENT:
        own = bars[what]
        bar = _bar(what, own["y"], own["x"], colour, base=own["base"], hovertext=own["text"], width=0.7)
        bar["marker"] = {"color": colour, "line": {"width": 0}}
        traces.append({**bar, "hovertemplate": "%{hovertext}<extra></extra>", "textposition": "none"})
    layout = {
        "barmode": "overlay",
        "xaxis": axis(f"{unit_name} since the first step"),
        "yaxis": _replica_axis(ids),
    }
    some = "" if len(ids) == len(run.ids) else f" The first {len(ids)} of {len(run.ids)} replicas."
    part = "" if len(shown) == len(rounds) else f" The last {len(shown)} of {len(rounds)} rounds."
    note = f"Round by round: who trained how long, and who had to wait.{part}{some} Times of one round begin together."
    return chart("timeline", "Timeline of the rounds", [("", traces, layout)], note=note, height=_rows(len(ids)) + 40)


# -- bytes -----------------------------------------------------------------------------------------------------------


def _bytes(run: Run) -> Chart | None:
    spent = bytes_of(run)
    if spent is None or not spent.measured:
        return None
    names = [f"replica {replica}" for replica in spent.by_replica]
    traces: list[dict[str, Any]] = []
    picks: tuple[tuple[str, str, Callable[[tuple[float, float | None]], float | None]], ...] = (
        ("sent", "@c0", lambda one: one[0]),
        ("received", "@c5", lambda one: one[1]),
    )
    for what, colour, pick in picks:
        values = [pick(one) for one in spent.by_replica.values()]
        if None in values:
            continue
        sizes = [value for value in values if value is not None]
        bar = _bar(what, names, [size / 1e6 for size in sizes], colour)
        hover = [f"{name}: {byte_count(size)} {what}" for name, size in zip(names, sizes, strict=True)]
        traces.append({**bar, "hovertext": hover, "hovertemplate": "%{hovertext}<extra></extra>"})
    layout = {
        "barmode": "group",
        "bargap": 0.35,
        "xaxis": axis("MB in the whole run", rangemode="tozero"),
        "yaxis": {**_replica_axis(list(spent.by_replica)[::-1]), "autorange": "reversed"},  # bars as in the legend
    }
    note = "Blobs: contributions and means. Pointers and heartbeats, some kilobytes a round, are not counted."
    return chart("bytes", "Bytes of each replica", [("", traces, layout)], note=note, height=_rows(len(names)) + 60)
