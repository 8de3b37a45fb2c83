"""The page: everything that it shows as one JSON value, and the HTML around it.

Invariant: one file with nothing to load. Text that came with a run is never markup: it is put into the page as text,
and the JSON has no "<" in it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from composer_replication import __version__
from composer_replication.report.apart import about_size, about_task, steps_words
from composer_replication.report.compare import compare_charts
from composer_replication.report.detail import detail_charts
from composer_replication.report.facts import facts_of
from composer_replication.report.groups import Group, focus_of, group_runs
from composer_replication.report.measures import diverged, since
from composer_replication.report.runs import Run
from composer_replication.report.tables import comparison, rounds_table, settings_table

__all__ = ["MissingPlotly", "page", "payload"]

GENERATOR = f"composer-replication {__version__}"


class MissingPlotly(ValueError):
    """The extra `report` isn't installed."""


def payload(
    runs: Sequence[Run], *, notices: Sequence[str] = (), live: Mapping[str, Any] | None = None, written: str = ""
) -> dict[str, Any]:
    """What the page shows. `notices` are about the whole, `live` about a run that goes on, `written` is a date."""
    groups, said = group_runs(runs)
    shown = [run for group in groups for run in group.runs]
    segments = max(300, 9000 // max(3, len(shown)))
    return {
        "title": _title(shown),
        "subtitle": _subtitle(shown),
        "generator": GENERATOR,
        "written": written,
        "notices": [*notices, *about_size(groups), *about_task(groups), *said, *_notices(runs)],
        "live": dict(live) if live is not None else None,
        "focus": focus_of(groups),
        "groups": [
            {
                "label": group.label,
                "colour": group.colour,
                "runs": len(group.runs),
                "facts": facts_of(group, groups),
            }
            for group in groups
        ],
        "charts": compare_charts(groups),
        "comparison": comparison(groups) if len(shown) > 1 else None,
        "runs": [
            {
                "label": label,
                "group": index,
                "charts": detail_charts(run, segments=segments),
                "rounds": rounds_table(run),
            }
            for index, group in enumerate(groups)
            for run, label in zip(group.runs, _run_labels(group, len(shown)), strict=True)
        ],
        "settings": settings_table(groups),
        "sources": list(dict.fromkeys(run.source for run in shown)),
    }


def _title(runs: Sequence[Run]) -> str:
    names = list(dict.fromkeys(run.name for run in runs))
    if not names:
        return "No run"
    return " and ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} others"


def _subtitle(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    first = runs[0]
    parts = [f"{len(runs)} runs"] if len(runs) > 1 else []
    if len({run.replicas for run in runs}) == 1 and first.replicas:
        parts.append(f"{first.replicas} replicas")
    if len({(run.position, run.steps) for run in runs}) == 1:
        parts.append(f"{steps_words(first)} steps each")
    if len(codecs := {run.codec for run in runs}) == 1 and first.codec:
        parts.append(f"pseudo-gradients as {codecs.pop()}")
    if first.elements and len({run.elements for run in runs}) == 1:
        parts.append(f"{first.elements:,} parameters")
    return ", ".join(parts)


def _run_labels(group: Group, count: int) -> list[str]:
    """No two alike: where the seeds are, it is said where each was read."""
    if count == 1:
        return [group.first.name]
    found = [f"{group.label}, {run.name if run.seed is None else f'seed {run.seed}'}" for run in group.runs]
    return [
        f"{one} ({run.source})" if found.count(one) > 1 else one for one, run in zip(found, group.runs, strict=True)
    ]


def _notices(runs: Sequence[Run]) -> list[str]:
    named = len(runs) > 1
    said = [(run, text) for run in runs for text in (*_divergence(run), *run.notices)]
    return [f"{_where(run) if named else run.name}: {text}" for run, text in said]


def _divergence(run: Run) -> list[str]:
    one = diverged(run)
    return [] if one is None else [f"it diverged: its losses are not finite from {since(one)} on"]


def _where(run: Run) -> str:
    seed = f", seed {run.seed}" if run.seed is not None else ""
    return f"{run.name}{seed} ({run.source})"


def page(values: Mapping[str, Any], *, poll_seconds: float | None = None) -> str:
    """The HTML. With `poll_seconds` it asks its server for news that often."""
    settings = {"poll_seconds": poll_seconds}
    scripts = [_plotly(), _asset("page.js")]
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    connect = "'self'" if poll_seconds is not None else "'none'"
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    blocks = "\n".join(f"<script>{script}</script>" for script in scripts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="{GENERATOR}">
<title>composer-replication report</title>
<link rel="icon" href="data:,">
<style>{_asset("page.css")}</style>
</head>
<body>
<main id="page"><noscript><p>This page draws its charts with JavaScript that it brings with it.</p></noscript></main>
<script type="application/json" id="settings">{for_script(settings)}</script>
<script type="application/json" id="values">{for_script(values)}</script>
{blocks}
</body>
</html>
"""


def for_script(values: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element, or begins another."""
    return json.dumps(values, allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    found = resources.files("composer_replication.report") / "assets" / name
    return found.read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingPlotly("the report needs plotly: pip install 'composer-replication[report]'") from error
    return get_plotlyjs()
