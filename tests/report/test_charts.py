"""The charts: what plotly takes, and what is on them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from composer_replication.report import payload, run_from_json
from composer_replication.report.compare import compare_charts
from composer_replication.report.detail import ACTIONS, ASSESSMENTS, detail_charts
from composer_replication.report.groups import group_runs
from composer_replication.report.series import AXES, band, band_of_logs, points, thinned
from tests.report.samples import run_json


def loaded(**more: Any) -> Any:
    return run_from_json(run_json(**more), source="s")


def plain(value: Any) -> Any:
    """With a colour where the page's theme puts one."""
    if isinstance(value, str) and value.startswith("@"):
        return "rgba(1,2,3,0.5)"
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list) else value


def test_plotly_takes_every_chart() -> None:
    from plotly.graph_objects import Figure

    values = payload([loaded(seed=1), loaded(seed=2), loaded(policy="fixed"), loaded(policy="ddp", rounds=[])])
    charts = [*values["charts"], *(chart for run in values["runs"] for chart in run["charts"])]
    names = {chart["id"] for chart in charts}
    assert names == {
        *("loss", "communication", "intervals", "measured"),
        *("decisions", "signals", "outer", "shares", "bytes", "timeline"),
    }
    for chart in charts:
        for variant in chart["variants"]:
            Figure(data=plain(variant["data"]), layout=plain(variant["layout"]))  # raises over an unknown property


def test_loss_against_each_axis() -> None:
    run = loaded()
    first = {along.name: points(run, along, lambda one: one.loss)[0][0] for along in AXES}
    # A round takes 10 s for both: 9 of training and the wait, 1 of exchange.
    assert first == {"steps": 10, "tokens": 1000, "wall-clock": 10.0, "rounds": 1, "bytes": pytest.approx(0.002)}
    assert points(run, AXES[2], lambda one: one.loss)[-1] == (80.0, 1.0)
    loss = next(chart for chart in compare_charts(group_runs([run])[0]) if chart["id"] == "loss")
    assert [variant["name"] for variant in loss["variants"]] == [along.name for along in AXES]


def test_every_decision_is_named() -> None:
    values = run_json()
    told = [
        ("", "keep"),
        ("supporting", "grow"),
        ("consistent", "confirm"),
        ("supporting", "adopt"),
        ("severe", "reject"),
    ]
    told += [("moderate", "reduce"), ("severe", "fallback"), ("severe", "re-estimate")]
    for one, (assessment, action) in zip(values["rounds"], told, strict=True):
        one |= {"assessment": assessment, "action": action}
    assert {action for _, action in told} == set(ACTIONS)
    decisions = detail_charts(run_from_json(values, source="s"))[0]
    marks = [trace for trace in decisions["variants"][0]["data"] if trace["mode"] == "markers"]
    assert len(marks) == len(told) and len({trace["name"] for trace in marks}) == len(told)
    assert {trace["marker"]["color"] for trace in marks} == {"@muted", *ASSESSMENTS.values()}
    assert len({trace["marker"]["symbol"] for trace in marks}) == len(told)
    shown = json.dumps(marks, ensure_ascii=False)
    assert "decision: fallback (monitor)" in shown and "<b>round 6</b>" in shown


def test_a_timeline_shows_the_last_rounds_where_it_cannot_show_all() -> None:
    timeline = next(chart for chart in detail_charts(loaded(), segments=12) if chart["id"] == "timeline")
    training = timeline["variants"][0]["data"][0]
    assert "The last 2 of 8 rounds" in timeline["note"]
    assert training["base"] == [60.0, 60.0, 70.0, 70.0] and training["x"] == [6.0, 9.0, 6.0, 9.0]


