"""What AWS's client says, in our words: errors translated, and requests checked against the service's own model.

Invariant: whatever boto3 raises comes out as ExecutorError or one of its two retryable kinds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

from composer_replication.diloco.serverless.backends.client import answer
from composer_replication.diloco.serverless.executor import BackendUnavailable, QuotaExceeded
from composer_replication.errors import ExecutorError

__all__ = ["refusals", "told"]

T = TypeVar("T")

_FULL = {"ResourceLimitExceeded", "RequestLimitExceeded", "LimitExceededException", "CapacityError", "SlowDown"}
_KEYS = {
    *("ExpiredToken", "ExpiredTokenException", "UnrecognizedClientException", "InvalidClientTokenId"),
    *("InvalidSignatureException", "SignatureDoesNotMatch", "MissingAuthenticationToken", "InvalidAccessKeyId"),
    *("IncompleteSignature", "MissingAuthenticationTokenException"),
}


def told(call: Callable[[], T]) -> T:
    """The call's answer, or its error in our words: the service's own code stays in the message."""
    return answer(call, _translated)


def _translated(error: Exception) -> Exception:
    words = " ".join(str(error).split()) or type(error).__name__
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # the service has answered
        code = str(response.get("Error", {}).get("Code", ""))
        status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400))
        if code in _KEYS:
            return ExecutorError(f"AWS refuses the credentials, which are wrong or have expired: {words}")
        if code in _FULL or "Throttl" in code or "TooManyRequests" in code or status == 429:
            return QuotaExceeded(f"AWS: {words}")
        return (BackendUnavailable if status >= 500 else ExecutorError)(f"AWS: {words}")
    kind = type(error).__name__
    if not type(error).__module__.startswith("botocore"):
        return BackendUnavailable(f"AWS: {words}") if isinstance(error, OSError) else error
    if kind == "NoRegionError":
        return ExecutorError(f"region: none is given, and none configured (AWS_DEFAULT_REGION): {words}")
    if kind in ("ParamValidationError", "InvalidRegionError"):
        return ExecutorError(f"AWS: {words}")
    if "Connection" in kind or "HTTPClient" in kind or kind.endswith(("TimeoutError", "ConnectError", "SSLError")):
        return BackendUnavailable(f"AWS: {words}")
    # What is left has to do with finding credentials: none at all, half of them, an unknown profile, a login gone by.
    return ExecutorError(
        f"AWS: {words}: no usable credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, `aws sso login`, or a role)"
    )


def refusals(value: Any, shape: Any, place: str = "") -> list[str]:
    """What the service would refuse in a request, by its model: lengths, patterns, ranges, values not on a list.

    The client itself checks types and required members only, and that when it sends.
    """
    limits, kind = shape.metadata, shape.type_name
    what = place or "the request"
    if kind == "structure":
        return [
            text
            for name, one in value.items()
            for text in refusals(one, shape.members[name], f"{place}.{name}".lstrip("."))
        ]
    found: list[str] = []
    pairs: list[tuple[Any, Any]] = []
    size, unit = value, ""
    if kind == "string":
        size, unit = len(value), " characters"
    elif kind in ("list", "map"):
        size, unit = len(value), " entries"
        pairs = list(value.items()) if kind == "map" else list(enumerate(value))
    for key, one in pairs:
        if kind == "map":
            found += refusals(key, shape.key, f"the name {key!r} in {what}")
        found += refusals(one, shape.value if kind == "map" else shape.member, f"{place}[{key}]")
    if kind != "boolean" and not limits.get("min", size) <= size <= limits.get("max", size):
        allowed = f"{limits.get('min', '')} to {limits.get('max', '')}".strip()
        found.append(f"{what} has {size}{unit}, allowed are {allowed}")
    if kind == "string":
        if "enum" in limits and value not in limits["enum"]:
            found.append(f"{what} {value!r} isn't one of {', '.join(limits['enum'])}")
        if "pattern" in limits and not re.fullmatch(_in_python(limits["pattern"]), value):
            found.append(f"{what} {value!r} isn't of the form {limits['pattern']}")
    return found


def _in_python(pattern: str) -> str:
    r"""A pattern of the model without \p{...}, which Python's `re` doesn't have."""
    return pattern.replace(r"\p{L}", r"\w").replace(r"\p{N}", r"\d").replace(r"\p{Z}", " ")
