"""`CSVLogger`: a table of all metrics, which Composer has no logger for.

Invariant: the file is a whole table at any moment. A metric that comes up later adds a column, for which the file is
written anew beside the old one and put in its place; else rows are only added.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

from composer.loggers import LoggerDestination
from composer.utils import dist

from composer_replication.drafts import written_whole

__all__ = ["CSVLogger"]


class CSVLogger(LoggerDestination):
    """Writes `step` and each metric's value into one CSV file; goes on with one that is there.

    Args:
        path: the file; its folder is made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._columns: list[str] = []
        if dist.get_global_rank() == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                self._rewrite([])

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if dist.get_global_rank() != 0:
            return
        row = {"step": step, **{name: _plain(value) for name, value in metrics.items()}}
        if new := [name for name in row if name not in self._columns]:
            self._rewrite(new)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def _rewrite(self, new: list[str]) -> None:
        """The same rows with these columns at the end; a row that was cut off by a kill is left out."""
        rows: list[dict[str, Any]] = []
        if self._path.exists():
            with self._path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file)
                self._columns = list(reader.fieldnames or [])
                rows = [row for row in reader if None not in row.values() and None not in row]
        self._columns += [name for name in new if name not in self._columns]
        with written_whole(self._path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