def test_a_mean_and_its_band() -> None:
    curve = band([[(0, 1.0), (10, 3.0)], [(0, 2.0), (5, 2.0), (12, 9.0)]])
    assert curve.x == [0, 5, 10]  # none of the two is extended
    assert curve.y == pytest.approx([1.5, 2.0, 5.0])  # at 5: (2 + 2) / 2; at 10: (3 + 7) / 2
    assert curve.low is not None and curve.low[0] == pytest.approx(1.5 - 0.5**0.5)
    logs = band_of_logs([[(0, 1.0)], [(0, 100.0)]])
    assert logs.y == pytest.approx([10.0]) and logs.low is not None and logs.low[0] > 0
    assert band([[(1, 2.0)]]).low is None and band([]).x == []


def chart_of(runs: list[Any], name: str) -> dict[str, Any]:
    return next(chart for chart in payload(runs)["charts"] if chart["id"] == name)


def test_intervals_are_those_that_were_trained() -> None:
    """The last one was planned much longer than the run; and seeds are held apart in steps, not slopes."""
    one = run_json("qsr", seed=1, intervals=(10, 40, 50))
    one["rounds"][-1]["horizon"] = 2238
    two = run_json("qsr", seed=2, intervals=(20, 30, 50))
    drawn = chart_of([run_from_json(values, source="s") for values in (one, two)], "intervals")
    low, high, middle = drawn["variants"][0]["data"]
    assert middle["x"] == [0, 10, 20, 50, 100] and middle["y"] == [15, 15, 30, 35, 50]
    assert low["y"] == [10, 10, 20, 30, 50] and high["y"] == [20, 20, 40, 40, 50]  # sd of two is wider than they are
    assert middle["line"]["shape"] == "vh" and "that were taken" in drawn["note"]
    decisions = detail_charts(run_from_json(one, source="s"))[0]
    heights = [y for trace in decisions["variants"][0]["data"] for y in trace["y"]]
    assert max(heights) == 50


def test_losses_are_drawn_from_behind_their_fall_on() -> None:
    long = run_json(intervals=(4,) * 25, last_loss=1.0)
    for index, one in enumerate(long["rounds"]):
        for told in one["replicas"].values():
            told["loss"] = 5.0 - index if index < 2 else 2.0 - 0.04 * index
    drawn = chart_of([run_from_json(long, source="s")], "loss")
    room = 0.04 * (1.92 - 1.04)
    for variant in drawn["variants"]:
        assert variant["layout"]["yaxis"]["range"] == pytest.approx([1.04 - room, 1.92 + room])
    assert "losses after the first tenth of the steps; double-click" in drawn["note"]
    short = chart_of([loaded()], "loss")
    assert all("range" not in variant["layout"]["yaxis"] for variant in short["variants"])
    assert "double-click" not in short["note"]


def test_bars_of_bytes_stand_in_the_order_of_their_legend() -> None:
    drawn = next(chart for chart in detail_charts(loaded()) if chart["id"] == "bytes")["variants"][0]
    assert [trace["name"] for trace in drawn["data"]] == ["sent", "received"]
    axis = drawn["layout"]["yaxis"]  # from the top down, so that the first is above
    assert axis["autorange"] == "reversed" and axis["categoryarray"] == ["replica 0", "replica 1"]


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    kept = thinned([(float(i), 0.0) for i in range(10_001)])
    assert len(kept) <= 2001 and kept[-1][0] == 10_000


def test_settings_begin_with_what_differs() -> None:
    values = payload([loaded(seed=1), loaded(seed=2), loaded(policy="fixed", versions={"torch": "2"})])
    differs, same, versions = values["settings"]
    assert differs["columns"] == ["setting", "AutoLoCo", "Fixed interval of 10"]
    assert ["policy.name", "autoloco", "fixed"] in differs["rows"]
    assert ["policy.settings.growth_cap", "1.15", "–"] in differs["rows"]
    assert ["codec", "int8"] in same["rows"] and all(row[0] != "seed" for row in same["rows"])
    assert versions["rows"] == [["composer-replication", "0.1.0", "–"], ["torch", "–", "2"]]
    assert [table["title"] for table in payload([loaded()])["settings"]] == ["Settings", "Versions"]
