"""Text and rows out of files, wherever they are: plain text, JSON and Parquet, through fsspec.

Invariant: what is read and its order are a function of the files' names below the URI and of what is in them, so that
every replica reads the same. Whatever is wrong with a row is said with its file and number.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import quote, unquote

from composer_replication.errors import RecipeError, StoreError
from composer_replication.store.clients import extra_of
from composer_replication.store.failures import TEMPORARY, describe, kind_of
from composer_replication.store.location import parse_location

__all__ = ["documents", "is_text", "rows"]

PIECE_CHARACTERS = 1 << 20
KINDS = (".txt", ".jsonl", ".json", ".parquet")
_ROWS = 1024  # of a Parquet file at once
# What a URI's options are called by the filesystems.
_OPTIONS: dict[str, dict[str, str]] = {
    "s3": {"endpoint_url": "endpoint_url", "profile": "profile"},
    "gs": {"endpoint_url": "endpoint_url", "project": "project", "auth": "token"},
    "az": {"account_name": "account_name", "account_host": "account_host"},
}


def documents(uri: str, *, field: str = "text") -> Iterator[tuple[str, bool]]:
    """The documents below `uri` as (text, is this its end?): long ones come in pieces, cut at a line's end.

    `uri` is a file, a folder (all of its .txt, .jsonl, .json and .parquet files, those in folders below, .gz too) or a
    pattern with `*`: a plain path, `file://`, or what a store's URI may be (`s3://bucket/folder?endpoint_url=...`). A
    .txt file is one document; a line of a .jsonl or .json file, an item of a .json file that is a list, or a row of a
    .parquet file, is one in its `field`. Files come in the order of a hash of their names below `uri`.

    Raises ValueError for what isn't there or isn't text, StoreError while the store doesn't answer.
    """
    for kind, found in _read_all(uri, field, (0, 1)):
        if kind == "piece":
            yield found
            continue
        where, value, has = found
        if has is None:
            continue
        if not is_text(value):
            raise ValueError(f"{where} has no text in the field {field!r} (it has {has})")
        yield value, True


def is_text(value: Any) -> bool:
    """Is it a string that can be written as UTF-8? JSON can hold half of a character, which no tokenizer takes."""
    try:
        return isinstance(value, str) and bool(value.encode("utf-8") or True)
    except UnicodeEncodeError:
        return False


def rows(uri: str, *, field: str, part: tuple[int, int] = (0, 1)) -> Iterator[tuple[str, Any]]:
    """(where it stands, its value of `field`, which may be None) of each row of the files below `uri`; see `documents`.

    `part` (index, count): only this one of `count` equal parts. Whole files are dealt where their number is a multiple
    of `count`, rows where it isn't. Raises ValueError for a row without the field, and for plain text.
    """
    for kind, found in _read_all(uri, field, part):
        if kind == "piece":
            raise ValueError(f"{uri} is plain text, which has no rows: give {', '.join(KINDS[1:])} files")
        where, value, has = found
        if value is None and has is not None:
            raise ValueError(f"{where} has no field {field!r} (it has {has})")
        yield where, value


def _read_all(uri: str, field: str, part: tuple[int, int]) -> Iterator[tuple[str, Any]]:
    filesystem, root = _open(uri)
    index, count = part
    try:
        files = _files(filesystem, root, uri)
        whole = len(files) % count == 0
        if whole:
            files = files[index::count]
        number = 0
        for path in files:
            with filesystem.open(path, "rb") as file:
                for one in _read(file, str(path), field):
                    if whole or number % count == index:
                        yield one
                    number += 1
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
        extra = extra_of(scheme) or "transformers"
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


def _read(file: IO[bytes], path: str, field: str) -> Iterator[tuple[str, Any]]:
    """("piece", (text, is this its end?)) of plain text; of all else ("row", (where, value, what fields it has)).

    A row whose value is null, as one of Parquet may be, has None in the place of its fields.
    """
    kind = _kind(path)
    if kind == ".parquet":
        yield from (("row", one) for one in _columns(file, path, field))
        return
    raw = gzip.GzipFile(fileobj=file) if path.lower().endswith(".gz") else file
    text = io.TextIOWrapper(cast("IO[bytes]", raw), encoding="utf-8", newline="")
    try:
        if kind in (".jsonl", ".json"):
            for where, row in _json(text, path, listed=kind == ".json"):
                value = row.get(field) if isinstance(row, dict) else None
                has = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                null = value is None and isinstance(row, dict) and field in row
                yield "row", (where, value, None if null else has)
        else:
            yield from (("piece", one) for one in _pieces(text))
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


def _json(text: Iterable[str], path: str, *, listed: bool) -> Iterator[tuple[str, Any]]:
    """(where, row) of each line; of a .json file that is one list, of each item."""
    lines = iter(text)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if listed and line.lstrip().startswith("["):
            try:
                items = json.loads(line + "".join(lines))
            except ValueError as error:
                raise ValueError(f"{path} isn't JSON: {error}") from error
            yield from ((f"{path}, item {index}", item) for index, item in enumerate(items, 1))
            return
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} isn't JSON: {error}") from error
        yield f"{path}, line {number}", row


def _columns(file: IO[bytes], path: str, field: str) -> Iterator[tuple[str, Any, str | None]]:
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise RecipeError(f"{path} needs pyarrow ({error}): pip install pyarrow") from error
    try:
        table = parquet.ParquetFile(file)
    except ValueError as error:  # pyarrow's own errors are ValueErrors
        raise ValueError(f"{path} isn't a Parquet file: {error}") from error
    names = ", ".join(table.schema_arrow.names)
    if field not in table.schema_arrow.names:
        raise ValueError(f"{path} has no column {field!r} (it has {names})")
    number = 0
    for batch in table.iter_batches(batch_size=_ROWS, columns=[field]):
        for value in batch.column(0).to_pylist():
            number += 1
            yield f"{path}, row {number}", value, None if value is None else names
