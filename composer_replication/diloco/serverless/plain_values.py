"""Whether plain values, from a recipe or from JSON, are of the types that a signature or a dataclass names.

Invariant: nothing is converted. What an annotation says that plain values can't be is taken as fitting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["fits", "from_values", "in_words", "misfit"]

_T = TypeVar("_T")
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}


def fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (UnionType, Union):
        return any(fits(value, one) for one in inner)
    if origin is Any or not isinstance(origin, type):
        return True
    if isinstance(value, bool):
        return origin in (bool, object)
    if origin is float:
        return isinstance(value, (int, float))
    if isinstance(value, str) and origin is Sequence:
        return False
    if not isinstance(value, origin):
        return False
    if isinstance(value, Mapping) and inner:
        return all(fits(key, inner[0]) and fits(one, inner[1]) for key, one in value.items())
    return not (isinstance(value, Sequence) and inner) or all(fits(one, inner[0]) for one in value)


def in_words(hint: Any) -> str:
    """For messages, as YAML has it."""
    origin, inner = get_origin(hint) or hint, get_args(hint)
    if origin in (UnionType, Union):
        return " or ".join(in_words(one) for one in inner)
    if origin in _WORDS:
        return _WORDS[origin]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping of {in_words(inner[0])} to {in_words(inner[1])}" if inner else "a mapping"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list of {in_words(inner[0])}" if inner else "a list"
    return "any value"


def misfit(value: Any, hint: Any) -> str:
    """What doesn't fit, for messages. Mappings may hold secrets: of them only keys and types are said."""
    if isinstance(value, Mapping):
        bad = [(key, one) for key, one in value.items() if not fits({key: one}, hint)]
        return ", ".join(f"{key!r}: a value of type {type(one).__name__}" for key, one in bad) or "a mapping"
    return f"a value of type {type(value).__name__}" if "a mapping" in in_words(hint) else repr(value)


def from_values(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """A dataclass of values as JSON gave them back. TypeError for what is missing or of another type; unknown keys, of
    later versions, are passed over."""
    hints = get_type_hints(kind)
    known = {key: value for key, value in values.items() if key in hints}
    for key, value in known.items():
        if not fits(value, hints[key]):
            raise TypeError(f"{key} must be {in_words(hints[key])}, not {value!r}")
    return kind(**known)
