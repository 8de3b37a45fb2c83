"""`rounds.jsonl` in a run's folder: a line for each closed round (`RoundRecord`), kept up to date while a fleet trains.

Invariant: at any moment the file is whole lines, one a round, in their order: it is written beside itself and put in
its place. A round that another has taken the place of, or of which more is known now, has its new line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from composer_replication.cli.recorded import record_from_store
from composer_replication.cli.view import ClosedRound, RunReader
from composer_replication.drafts import written_whole
from composer_replication.errors import ReplicationError

__all__ = ["ROUNDS", "RoundsFile"]

ROUNDS = "rounds.jsonl"


class RoundsFile:
    """That of one run. What goes wrong with it is told once, and is no reason to stop a fleet."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / ROUNDS
        self._name = name
        self._text: str | None = None
        self._seen: tuple[int, ClosedRound, bool] | None = None
        self._trouble = ""

    def update(self, reader: RunReader, *, at_end: bool = False) -> None:
        """Bring the file to what was read of the run. `at_end`: the replicas have said how they ended."""
        if not reader.rounds:
            return
        seen = (len(reader.rounds), reader.rounds[-1], at_end)
        if seen == self._seen:
            return
        try:
            record = record_from_store(reader, name=self._name, source=str(self._path.parent))
            self._write("".join(json.dumps(one, allow_nan=False) + "\n" for one in record["rounds"]))
            self._seen = seen
        except ReplicationError:
            pass  # the store doesn't answer: the next look tries again
        except Exception as error:  # a file for people must not end what it tells of
            self._tell(f"{self._path} isn't up to date: {type(error).__name__}: {error}")

    def _write(self, text: str) -> None:
        if text == self._text:
            return
        with written_whole(self._path) as draft:
            draft.write_text(text, encoding="utf-8")
        self._text = text

    def _tell(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            print(trouble, file=sys.stderr, flush=True)
