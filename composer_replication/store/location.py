"""Where a remote store is: a URI taken apart.

Invariant: no credential ever passes through a URI. What may stand after the "?" is listed here, and none of it is one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl

from composer_replication.store.keys import check_key, check_steps

__all__ = ["Location", "kind_of", "parse_location"]

_OPTIONS: dict[str, frozenset[str]] = {
    "s3": frozenset({"endpoint_url", "region", "addressing_style", "checksums", "profile"}),
    "gs": frozenset({"endpoint_url", "project", "auth"}),
    "az": frozenset({"account_name", "account_host"}),
    "hf": frozenset({"revision"}),
}
_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az"}
_AZURE_HOST = re.compile(r"^(?P<container>[^@/]+)@(?P<account>[^./]+)\.(?:dfs|blob)\.core\.windows\.net$")


@dataclass(frozen=True)
class Location:
    """`kind` is the family (s3, gs, az, hf, or fsspec's own name), `root` what the client calls the folder."""

    uri: str
    kind: str
    root: str
    options: dict[str, str] = field(default_factory=dict[str, str])


def kind_of(uri: str) -> str:
    """The family of stores that the URI's scheme is of: s3, gs, az, hf, or else the scheme."""
    scheme = uri.partition("://")[0].lower()
    return _ALIASES.get(scheme, scheme)


def parse_location(uri: str) -> Location:
    """Take `scheme://bucket/prefix?option=value` apart. Raises ValueError, without repeating what might be a secret."""
    scheme, _, rest = uri.partition("://")
    scheme, kind = scheme.lower(), kind_of(uri)
    place, mark, query = rest.partition("?")
    bucket, _, prefix = place.partition("/")
    options: dict[str, str] = {}
    if kind == "az" and (match := _AZURE_HOST.match(bucket)):
        bucket, options = match["container"], {"account_name": match["account"]}
    # A colon is in no bucket's name: a secret with a slash in it would end the bucket early.
    if "@" in bucket or (kind in _OPTIONS and ":" in bucket):
        raise ValueError(
            f"a {scheme}:// URI with something before an @: credentials don't belong into a URI, which logs and "
            "recipes keep; use the environment variables or the profile that the store's own tools use"
        )
    if "#" in rest:
        raise ValueError(
            f"{scheme}://{place.partition('#')[0]}: a store's URI has no fragment: leave out the # and what follows"
        )
    if not bucket and kind in _OPTIONS:
        raise ValueError(f"{uri!r}: name a bucket and a prefix of the run's own, like {scheme}://bucket/runs/one")
    allowed = _OPTIONS.get(kind, frozenset[str]())
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in allowed or "@" in value:
            known = ", ".join(sorted(allowed)) or "none"
            raise ValueError(
                f"{scheme}://{place}: {name!r} can't be set like this in the URI (known: {known}); credentials "
                "come from the environment or a profile"
            )
        options[name] = value
    check_steps(place)
    prefix = prefix.strip("/")
    root = place.rstrip("/")
    if kind in _OPTIONS:
        root = f"{bucket}/{check_key(prefix)}" if prefix else bucket
    shown = f"{scheme}://{place.rstrip('/')}{mark}{query}"
    return Location(uri=shown, kind=kind, root=root, options=options)
