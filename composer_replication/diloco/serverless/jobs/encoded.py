"""A command in the form that every service takes: short arguments of letters, digits, dashes and underscores.

Invariant: `decoded` gives back what `encoded` was given, whatever is in it: quotes, newlines, any alphabet, any length.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence

__all__ = ["decoded", "encoded"]

_FLAG = "--encoded="


def encoded(arguments: Sequence[str], longest: int) -> list[str]:
    """Arguments of at most `longest` characters each that stand for these."""
    text = base64.urlsafe_b64encode(zlib.compress(json.dumps(list(arguments)).encode("ascii"), 9)).decode("ascii")
    step = longest - len(_FLAG)
    return [_FLAG + text[start : start + step] for start in range(0, len(text), step)]


def decoded(arguments: Sequence[str]) -> list[str]:
    """The arguments that these stand for; those that aren't encoded as they are. ValueError for a damaged text."""
    if not arguments or not all(one.startswith(_FLAG) for one in arguments):
        return list(arguments)
    text = "".join(one.removeprefix(_FLAG) for one in arguments)
    try:
        return json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
    except (ValueError, zlib.error) as error:
        raise ValueError(f"{_FLAG}... isn't a whole command: {error}") from error
