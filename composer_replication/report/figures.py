"""The pieces of a chart, as plotly's plain JSON.

Invariant: a figure names colours by their place in the page's theme (`@c0`, `@muted/0.2`), so that it looks right in
light and dark; and no text in it is markup, wherever it came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from composer_replication.report.series import Curve

__all__ = ["axis", "band_traces", "chart", "line", "log_axis", "marks", "safe", "wall_clock"]

Trace = dict[str, Any]


def safe(text: str) -> str:
    """Plotly reads a little markup in names and hover texts: none of it is ours."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def chart(
    name: str,
    title: str,
    variants: Sequence[tuple[str, list[Trace], dict[str, Any]]],
    *,
    note: str = "",
    height: int = 360,
    axis_switch: str = "",
) -> dict[str, Any] | None:
    """A chart with one or several (name, traces, layout) to switch between; None where there is nothing to draw."""
    drawn = [(label, data, layout) for label, data, layout in variants if any(_has_points(trace) for trace in data)]
    if not drawn:
        return None
    return {
        "id": name,
        "title": title,
        "note": note,
        "height": height,
        "switch": axis_switch,
        "variants": [{"name": label, "data": data, "layout": _layout(layout)} for label, data, layout in drawn],
    }


def _has_points(trace: Trace) -> bool:
    return any(value is not None for value in trace.get("x") or ()) and bool(trace.get("y"))


def _layout(own: dict[str, Any]) -> dict[str, Any]:
    """`uirevision` keeps a reader's zoom and hidden curves while a live page gets new data."""
    return {"uirevision": "kept", "hovermode": "closest", "showlegend": True, **own}


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": safe(title)}, "automargin": True, **more}


def log_axis(values: Sequence[float | None]) -> dict[str, Any]:
    """A logarithmic scale, if the values spread over it: within one power of ten it has too few marks."""
    known = [value for value in values if value is not None and value > 0]
    if not known or max(known) < 10 * min(known):
        return {}
    return {"type": "log", "dtick": 1, "exponentformat": "e"}


def line(name: str, x: Sequence[float], y: Sequence[float | None], colour: str, **more: Any) -> Trace:
    width = more.pop("width", 2)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": safe(name),
        "x": list(x),
        "y": list(y),
        "line": {"color": colour, "width": width, **more.pop("line", {})},
        **more,
    }


def marks(
    name: str, x: Sequence[float], y: Sequence[float], colour: str, symbol: str, *, size: int = 9, **more: Any
) -> Trace:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": safe(name),
        "x": list(x),
        "y": list(y),
        "marker": {"color": colour, "symbol": symbol, "size": size, "line": {"width": 1, "color": "@surface"}},
        **more,
    }


def band_traces(
    name: str, curve: Curve, colour: int, hover: str, count: int = 1, *, banded: bool = True, **more: Any
) -> list[Trace]:
    """A mean, with its band behind it if it is one of several; not so if it isn't to be `banded`."""
    own = f"@c{colour}"
    found: list[Trace] = []
    if banded and curve.low is not None and curve.high is not None:
        edge = {"showlegend": False, "hoverinfo": "skip", "legendgroup": safe(name), "width": 0, **more}
        found.append(line(f"{name} low", curve.x, curve.low, own, **dict(edge)))
        filled = {"fill": "tonexty", "fillcolor": f"{own}/0.18", **edge}
        found.append(line(f"{name} high", curve.x, curve.high, own, **filled))
        name = f"{name} (mean of {count} ± sd)"
    elif count > 1:
        name = f"{name} (mean of {count})"
    legend = found[0]["legendgroup"] if found else safe(name)
    found.append(line(name, curve.x, curve.y, own, hovertemplate=hover, legendgroup=legend, **more))
    return found


def wall_clock(longest: float) -> tuple[float, str]:
    """(seconds of the unit, its name) for an axis that reaches so many seconds."""
    for seconds, name in ((3600.0, "Hours"), (60.0, "Minutes")):
        if longest >= 3 * seconds:
            return seconds, name
    return 1.0, "Seconds"
