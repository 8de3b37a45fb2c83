"""`status`: how a run stands, read from its store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from composer_replication.cli.job_table import job_lines, job_rows
from composer_replication.cli.live import Row, Screen, lines
from composer_replication.cli.view import RunReader, shows_life
from composer_replication.collective.object_store.place import open_run
from composer_replication.collective.object_store.wire import for_people
from composer_replication.errors import RecipeError, StoreError
from composer_replication.recipe import load_recipe
from composer_replication.store import ObjectStore

__all__ = ["open_place", "place_of", "status"]


_LATELY = 20  # rounds
_LATE_SECONDS = 1.0  # less is nothing to tell


def status(
    uri: str,
    *,
    control: str | None = None,
    signing_key_file: str | None = None,
    watch: bool,
    as_json: bool,
    every_seconds: float,
    ask: bool = False,
    web: bool = False,
    port: int | None = None,
) -> int:
    if not every_seconds > 0:
        raise ValueError(f"--every must be more than 0, not {every_seconds:g}")
    _check_web(web, port, watch=watch, as_json=as_json)
    reader = RunReader(open_place(uri, control=control, signing_key_file=signing_key_file))
    if web:
        from composer_replication.cli.report_live import serve_live

        return serve_live(reader, uri, port=port or 0, every_seconds=every_seconds)
    reader.refresh()
    uri = place_of(uri)
    jobs = job_rows(uri, ask=ask)
    if reader.fleet is None and not watch and not jobs:
        raise StoreError(
            f"there is no run in {reader.store.uri} (no fleet.json): is that the run's store? One that has a second "
            "store keeps its fleet.json there: name that as well (--control)"
        )
    told = ""
    with Screen(plain=as_json or not watch) as screen:
        while True:
            view = reader.view("")
            view = replace(view, title=_title(reader, view.rows))
            if as_json:
                print(for_people({**_plain(reader), "jobs": jobs}).decode("ascii"), flush=True)
            elif watch:
                screen.show(view)
                if jobs and (text := "\n".join(job_lines(jobs, ages=False))) != told:
                    screen.say(text)
                    told = text
            else:
                shown = lines(view) if reader.fleet is not None else [view.title]
                print("\n".join([*shown, *_came_last(reader), *(["", *job_lines(jobs)] if jobs else [])]))
            if not watch or reader.ended:
                return 0
            time.sleep(every_seconds)
            reader.refresh()
            jobs = job_rows(uri, ask=ask)


def _check_web(web: bool, port: int | None, *, watch: bool, as_json: bool) -> None:
    if web and (as_json or not watch):
        raise ValueError("--web goes with --watch, and without --json")
    if port is not None and not web:
        raise ValueError("--port goes with --watch --web")
    if port is not None and not 0 <= port <= 65535:
        raise ValueError(f"--port must be between 0 and 65535, not {port}")


def open_place(uri: str, *, control: str | None, signing_key_file: str | None) -> ObjectStore:
    """The run at `place_of(uri)`. Of a run's folder on this machine the recipe says what isn't given: the second store,
    and the file of the signing key."""
    recipe = Path(uri) / "recipe.yaml"
    if "://" not in uri and recipe.is_file() and (control is None or signing_key_file is None):
        with suppress(RecipeError):  # it may be another machine's
            section = load_recipe(recipe).store
            control, signing_key_file = control or section.control, signing_key_file or section.signing_key_file
    return open_run(place_of(uri), control=control, create=False, signing_key=signing_key_file)


def place_of(uri: str) -> str:
    """The store's URI: `uri` itself, or that of the run whose folder on this machine it is."""
    if "://" not in uri and (Path(uri) / "store" / "fleet.json").is_file():
        return str(Path(uri) / "store")
    if "://" not in uri and (Path(uri) / "recipe.yaml").is_file():
        return load_recipe(Path(uri) / "recipe.yaml").store.uri or str(Path(uri) / "store")
    return uri


def _came_last(reader: RunReader) -> list[str]:
    """One line on who has kept the others waiting lately."""
    latest = [one for one in reader.stragglers[-_LATELY:] if one.seconds >= _LATE_SECONDS]
    parts: list[str] = []
    for replica in sorted({one.replica for one in latest}):
        seconds = [one.seconds for one in latest if one.replica == replica]
        parts.append(f"replica {replica} in {len(seconds)} (up to {max(seconds):.1f} s)")
    return [f"kept the others waiting in the last {_LATELY} rounds: {', '.join(parts)}"] if parts else []


def _title(reader: RunReader, rows: Sequence[Row]) -> str:
    if reader.fleet is None:
        return f"{reader.store.uri}: no run yet"
    what = "ended" if reader.ended else reader.trouble or "open"
    if not reader.ended and shows_life(rows) is False:
        what += "; not ended, and no replica shows life"
    return f"{reader.store.uri}: {len(reader.rounds)} rounds closed, {what}"


def _plain(reader: RunReader) -> dict[str, object]:
    view = reader.view("")
    last = reader.rounds[-1] if reader.rounds else None
    return {
        "store": reader.store.uri,
        "round": len(reader.rounds),
        "step": last.position if last is not None else 0,
        "ended": reader.ended,
        "trouble": reader.trouble,
        "stragglers": [asdict(one) for one in reader.stragglers],
        "replicas": [asdict(row) for row in view.rows],
    }
