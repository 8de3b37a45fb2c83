"""Documents and conversations in files, as data sets come, made for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["conversation", "write_documents", "write_rows"]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """JSON lines, one JSON list (.json) or Parquet, by the name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_documents(path: Path, count: int, *, first: int = 0) -> Path:
    """Short lines of very different lengths."""
    return write_rows(path, [{"text": f"{i}:" + "ab" * (i % 7)} for i in range(first, first + count)])


def conversation(*turns: Any, system: str | None = None) -> dict[str, Any]:
    """A row of what the user and the assistant say in turn."""
    said = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"messages": ([{"role": "system", "content": system}] if system else []) + said}
