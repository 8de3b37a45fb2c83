"""`doctor`: what a store really does, what that means for a run, and how long a round will take there.

Invariant: leaves nothing behind in the store, and says no without fail where a round wouldn't be safe.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer_replication.collective.object_store.costs import (
    Link,
    encoded_sizes,
    plain_layout,
    round_seconds,
    round_shares,
)
from composer_replication.errors import StoreError
from composer_replication.readable import amount, byte_count, duration
from composer_replication.store import LocalStore, open_store
from composer_replication.store.probe import Effort, Probe, probe_store

__all__ = ["doctor", "parse_count", "parse_size"]

_SCALES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}


def doctor(
    uri: str,
    *,
    parameters: str | None,
    replicas: int,
    codec: str,
    largest: str | None,
    blobs_only: bool,
    as_json: bool,
) -> int:
    elements = parse_count("--parameters", parameters) if parameters is not None else None
    if replicas < 1:
        raise ValueError(f"--replicas must be at least 1, not {replicas}")
    effort = _effort(uri, largest)
    new = _is_new(uri)
    store = open_store(uri)  # a wrong URI is found out before anything is said
    folder = store.root if isinstance(store, LocalStore) else None
    if not as_json:
        print(f"{uri}: trying it with small objects and one of {byte_count(effort.max_bytes)}; takes a minute or less")

    def say(text: str) -> None:
        if not as_json or sys.stderr.isatty():
            print(f"  {text} ...", file=sys.stderr, flush=True)

    try:
        found = probe_store(lambda: open_store(uri), effort=effort, blobs_only=blobs_only, say=say)
    finally:
        if new and folder is not None:
            _remove_empty(folder)
    fit = all(finding.verdict != "fails" for finding in found.findings)
    expected = _expected(found, elements, replicas, codec) if elements is not None else None
    if as_json:
        print(json.dumps({"store": uri, "fit": fit, **_plain(found), "expected": expected}))
    else:
        _show(found, cached=folder is not None)
        if expected is not None:
            _show_expected(expected)
        use = "hold a run's blobs, with control= for the rest" if blobs_only else "hold a run"
        print(f"\nthis store can {use}" if fit else f"\nthis store can NOT {use}")
    return 0 if fit else 1


def _is_new(uri: str) -> bool:
    """A folder that isn't there before we open it."""
    try:
        open_store(uri, create=False)
    except StoreError:
        return True
    return False


def _remove_empty(folder: Path) -> None:
    """A folder that was made for the probe, unless somebody has put something into it meanwhile."""
    with suppress(OSError):
        for path, _, _ in os.walk(folder, topdown=False):
            os.rmdir(path)


def _effort(uri: str, largest: str | None) -> Effort:
    most = Effort().max_bytes if largest is None else parse_size("--largest", largest)
    if most < 64 * 1024:
        raise ValueError(f"--largest must be at least 64k, not {largest}")
    if uri.lower().startswith("hf://"):  # each write is a commit there, of which only so many an hour are allowed
        return Effort(writers=3, contests=1, repeats=2, max_bytes=min(most, 8 * 1024 * 1024))
    return Effort(max_bytes=most)


def parse_count(name: str, text: str) -> int:
    """'1.3B' -> 1300000000."""
    return _parse(name, text, "1.3B, 350M or 124000000")


def parse_size(name: str, text: str) -> int:
    """'32MB' -> 32000000."""
    stripped = text.strip()
    bare = stripped[:-1] if stripped[-1:].lower() == "b" and stripped[-2:-1].isalpha() else stripped
    return _parse(name, bare, "32MB or 1GB")


def _parse(name: str, text: str, example: str) -> int:
    plain = text.strip().lower()
    unit = plain[-1:] if plain[-1:].isalpha() else ""
    try:
        value = float(plain.removesuffix(unit)) * _SCALES[unit]
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"{name} must be a number like {example}, not {text!r}") from None
    if not 1 <= value < 1e16:
        raise ValueError(f"{name} must be a number like {example}, not {text!r}")
    return round(value)


def _expected(found: Probe, elements: int, replicas: int, codec: str) -> dict[str, Any]:
    sizes = encoded_sizes(codec, plain_layout(elements))
    shares = round_shares(replicas, sizes)
    link = Link(up=found.up, down=found.down, request_seconds=found.latency_seconds["read"])
    slowest = max(shares, key=lambda share: round_seconds(share, link, sum(sizes)))
    return {
        "parameters": elements,
        "replicas": replicas,
        "codec": codec,
        "mode": "direct" if slowest.direct else "sharded",
        "payload_bytes": sum(sizes),
        "up_bytes": slowest.up_bytes,
        "down_bytes": slowest.down_bytes,
        "requests": slowest.puts + slowest.gets,
        "seconds": round_seconds(slowest, link, sum(sizes)),
    }


def _show(found: Probe, *, cached: bool) -> None:
    rows = [(f.verdict, f.name, f.seen, f.means) for f in found.findings]
    latency = ", ".join(f"{kind} {1000 * seconds:.0f} ms" for kind, seconds in found.latency_seconds.items())
    rows.append(("ok", "latency", latency, "a round makes about eight such requests one after another"))
    for speed in found.speeds:
        what = byte_count(speed.size_bytes) + (f", {speed.parallel} at once" if speed.parallel > 1 else "")
        seen = f"{what}: {byte_count(speed.up)}/s up, {byte_count(speed.down)}/s down"
        means = _speed_means(speed.size_bytes, speed.parallel)
        rows.append(("ok", "speed", seen, f"{means}; read from this machine's cache" if cached else means))
    _table(rows)


def _speed_means(size: int, parallel: int) -> str:
    if parallel > 1:
        return "rounds move several chunks at once"
    return "small objects: latency counts" if size < 1_000_000 else "a chunk is 4 MB (int8) to 16 MB (float32)"


def _table(rows: list[tuple[str, str, str, str]]) -> None:
    columns = ("", "what", "seen", "for a run")
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        for row in (columns, *rows):
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, (5, 18, 40, 0), strict=True)).rstrip())
        return
    colours = {"ok": "green", "note": "yellow", "fails": "bold red"}
    table = Table(show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=name in ("", "what"))
    for verdict, *cells in rows:
        table.add_row(Text(verdict, style=colours[verdict]), *(Text(cell) for cell in cells))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)


def _show_expected(expected: Mapping[str, Any]) -> None:
    what = f"{amount(expected['parameters'])} parameters, {expected['replicas']} replicas, {expected['codec']}"
    up, down = byte_count(expected["up_bytes"]), byte_count(expected["down_bytes"])
    print(f"\na round of {what}: about {duration(expected['seconds'])}")
    print(f"({expected['mode']}; each sends {up} and receives {down} in some {expected['requests']} requests; if all")
    print("have a link like this one, without waiting for the slowest and without arithmetic)")


def _plain(found: Probe) -> dict[str, Any]:
    return {
        "findings": [asdict(finding) for finding in found.findings],
        "latency_seconds": found.latency_seconds,
        "speeds": [asdict(speed) for speed in found.speeds],
        "clock_offset_seconds": found.clock_offset_seconds,
    }
