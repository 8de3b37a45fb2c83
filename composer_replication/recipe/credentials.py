"""What looks like a credential, and that it has no place in a recipe, which is copied and logged, wherever it stands.

Invariant: what a recipe may not hold in a variable is what `looks_secret` says of one. No message of this module shows
the value that it refuses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from composer_replication.errors import RecipeError
from composer_replication.recipe.messages import Place

__all__ = ["looks_secret", "refuse_credentials"]

_CREDENTIAL = re.compile(
    r"(^|_)(password|passwd|passphrase|secret|secrets|credential|credentials|api_?key|access_?key|private_?key"
    r"|key_?id|account_?key|connection_?string|sas_?token|(hf|auth|access|session|bearer|api|security)_?token)($|_)"
    r"|^token$",
    re.IGNORECASE,
)
# In names of environment variables, where a shorter word is enough.
_SECRET_VARIABLE = re.compile(
    r"(^|_)(pat|pass|pw|keys?|tokens?|creds?|sas|cookie)($|_)|token$|password|passwd|passphrase|secret|credential|apikey",
    re.IGNORECASE,
)
# Part of a connection string.
_SECRET_PART = re.compile(
    r"(^|[;,&?\s])(password|passwd|pwd|account_?key|access_?key|secret_?key|api_?key|shared_?access_?(key|signature))"
    r"\s*=\s*[^\s;]",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"[^/.~:@][^/:@]+:[^@]*@")  # name:password@host, where a path or a scheme should begin
_SIGNATURE = re.compile(r"^sig$|signature|^x-(amz|goog)-|accesskeyid$", re.IGNORECASE)  # of pre-signed links
_OPTIONS = re.compile(r"(executor|fleet\.groups\.\d+)\.options\.")
_ENV = re.compile(r"(executor|(executor|fleet\.groups\.\d+)\.options)\.env\.")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
_LEAD = "looks like a credential: recipes are copied and logged. Set it in the environment of"


def looks_secret(variable: str, value: str = "") -> bool:
    """Is this environment variable likely to hold a credential, by its name or by what it holds?"""
    named = _CREDENTIAL.search(variable) or _SECRET_VARIABLE.search(variable)
    return bool(named or _SECRET_PART.search(value) or _uri_holds_secret(value))


def refuse_credentials(values: Any, prefix: str, place: Place) -> None:
    """Raise RecipeError for the first credential in these nested values; `prefix` is their key with a dot after it."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            dotted = f"{prefix}{key}"
            if _ENV.fullmatch(prefix):
                if looks_secret(str(key), str(value)):
                    raise RecipeError(
                        f"{place.of(dotted)} {_LEAD} the launcher instead, which passes it on to the replicas that run "
                        "here; for those elsewhere name the variable in executor.options.secrets"
                    )
            elif _CREDENTIAL.search(str(key)) and not (_OPTIONS.match(prefix) and _names(str(key), value)):
                hint = ", and name the variable: secrets: [NAME]" if _OPTIONS.match(prefix) else ""
                raise RecipeError(
                    f"{place.of(dotted)} {_LEAD} the process instead (cloud clients read it from there){hint}"
                )
            refuse_credentials(value, f"{dotted}.", place)
    elif isinstance(values, (list, tuple)):
        for index, value in enumerate(values):
            refuse_credentials(value, f"{prefix}{index}.", place)
    elif isinstance(values, str):
        _refuse_text(values, prefix, place)


def _names(key: str, value: Any) -> bool:
    """Names of variables or secrets: a list, as `secrets: [HF_TOKEN]` is, or one where the key says so."""
    named = [value] if key.endswith("_name") else value
    return isinstance(named, (list, tuple)) and all(isinstance(one, str) and _NAME.fullmatch(one) for one in named)


def _refuse_text(text: str, prefix: str, place: Place) -> None:
    place_name = prefix in ("store.uri.", "store.control.")
    if _SECRET_PART.search(text) or (place_name and "://" not in text and _LOGIN.match(text)):
        raise RecipeError(
            f"{place.of(prefix[:-1])} holds what looks like a password: set it in the environment instead"
        )
    if _uri_holds_secret(text):
        raise RecipeError(
            f"{place.of(prefix[:-1])}: the URI holds a password or a signature; set it in the environment instead"
        )


def _uri_holds_secret(text: str) -> bool:
    head, separator, rest = text.partition("://")
    if not separator or " " in head:
        return False
    authority, query = rest.split("/", 1)[0], rest.partition("?")[2]
    names = [part.partition("=")[0] for part in query.replace(";", "&").split("&")]
    # A secret with a slash in it ends the authority early: what follows the colon is then no port.
    cut = "@" in rest and not re.fullmatch(r"[^:]*(:\d*)?", authority)
    signed = any(_CREDENTIAL.search(name) or _SIGNATURE.search(name) for name in names)
    return cut or signed or ":" in authority.rpartition("@")[0]
