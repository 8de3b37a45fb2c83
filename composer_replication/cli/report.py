"""`report`: runs from stores, folders and files, and one page about them.

Invariant: reads runs and changes nothing of them; a file that it writes is there whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from composer_replication.cli.recorded import record_from_store
from composer_replication.cli.status import open_place, place_of
from composer_replication.cli.view import RunReader, shows_life
from composer_replication.drafts import draft_of, written_whole
from composer_replication.errors import RecipeError, ReplicationError, StoreError
from composer_replication.recipe import load_recipe, task_of
from composer_replication.report import Run, page, payload, read_file, run_from_json, run_to_json

__all__ = ["report_command", "run_of"]

PAGE = "report.html"
_NOT_SETTINGS = ("name", "output", "store", "executor")  # of a recipe: what says where, not what


def report_command(args: argparse.Namespace) -> int:
    output = args.output if args.output is not None or args.json else Path(PAGE)
    for path in (output, args.rounds):
        if path is not None:
            _check_writable(path)
    runs, troubles = _read_all(args)
    for trouble in troubles:
        print(f"composer-replication report: {trouble}", file=sys.stderr)
    if not runs:
        return 1
    if args.rounds is not None:
        _write(args.rounds, _round_lines(runs))
    if args.json:
        for run in runs:
            print(json.dumps(run_to_json(run), default=str))
    if output is not None:
        values = payload(runs, notices=troubles, written=time.strftime("%Y-%m-%d %H:%M"))
        _write(output, page(values))
        if not args.json:
            _tell(output, values)
    return 0


def _read_all(args: argparse.Namespace) -> tuple[list[Run], list[str]]:
    runs: list[Run] = []
    troubles: list[str] = []
    for source in args.sources:
        try:
            if "://" not in source and Path(source).is_file():
                runs += read_file(Path(source))
            elif "://" not in source and (Path(source) / "rounds.jsonl").is_file() and not _is_run(Path(source)):
                runs += read_file(Path(source) / "rounds.jsonl")
            else:
                reader = RunReader(open_place(source, control=args.control, signing_key_file=args.signing_key_file))
                runs.append(run_of(reader, source))
        except (ReplicationError, OSError, ValueError) as error:
            troubles.append(str(error))
    return runs, troubles


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("fleet.json", "recipe.yaml", "store", "epochs"))


def run_of(reader: RunReader, source: str, *, live: bool = False) -> Run:
    """The run as it stands. What a damaged object hides is told in a notice; raises StoreError if nothing is there."""
    said: list[str] = []
    try:
        reader.refresh()
    except ReplicationError as error:
        if reader.fleet is None:
            raise
        said.append(f"it could be read up to round {len(reader.rounds) - 1} only: {error}")
    if reader.fleet is None:
        raise StoreError(
            f"there is no run in {reader.store.uri} (no fleet.json): is that the run's store? One that has a second "
            "store keeps its fleet.json there: name that as well (--control)"
        )
    folder = Path(source) if "://" not in source else None
    name = (
        folder.resolve().name if folder else place_of(source).split("?")[0].rstrip("/").rpartition("/")[2]
    ) or source
    values = {**record_from_store(reader, name=name, source=source), "seed": _seed(reader)}
    if folder is not None:
        values |= _of_folder(folder, said)
    running = None if live or reader.ended else _shows_life(reader)
    return run_from_json(values, source=source, notices=said, live=live, running=running)


def _shows_life(reader: RunReader) -> bool | None:
    with suppress(ReplicationError):  # a damaged heartbeat hides nothing else
        return shows_life(reader.view("").rows)
    return None


def _seed(reader: RunReader) -> int | None:
    """That with which the replicas' shards were cut."""
    for roster in reader.rosters:
        for report in (*roster.members, *roster.others):
            if "data_seed" in report.metrics:
                return int(report.metrics["data_seed"])
    return None


def _of_folder(folder: Path, said: list[str]) -> dict[str, Any]:
    """What a run's folder on this machine says beyond its store: the recipe, and how it ended."""
    found: dict[str, Any] = {}
    with suppress(RecipeError):
        recipe = load_recipe(folder / "recipe.yaml")
        found |= {"seed": recipe.training.seed, "steps": recipe.training.steps, "training": _settings_of(recipe)}
        found["task"] = task_of(recipe)
    summary = _json(folder / "summary.json")
    results = [_json(path) for path in sorted(folder.glob("replica-*/result.json"))]
    losses = [one["validation_loss"] for one in (summary, *results) if one.get("validation_loss") is not None]
    if losses:
        digests = summary.get("digests") or [one["digest"] for one in results if one.get("digest")]
        digest = digests[0] if digests else None
        found["result"] = {"validation_loss": losses[0], "digest": digest, "seconds": summary.get("seconds")}
        if len(set(digests)) > 1:
            said.append("its replicas ended with different weights")
    return found


def _settings_of(recipe: Any) -> dict[str, Any]:
    values = {name: value for name, value in asdict(recipe).items() if name not in _NOT_SETTINGS}
    values["training"] = {name: value for name, value in values["training"].items() if name != "seed"}
    return values


def _json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# -- what is written -------------------------------------------------------------------------------------------------


def _round_lines(runs: Sequence[Run]) -> str:
    """Each run's settings in a line, then its rounds."""
    lines: list[str] = []
    for run in runs:
        head = {name: value for name, value in run.raw.items() if name != "rounds"}
        lines.append(json.dumps({**head, "kind": "run"}, default=str))
        lines += [json.dumps(one, default=str) for one in run.raw.get("rounds") or ()]
    return "".join(f"{line}\n" for line in lines)


def _check_writable(path: Path) -> None:
    """Before anything is read, which can take long. Raises ValueError; leaves nothing."""
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"{path} can't be written: it is a folder; name a file in it")
    draft = draft_of(path)
    try:
        draft.touch()
        draft.unlink()
    except OSError as error:
        raise ValueError(f"{path} can't be written: {error.strerror or error}") from error


def _write(path: Path, text: str) -> None:
    try:
        with written_whole(path) as draft:
            draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} can't be written: {error}") from error


def _tell(output: Path, values: Mapping[str, Any]) -> None:
    print(f"{output}: {values['title']}, {values['subtitle']}")
    groups: Iterable[Mapping[str, Any]] = values["groups"]
    for group in groups:
        answers = "; ".join(f"{fact['answer']} {fact['unit']}".strip() for fact in group["facts"] if fact["unit"])
        print(f"  {group['label']}: {answers or 'nothing to tell yet'}")
    for notice in values["notices"]:
        print(f"  note: {notice}")
