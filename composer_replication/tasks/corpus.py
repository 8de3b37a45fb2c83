"""Text out of files, wherever they are: plain text, JSON lines and Parquet, through fsspec.

Invariant: the documents and their order are a function of the files' names below the URI and of what is in them, so
that every replica reads the same.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import quote, unquote

from composer_replication.errors import RecipeError, StoreError
from composer_replication.store.failures import TEMPORARY, describe, kind_of
from composer_replication.store.location import parse_location

__all__ = ["documents"]

PIECE_CHARACTERS = 1 << 20
KINDS = (".txt", ".jsonl", ".parquet")
_ROWS = 1024  # of a Parquet file at once
# What a URI's options are called by the filesystems.
_OPTIONS: dict[str, dict[str, str]] = {
    "s3": {"endpoint_url": "endpoint_url", "profile": "profile"},
    "gs": {"endpoint_url": "endpoint_url", "project": "project", "auth": "token"},
    "az": {"account_name": "account_name", "account_host": "account_host"},
}


def documents(uri: str, *, field: str = "text") -> Iterator[tuple[str, bool]]:
    """The documents below `uri` as (text, is this its end?): long ones come in pieces, cut at a line's end.

    `uri` is a file, a folder (all of its .txt, .jsonl and .parquet files, those in folders below, .gz too) or a pattern
    with `*`: a plain path, `file://`, or what a store's URI may be (`s3://bucket/folder?endpoint_url=...`). A .txt file
    is one document; a line of a .jsonl file, or a row of a .parquet file, is one in its `field`. Files come in the
    order of a hash of their names below `uri`.

    Raises ValueError for what isn't there or isn't text, StoreError while the store doesn't answer.
    """
    filesystem, root = _open(uri)
    try:
        for path in _files(filesystem, root, uri):
            with filesystem.open(path, "rb") as file:
                yield from _read(file, str(path), field)
    except (ValueError, RecipeError):
        raise
    except FileNotFoundError as error:
        raise ValueError(f"there is no file or folder {uri}") from error
    except Exception as error:  # each store's client has exceptions of its own
        kind = kind_of(error)
        message = f"{uri.partition('?')[0]} can't be read: {describe(error, kind)}"
        raise (StoreError if kind in TEMPORARY else ValueError)(message) from error


def _open(uri: str) -> tuple[Any, str]:
    """(an fsspec filesystem, the path in it)."""
    if not uri.strip():
        raise ValueError("the text's URI is empty: give a file or a folder, like file:///data/text")
    scheme, separator, _ = uri.partition("://")
    try:
        fsspec = import_module("fsspec")
        if not separator or scheme == "file":
            path = uri.removeprefix("file://")
            return fsspec.filesystem("file"), str(Path(unquote(path) if separator else path).expanduser().absolute())
        location = parse_location(uri)
        names = _OPTIONS.get(location.kind, {})
        given: dict[str, Any] = {names[name]: value for name, value in location.options.items() if name in names}
        if "region" in location.options:
            given["client_kwargs"] = {"region_name": location.options["region"]}
        root = location.root
        if location.kind == "hf" and (revision := location.options.get("revision")):
            root = _at_revision(root, revision)
        return fsspec.filesystem("abfs" if location.kind == "az" else location.kind, **given), root
    except ImportError as error:
        extra = {"s3": "s3", "gs": "gcs", "az": "azure", "hf": "hf"}.get(scheme, "transformers")
        raise RecipeError(f"{uri} can't be read ({error}): pip install 'composer-replication[{extra}]'") from error


def _at_revision(root: str, revision: str) -> str:
    """A repository's path as its filesystem takes it: owner/name@revision/folder."""
    parts = root.split("/")
    last = 2 if parts[0] in ("datasets", "spaces", "models", "buckets") else 1
    parts[last] += f"@{quote(revision, safe='')}"
    return "/".join(parts)


def _files(filesystem: Any, root: str, uri: str) -> list[str]:
    if "*" in root:
        found = [path for path in filesystem.glob(root) if _kind(path) or not filesystem.isdir(path)]
        root = root.partition("*")[0].rpartition("/")[0]
    elif filesystem.isfile(root):
        return [root]
    else:
        found = [path for path in filesystem.find(root) if _kind(path)]
        if not found and not filesystem.exists(root):
            raise FileNotFoundError(uri)
    if not found:
        raise ValueError(f"{uri} holds no {', '.join(KINDS)} files")
    above = filesystem._strip_protocol(root).rstrip("/") + "/"
    names = {str(path): str(path).removeprefix(above) for path in found}
    return sorted(names, key=lambda path: (hashlib.sha256(names[path].encode()).digest(), path))


def _kind(path: str) -> str:
    name = path.lower().removesuffix(".gz")
    return next((kind for kind in KINDS if name.endswith(kind)), "")


def _read(file: IO[bytes], path: str, field: str) -> Iterator[tuple[str, bool]]:
    kind = _kind(path)
    if kind == ".parquet":
        yield from _rows(file, path, field)
        return
    raw = gzip.GzipFile(fileobj=file) if path.lower().endswith(".gz") else file
    text = io.TextIOWrapper(cast("IO[bytes]", raw), encoding="utf-8", newline="")
    try:
        yield from _lines(text, path, field) if kind == ".jsonl" else _pieces(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} isn't UTF-8 text: {error.reason} at byte {error.start}") from error
    finally:
        text.detach()  # whoever opened the file closes it


def _pieces(text: IO[str]) -> Iterator[tuple[str, bool]]:
    piece = text.read(PIECE_CHARACTERS)
    while piece:
        if len(piece) == PIECE_CHARACTERS:
            piece += text.readline()
        after = text.read(PIECE_CHARACTERS)
        yield piece, not after
        piece = after


def _lines(text: IO[str], path: str, field: str) -> Iterator[tuple[str, bool]]:
    for number, line in enumerate(text, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} isn't JSON: {error}") from error
        found = document.get(field) if isinstance(document, dict) else None
        if not isinstance(found, str):
            has = ", ".join(document) if isinstance(document, dict) else type(document).__name__
            raise ValueError(f"{path}, line {number} has no text in the field {field!r} (it has {has})")
        yield found, True


def _rows(file: IO[bytes], path: str, field: str) -> Iterator[tuple[str, bool]]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise RecipeError(f"{path} needs pyarrow ({error}): pip install pyarrow") from error
    table = parquet.ParquetFile(file)
    if field not in table.schema_arrow.names:
        raise ValueError(f"{path} has no column {field!r} (it has {', '.join(table.schema_arrow.names)})")
    for batch in table.iter_batches(batch_size=_ROWS, columns=[field]):
        for found in batch.column(0).to_pylist():
            if found is not None:
                yield str(found), True
