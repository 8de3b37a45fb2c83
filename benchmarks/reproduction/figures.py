"""The figures of docs/results.md, from the kept runs: SVG, the same bytes for the same runs and library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from benchmarks.reproduction.measures import Run, ends_at, losses_between
from benchmarks.reproduction.study import GROUPS, ROOT
from benchmarks.reproduction.tables import kept

__all__ = ["draw_all", "outdated"]

FOLDER = ROOT / "docs" / "results"
# Okabe and Ito's palette: told apart without red and green.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
# One colour a policy, in every figure; the subject is drawn last, and thicker.
_OF_POLICY = {
    "ddp": "#000000",
    "average": "#999999",
    "qsr": "#CC79A7",
    "linear": "#56B4E9",
    "staircase": "#009E73",
    "diloco": "#D55E00",
    "diloco-0.7": "#E69F00",
    "autoloco": "#0072B2",
}
_WIDTH = 200  # steps that a point of a loss curve stands for
_SHOWN = (1600, 3200)  # steps around the disturbances


def draw_all() -> Iterator[Path]:
    for name, figure in _figures():
        path = FOLDER / name
        # The same runs and library give the same bytes; another release of the library need not.
        metadata = {"Date": None, "Creator": None, "Description": _fingerprint(figure)}
        FigureCanvasSVG(figure).print_svg(str(path), metadata=metadata)
        yield path


def outdated() -> list[str]:
    """Names of the figures whose files don't show the kept runs; with any release of the drawing library."""
    found: list[str] = []
    for name, figure in _figures():
        path = FOLDER / name
        if not path.exists() or _fingerprint(figure) not in path.read_text(encoding="utf-8"):
            found.append(name)
    return found


def _figures() -> Iterator[tuple[str, Figure]]:
    matplotlib.rcParams["svg.hashsalt"] = "composer_replication"
    main, eight = kept("main"), kept("eight")
    if main:
        yield "losses.svg", _losses(main)
        yield "drift-coherence.svg", _statistics(main)
    if main or eight:
        yield "horizons.svg", _horizons(main, eight)
    spike, shift = kept("spike"), kept("shift")
    if spike or shift:
        yield "disturbed.svg", _disturbed(spike, shift)


def _fingerprint(figure: Figure) -> str:
    """Of all that is drawn: each curve's numbers, with what they are called."""
    drawn: list[Any] = []
    for axes in figure.axes:
        curves = [(line.get_label(), line.get_xydata()) for line in axes.lines]
        stairs = [(patch.get_label(), patch.get_path().vertices) for patch in axes.patches]
        words = [(label, [f"{value:.9g}" for value in np.asarray(points).flat]) for label, points in (*curves, *stairs)]
        drawn.append([axes.get_title(), words])
    return "sha256:" + hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


