"""What a store's client meant by an exception, whichever client it was.

Invariant: nothing here imports a client, and no text that leaves here holds a credential.

The clients disagree on how they say the same thing: s3fs turns the service's codes into OSErrors and keeps the original
as the cause, gcsfs has an HttpError or a bare "Forbidden", the Azure and Hugging Face libraries have classes with a
status. So the whole chain of causes is searched for codes, statuses and well-known class names, in that order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any, Literal, cast

__all__ = ["Kind", "TEMPORARY", "describe", "kind_of", "redact"]

Kind = Literal[
    "missing",
    "exists",
    "bucket",
    "empty range",
    "conflict",
    "throttled",
    "server",
    "unreachable",
    "timeout",
    "forbidden",
    "expired",
    "credentials",
    "clock",
    "full",
    "other",
]

TEMPORARY: frozenset[Kind] = frozenset({"conflict", "throttled", "server", "unreachable", "timeout"})

# The services' own codes, in lower case.
_CODES: dict[str, Kind] = {
    "nosuchbucket": "bucket",
    "containernotfound": "bucket",
    "containerbeingdeleted": "bucket",
    "reponotfound": "bucket",
    "revisionnotfound": "bucket",
    "preconditionfailed": "exists",
    "blobalreadyexists": "exists",
    "invalidrange": "empty range",
    "conditionalrequestconflict": "conflict",
    "operationaborted": "conflict",
    "nosuchupload": "conflict",
    "slowdown": "throttled",
    "toomanyrequests": "throttled",
    "throttling": "throttled",
    "throttlingexception": "throttled",
    "requestlimitexceeded": "throttled",
    "serverbusy": "throttled",
    "requesttimeout": "timeout",
    "operationtimedout": "timeout",
    "internalerror": "server",
    "serviceunavailable": "server",
    "expiredtoken": "expired",
    "expiredtokenexception": "expired",
    "tokenrefreshrequired": "expired",
    "requestexpired": "expired",
    "requesttimetooskewed": "clock",
    "accessdenied": "forbidden",
    "allaccessdisabled": "forbidden",
    "signaturedoesnotmatch": "forbidden",
    "invalidaccesskeyid": "forbidden",
    "invalidtoken": "forbidden",
    "authenticationfailed": "forbidden",
    "authorizationfailure": "forbidden",
    "authorizationpermissionmismatch": "forbidden",
    "quotaexceeded": "full",
    "entitytoolarge": "other",
}
_STATUSES: dict[int, Kind] = {
    401: "forbidden",
    403: "forbidden",
    404: "missing",
    408: "timeout",
    409: "conflict",
    412: "exists",
    416: "empty range",
    429: "throttled",
    500: "server",
    502: "server",
    503: "throttled",
    504: "server",
    507: "full",
}
_CLASSES: dict[str, Kind] = {
    **dict.fromkeys(("NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"), "credentials"),
    **dict.fromkeys(("CredentialUnavailableError", "LocalTokenNotFoundError", "ProfileNotFound"), "credentials"),
    **dict.fromkeys(("TokenRetrievalError", "SSOTokenLoadError", "UnauthorizedSSOTokenError"), "expired"),
    **dict.fromkeys(("CredentialRetrievalError", "RefreshError"), "expired"),
    **dict.fromkeys(("ConnectTimeoutError", "ReadTimeoutError", "TimeoutException", "TimeoutError"), "timeout"),
    **dict.fromkeys(("ServiceResponseTimeoutError", "ServiceRequestTimeoutError"), "timeout"),
    **dict.fromkeys(
        ("HTTPClientError", "ClientConnectionError", "ClientPayloadError", "ConnectionError"), "unreachable"
    ),
    **dict.fromkeys(("ServiceRequestError", "ServiceResponseError", "TransportError", "gaierror"), "unreachable"),
    **dict.fromkeys(("IncompleteRead", "IncompleteReadError", "ProtocolError", "RequestException"), "unreachable"),
    "ResponseStreamingError": "unreachable",
    "ResponseParserError": "server",
    "FileNotFoundError": "missing",
    "FileExistsError": "exists",
    "PermissionError": "forbidden",
}
_WORDS: dict[Kind, str] = {
    "bucket": "the bucket, container or repository isn't there: check its name, or create it first",
    "conflict": "the store asked to try again, as somebody wrote there at the same moment",
    "throttled": "the store says that requests come too fast: let fewer replicas share its limit, or poll less often",
    "server": "the store failed by itself: look at its status page",
    "unreachable": "the store can't be reached, or cut the connection: check the endpoint, the network and any proxy",
    "timeout": "the store gave no answer in time: check the network",
    "forbidden": "the store refuses these credentials: give them the rights to read, write, list and delete below this "
    "prefix, or use others",
    "expired": "the credentials have expired: sign in again, or use ones that renew themselves",
    "credentials": "there are no credentials: set the environment variables, or write the profile, that the "
    "store's own tools use",
    "clock": "this machine's clock is too far off for the store's signatures: set it",
    "full": "the store has no room left, or its quota is used up",
}

_NAMED_SECRET = re.compile(
    r"""(?i)([\w-]*(?:secret|password|token|signature|\bsig|access_?key|account_?key)[\w-]*"""
    r"""(?:\s*=\s*|['"]\s*:\s*['"]?))[^\s,;'"&]+"""
)


def kind_of(error: BaseException) -> Kind:
    """What `error` means, by the first of its chain of causes that says anything, its innermost code first."""
    chain = list(_chain(error))
    for look in (_by_code, _by_status, _by_class):
        for each in reversed(chain):
            kind = look(each)
            if kind is not None:
                return kind
    return "other"


def describe(error: BaseException, kind: Kind, secrets: Iterable[str] = ()) -> str:
    """One sentence or two for people: what happened, what to do, and the client's own words without credentials."""
    innermost = list(_chain(error))[-1]
    own = redact(" ".join(str(innermost).split())[:300], secrets)
    words = _WORDS.get(kind, "the store refused")
    return f"{words} ({type(innermost).__name__}{': ' + own if own else ''})"


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """`text` without what could let somebody in: known secrets, query strings, userinfo, anything called a key."""
    for secret in (*secrets, *_secrets_of_environment()):
        if len(secret) > 3:
            text = text.replace(secret, "…")
    text = re.sub(r"(?<=://)[^/\s@'\"]+@", "…@", text)
    text = re.sub(r"\?[^\s'\"<>]+=[^\s'\"<>]*", "?…", text)
    return _NAMED_SECRET.sub(r"\1…", text)


def _secrets_of_environment() -> list[str]:
    name = re.compile(r"(?i)secret|token|password|account_key|connection_string")
    return [value for key, value in os.environ.items() if name.search(key)]


def _chain(error: BaseException) -> Iterable[BaseException]:
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen and len(seen) < 10:
        seen.append(current)
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return seen


def _by_code(error: BaseException) -> Kind | None:
    details: Any = error
    codes: list[Any] = [getattr(details, "error_code", None), getattr(details, "code", None)]
    codes.append(_answer(error, "Error", "Code"))
    codes.append(_header(error, "X-Error-Code"))
    for code in codes:
        name = str(getattr(code, "value", code)).lower()
        if name in _CODES:
            return _CODES[name]
    return None


def _by_status(error: BaseException) -> Kind | None:
    details: Any = error
    statuses: list[Any] = [
        getattr(details, "status_code", None),
        getattr(details, "status", None),
        getattr(details, "code", None),
        getattr(getattr(details, "response", None), "status_code", None),
        _answer(error, "ResponseMetadata", "HTTPStatusCode"),
        _answer(error, "Error", "Code"),
    ]
    for status in statuses:
        if str(status).isdigit() and int(status) in _STATUSES:
            return _STATUSES[int(status)]
    # gcsfs says 403 in words only.
    return "forbidden" if type(error) is OSError and str(error).startswith("Forbidden") else None


def _answer(error: BaseException, *names: str) -> Any:
    """Something out of a botocore error's parsed answer, a dict of dicts."""
    found: Any = getattr(error, "response", None)
    for name in names:
        found = cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None
    return found


def _header(error: BaseException, name: str) -> Any:
    headers: Any = getattr(getattr(error, "response", None), "headers", None)
    return headers.get(name) if hasattr(headers, "get") else None


def _by_class(error: BaseException) -> Kind | None:
    for each in type(error).__mro__:
        if each.__name__ in _CLASSES:
            return _CLASSES[each.__name__]
    return None
