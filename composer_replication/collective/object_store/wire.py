"""JSON as it crosses the store: canonical bytes out, checked fields in; and reports, which every collective sends.

Invariant: `report_from_json(report_to_json(r)) == r`. Floats are written in hex; every field is checked for its type
and its bounds before it is used, and none is ever used as a path or a name to import.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from composer_replication.collective.base import Report
from composer_replication.errors import ObjectCorrupt, SignatureError
from composer_replication.store.signed import is_signed
from composer_replication.store.signing_key import SIGNING_KEY

__all__ = [
    "MAX_POINTER_BYTES",
    "WIRE_VERSION",
    "Fields",
    "dump",
    "for_people",
    "load",
    "number",
    "pointer_hash",
    "report_from_json",
    "report_to_json",
    "text",
    "whole",
]

WIRE_VERSION = 1
MAX_POINTER_BYTES = 32 * 1024 * 1024  # bounds what is read before it is looked at

_T = TypeVar("_T")
_Json = dict[str, Any]


def pointer_hash(data: bytes) -> str:
    """SHA-256 in hex: how pointers name one another."""
    return hashlib.sha256(data).hexdigest()


def dump(content: Mapping[str, Any]) -> bytes:
    """Canonical JSON: the same content gives the same bytes. ValueError for NaN and infinities.

    Its last field, "~", is a checksum of all before it: blobs are checked against their pointers, and what decides
    against itself, so that one bit can't become another number on one replica and not on the next."""
    body = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    return body[:-1] + _checksum(body) if content else body


def _checksum(body: bytes) -> bytes:
    return b',"~":"%s"}' % pointer_hash(body)[:16].encode("ascii")


def for_people(content: Mapping[str, Any]) -> bytes:
    """JSON without a checksum, of anything that a trainer may tell: what JSON doesn't know is text, and what it has no
    word for (NaN, infinities) is null, so that one value can't make the rest unreadable."""
    text = json.dumps(content, default=str)
    return json.dumps(json.loads(text, parse_constant=lambda name: None)).encode("ascii")


def load(data: bytes, key: str) -> _Json:
    """The JSON object in `data`, or ObjectCorrupt naming the key. Objects without a checksum are for people."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    if is_signed(data):
        raise SignatureError(
            f"{key} is signed, and this process has no signing key: give it the run's key with signing_key_file (on "
            f"the command line --signing-key-file) or {SIGNING_KEY}"
        )
    try:
        found = json.loads(data.decode("ascii"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ObjectCorrupt(f"{key} isn't JSON ({len(data)} bytes)") from error
    if not isinstance(found, dict):
        raise ObjectCorrupt(f"{key} isn't a JSON object")
    content = cast(_Json, found)
    if "~" in content:
        del content["~"]
        body = data[: -len(_checksum(b""))] + b"}"
        if data != body[:-1] + _checksum(body):
            raise ObjectCorrupt(f"{key} is damaged: it isn't what its checksum says")
    return content


class Fields:
    """The fields of one JSON object. Every getter raises ValueError; parsers turn that into ObjectCorrupt."""

    def __init__(self, content: Any) -> None:
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        self._content = cast(_Json, content)

    def raw(self, name: str) -> Any:
        if name not in self._content:
            raise ValueError(f"no {name!r}")
        return self._content[name]

    def whole(self, name: str) -> int:
        return whole(self.raw(name), name)

    def whole_or_none(self, name: str) -> int | None:
        return None if self.raw(name) is None else self.whole(name)

    def flag(self, name: str) -> bool:
        value = self.raw(name)
        if not isinstance(value, bool):
            raise ValueError(f"{name!r} is not true or false")
        return value

    def text(self, name: str) -> str:
        return text(self.raw(name), name)

    def number(self, name: str) -> float:
        return number(self.raw(name), name)

    def number_or_none(self, name: str) -> float | None:
        """None also where there is no such field: what was added later may be missing."""
        return None if self._content.get(name) is None else self.number(name)

    def several(self, name: str, of: Callable[[Any, str], _T]) -> tuple[_T, ...]:
        value = self.raw(name)
        if not isinstance(value, list):
            raise ValueError(f"{name!r} is not a list")
        return tuple(of(item, name) for item in cast(list[Any], value))

    def by_name(self, name: str, of: Callable[[Any, str], _T]) -> dict[str, _T]:
        value = self.raw(name)
        if not isinstance(value, dict):
            raise ValueError(f"{name!r} is not an object")
        return {text(key, name): of(item, name) for key, item in cast(_Json, value).items()}

    def by_replica(self, name: str, of: Callable[[Any, str], _T]) -> dict[int, _T]:
        return {int(key): value for key, value in sorted(self.by_name(name, of).items(), key=lambda item: int(item[0]))}


def whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**62:
        raise ValueError(f"{name!r} is not a whole number >= 0")
    return value


def text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > 4096:
        raise ValueError(f"{name!r} is not a short text")
    return value


def number(value: Any, name: str) -> float:
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is not a number in hex")
    return float.fromhex(value)


def report_to_json(report: Report) -> _Json:
    return {
        "replica": report.replica,
        "steps": report.steps,
        "tokens": report.tokens,
        "mass": float(report.mass).hex(),
        "square_norm": float(report.square_norm).hex(),
        "finite": report.finite,
        "leaving": report.leaving,
        "next_lr": float(report.next_lr).hex(),
        "preview": [float(value).hex() for value in report.preview],
        "remaining": report.remaining,
        "base": report.base,
        "layout": report.layout,
        "weight": float(report.weight).hex(),
        "metrics": {name: float(value).hex() for name, value in report.metrics.items()},
        "longest_wait_seconds": _wait_to_json(report.longest_wait_seconds),
    }


def _wait_to_json(seconds: float | None) -> str | None:
    return None if seconds is None else float(seconds).hex()


def report_from_json(content: Any, name: str = "report") -> Report:
    fields = Fields(content)
    report = Report(
        replica=fields.whole("replica"),
        steps=fields.whole("steps"),
        tokens=fields.whole_or_none("tokens"),
        mass=fields.number("mass"),
        square_norm=fields.number("square_norm"),
        finite=fields.flag("finite"),
        leaving=fields.flag("leaving"),
        next_lr=fields.number("next_lr"),
        preview=fields.several("preview", number),
        remaining=fields.whole_or_none("remaining"),
        base=fields.text("base"),
        layout=fields.text("layout"),
        weight=fields.number("weight"),
        metrics=fields.by_name("metrics", number),
        longest_wait_seconds=fields.number_or_none("longest_wait_seconds"),
    )
    wait = report.longest_wait_seconds
    if wait is not None and not (math.isfinite(wait) and wait >= 0):
        raise ValueError("'longest_wait_seconds' is not a finite number >= 0")
    if not (math.isfinite(report.weight) and report.weight >= 0):
        raise ValueError("'weight' is not a finite number >= 0")
    return report