def _figure(rows: int, columns: int, height: float, **more: Any) -> tuple[Figure, Any]:
    figure = Figure(figsize=(8.0, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **more)
    for one in axes.flat:
        one.grid(alpha=0.25)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _style(name: str) -> dict[str, Any]:
    return {"color": _OF_POLICY[name], "linewidth": 1.8 if name == "autoloco" else 1.1}


def _curve(by_seed: Mapping[int, Run], reference: Mapping[int, Run] | None = None) -> tuple[list[float], list[float]]:
    """Mean over the seeds of the training loss, less the reference's of the same seed and steps."""
    seeds = sorted(set(by_seed) & set(reference) if reference is not None else set(by_seed))
    steps = by_seed[seeds[0]]["steps"]
    ends = list(range(_WIDTH, steps + 1, _WIDTH))
    values: list[float] = []
    for end in ends:
        own = [losses_between(by_seed[seed], end - _WIDTH, end) for seed in seeds]
        if reference is not None:
            own = [a - losses_between(reference[s], end - _WIDTH, end) for a, s in zip(own, seeds, strict=True)]
        values.append(mean(own))
    return [end - _WIDTH / 2 for end in ends], values


def _losses(main: Mapping[str, Mapping[int, Run]]) -> Figure:
    figure, axes = _figure(1, 2, 3.6)
    left, right = axes[0]
    base = main.get("diloco", {})
    for name in _OF_POLICY:
        if name not in main:
            continue
        left.plot(*_curve(main[name]), **_style(name), label=GROUPS["main"].variants[name].title)
        if base and name != "diloco":
            right.plot(*_curve(main[name], base), **_style(name))
    left.set_title("training loss (nats per byte), mean of the seeds", fontsize=10)
    left.set_ylim(1.5, 2.6)  # the first steps would leave no room for the rest
    right.set_title("against DiLoCo, momentum 0.9", fontsize=10)
    right.axhline(0.0, color=_OF_POLICY["diloco"], linewidth=1.0)
    for one in (left, right):
        one.set_xlabel("inner steps")
    _legend(figure, 3)
    return figure


def _legend(figure: Figure, columns: int) -> None:
    figure.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


def _stairs(axes: Any, run: Run, **style: Any) -> None:
    ends = [one["position"] for one in run["rounds"]]
    axes.stairs([one["steps"] for one in run["rounds"]], [0, *ends], baseline=None, **style)


def _horizons(main: Mapping[str, Mapping[int, Run]], eight: Mapping[str, Mapping[int, Run]]) -> Figure:
    figure, axes = _figure(1, 2, 3.0, sharey=True)
    for one, runs, words in zip(axes[0], (main, eight), ("four replicas", "eight replicas"), strict=True):
        for colour, (seed, run) in zip(COLOURS, sorted(runs.get("autoloco", {}).items()), strict=False):
            _stairs(one, run, color=colour, linewidth=1.2, label=f"seed {seed}")
        one.axhline(20, color="gray", linestyle="--", linewidth=0.8)
        one.set(title=f"AutoLoCo's interval, {words}", xlabel="inner steps", ylim=(0, None))
        one.title.set_fontsize(10)
        if runs.get("autoloco"):
            one.legend(fontsize=8, frameon=False)
    axes[0][0].set_ylabel("steps")
    return figure


def _statistics(main: Mapping[str, Mapping[int, Run]]) -> Figure:
    figure, axes = _figure(1, 2, 3.2)
    for name in ("average", "diloco", "diloco-0.7", "autoloco"):
        run = next(iter(main.get(name, {}).values()), None)
        if run is None:
            continue
        for one, field in zip(axes[0], ("drift", "coherence"), strict=True):
            points = ends_at(run, field)
            label = GROUPS["main"].variants[name].title if field == "drift" else None
            one.plot(*zip(*points, strict=True), **_style(name), label=label)
    axes[0][0].set_yscale("log")
    axes[0][0].set_title("drift D, mean squared displacement, seed 1", fontsize=10)
    axes[0][1].set_title("coherence C (1: unrelated, 4: identical), seed 1", fontsize=10)
    for one in axes[0]:
        one.set_xlabel("inner steps")
    _legend(figure, 2)
    return figure


def _disturbed(*groups: Mapping[str, Mapping[int, Run]]) -> Figure:
    figure, axes = _figure(2, 2, 5.0, sharex=True, height_ratios=(3, 2))
    labelled: set[str] = set()
    for column, (words, runs) in enumerate(zip(("learning rate × 10", "narrow data"), groups, strict=True)):
        for name, by_seed in runs.items():
            run = next(iter(by_seed.values()))
            title = GROUPS["main"].variants[name].title
            label = None if title in labelled else title
            labelled.add(title)
            points = [(one["position"], one["loss"]) for one in run["rounds"] if one["position"] >= _SHOWN[0]]
            axes[0][column].plot(*zip(*points, strict=True), **_style(name), label=label)
            _stairs(axes[1][column], run, **_style(name))
        axes[0][column].set_title(f"{words}, seed 1: training loss", fontsize=10)
        axes[1][column].set(xlabel="inner steps", xlim=_SHOWN, ylim=(0, None), xticks=range(1800, 3200, 400))
        axes[1][column].set_title("interval (steps)", fontsize=10)
    _legend(figure, 3)
    return figure
