"""Checks against the models that AWS's client is made of."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any


@functools.lru_cache(maxsize=1)
def models() -> dict[str, Any]:
    """The services' models, by the prefix of their operations."""
    import botocore.session

    session = botocore.session.get_session()
    names = {"SageMaker": "sagemaker", "Logs_20140328": "logs"}
    return {prefix: session.get_service_model(name) for prefix, name in names.items()}


def faults(value: Any, shape: Any, place: str) -> Iterator[str]:
    """What the model's limits say against a value whose types are right."""
    if shape.type_name == "structure":
        for name, one in value.items():
            if name not in shape.members:
                yield f"{place}.{name} isn't known"
            else:
                yield from faults(one, shape.members[name], f"{place}.{name}")
        return
    limits = shape.metadata
    numbers, sized = ("integer", "long"), ("string", "list", "map")
    length = value if shape.type_name in numbers else len(value) if shape.type_name in sized else None
    if length is not None and (
        "min" in limits and length < limits["min"] or "max" in limits and length > limits["max"]
    ):
        yield f"{place} must be between {limits.get('min')} and {limits.get('max')}, is {length}"
    if shape.type_name == "string":
        if limits.get("enum") and value not in limits["enum"]:
            yield f"{place}: {value!r} isn't in the enumeration"
        # Of the classes that Python doesn't have, tags use these three; ASCII is enough here.
        pattern = re.sub(
            r"\\p\{(.)\}", lambda m: {"L": "a-zA-Z", "N": "0-9", "Z": " "}[m[1]], limits.get("pattern", "")
        )
        if pattern and re.fullmatch(pattern, value) is None:
            yield f"{place}: {value!r} must satisfy {limits['pattern']}"
    for position, one in enumerate(value) if shape.type_name == "list" else ():
        yield from faults(one, shape.member, f"{place}.{position}")
    for name, one in value.items() if shape.type_name == "map" else ():
        yield from faults(name, shape.key, f"{place} key")
        yield from faults(one, shape.value, f"{place}.{name}")
