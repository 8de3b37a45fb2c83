"""Runs from files: what `simulate -o` wrote, and `rounds.jsonl`, plain or compressed.

Invariant: a line that can't be read costs that line; its number is told, and the rest is given.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from composer_replication.report.runs import Run, run_from_json

__all__ = ["read_file"]


def read_file(path: Path) -> list[Run]:
    """The runs of a file of JSON lines. Raises OSError if it can't be opened, ValueError if no line is of a run."""
    runs: list[tuple[dict[str, Any], list[str]]] = []
    loose: list[Any] = []  # rounds that no run in this file announces
    problems: list[str] = []
    lines = 0
    for number, values in _objects(path, problems):
        lines += 1
        if _is_run(values):
            runs.append((values, []))
        elif "round" in values and runs and not isinstance(runs[-1][0].get("rounds"), list):
            runs[-1][0].setdefault("_lines", []).append(values)
        elif "round" in values:
            loose.append(values)
        else:
            problems.append(f"line {number} is neither a run nor a round")
    if loose:
        version = max((one["version"] for one in loose if isinstance(one.get("version"), int)), default=None)
        runs.insert(0, ({"version": version, "rounds": loose, "policy": _policy_of(loose)}, []))
    if not runs and problems and (whole := _whole_file(path)):
        runs, problems = [(one, []) for one in whole], []
    if not runs:
        if problems:
            raise ValueError(f"{path}: {problems[0]}{' (and more)' if len(problems) > 1 else ''}; no run could be read")
        raise ValueError(f"{path} is empty: no run in it yet")
    found: list[Run] = []
    for index, (values, said) in enumerate(runs):
        rounds = values.pop("_lines", None)
        if rounds is not None:
            values = {**values, "rounds": rounds}
        trouble = problems if index == len(runs) - 1 else []
        default = path.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".json")
        if default == "rounds" and path.parent.name:
            default = path.parent.name
        found.append(run_from_json(values, source=str(path), notices=[*said, *trouble], default=default))
    return found


def _whole_file(path: Path) -> list[dict[str, Any]]:
    """The runs of a file that is one JSON value over several lines."""
    try:
        values = json.loads("".join(line for _, line in _lines(path, [])))
    except (ValueError, RecursionError):
        return []
    return [one for one in (values if isinstance(values, list) else [values]) if _is_run(one)]


def _is_run(values: Any) -> bool:
    return isinstance(values, dict) and (isinstance(values.get("rounds"), list) or values.get("kind") == "run")


def _objects(path: Path, problems: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(path, problems):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            problems.append(f"line {number} isn't whole JSON (half written, or damaged), and is left out")
            continue
        if isinstance(values, dict):
            yield number, values
        else:
            problems.append(f"line {number} isn't a JSON object, and is left out")


def _lines(path: Path, problems: list[str]) -> Iterator[tuple[int, str]]:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        encoding = "utf-8-sig"  # of the first line: there may be a mark of the encoding before it
        stream = gzip.GzipFile(fileobj=raw) if packed else raw
        number = 0
        while True:
            try:
                line = stream.readline()
            except EOFError:
                problems.append(f"the file ends in the middle of its compressed data{_behind(number)}: copy it again")
                return
            except (zlib.error, gzip.BadGzipFile):
                problems.append(f"the file's compressed data is damaged{_behind(number)}: copy it again")
                return
            if not line:
                return
            number += 1
            yield number, line.decode(encoding, errors="replace")
            encoding = "utf-8"


def _behind(number: int) -> str:
    return f", after line {number}" if number else ", before its first line is whole"


def _policy_of(rounds: list[Any]) -> str:
    """Rounds alone don't name their policy; whether it adapted can be seen."""
    return "autoloco" if any(one.get("assessment") for one in rounds) else "unknown policy"
