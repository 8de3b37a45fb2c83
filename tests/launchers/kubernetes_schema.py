"""Manifests against the published schemas of their kinds, as a server checks them that was asked to be strict."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def schema(name: str) -> dict[str, Any]:
    """A published schema as JSON Schema, in which fields that aren't named are errors."""
    path = Path(__file__).parent / "crd" / f"{name}.json.gz"
    return _strict(json.loads(gzip.decompress(path.read_bytes())))


def _strict(node: dict[str, Any], *, top: bool = True) -> dict[str, Any]:
    """Of an OpenAPI 3 "structural" schema. Metadata is the API server's own, and is checked in `kubernetes_api`."""
    node = dict(node)
    if node.pop("x-kubernetes-int-or-string", False):
        return {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": node.get("pattern", "")}]}
    if "properties" in node:
        node["properties"] = {
            name: one if top and name == "metadata" else _strict(one, top=False)
            for name, one in node["properties"].items()
        }
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            node[key] = _strict(node[key], top=False)
    if "properties" in node and "additionalProperties" not in node:
        node["additionalProperties"] = bool(node.get("x-kubernetes-preserve-unknown-fields"))
    return node


def problems(name: str, manifest: Any) -> list[str]:
    """What is wrong with a manifest, by its published schema."""
    from jsonschema import Draft202012Validator

    found = Draft202012Validator(schema(name)).iter_errors(manifest)
    return [f"{'.'.join(map(str, one.absolute_path))}: {one.message[:300]}" for one in found]
