"""Checks against the models that Azure's client is made of, and a certificate for a server on this machine."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import enum
import functools
import inspect
import ipaddress
import shutil
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@functools.lru_cache(maxsize=1)
def certificate() -> tuple[str, str]:
    """(certificate, key) files for 127.0.0.1, signed by itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder = Path(tempfile.mkdtemp(prefix="certificate-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain, pem = serialization.NoEncryption(), serialization.Encoding.PEM
    (folder / "key.pem").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return str(folder / "cert.pem"), str(folder / "key.pem")


def faults(value: Any, kind: Any, models: Any, place: str = "body") -> Iterator[str]:
    """What isn't of this kind, by the annotations of the client's models."""
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return
    if origin is typing.Union:
        if type(None) in of and value is None:
            return
        listed = [one for one in of if inspect.isclass(one) and issubclass(one, enum.Enum)]
        # Beside a list of values there is always str, for those of later versions: not for us.
        kinds = listed or [one for one in of if one is not type(None)]
        tried = [list(faults(value, one, models, place)) for one in kinds]
        yield from min(tried, key=len)
    elif origin is typing.Literal:
        if value not in [getattr(one, "value", one) for one in of]:
            yield f"{place}: {value!r} isn't one of {of}"
    elif origin in (dict, list):
        if not isinstance(value, origin):
            yield f"{place}: {value!r} isn't a {origin.__name__}"
            return
        for key, one in value.items() if origin is dict else enumerate(value):
            yield from faults(one, of[-1], models, f"{place}.{key}")
    elif getattr(kind, "_is_model", False):
        yield from _model_faults(value, kind, models, place)
    elif inspect.isclass(kind) and issubclass(kind, enum.Enum):
        if value not in [one.value for one in kind]:
            yield f"{place}: {value!r} isn't a {kind.__name__}"
    else:
        wire = {datetime.timedelta: str, datetime.datetime: str, float: (int, float)}.get(kind, kind)
        if not isinstance(value, wire):
            yield f"{place}: {value!r} isn't a {kind}"


def _model_faults(value: Any, kind: Any, models: Any, place: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{place}: {value!r} isn't a {kind.__name__}"
        return
    kind = type(kind._deserialize(dict(value), []))  # the kind that its discriminator names
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__[:-1]):
        known = {**vars(inspect.getmodule(base)), "_models": models, "_types": models}
        with contextlib.suppress(NameError):
            hints |= typing.get_type_hints(base, known)
    fields = {one._rest_name: name for name, one in kind._attr_to_rest_field.items()}
    for key, one in value.items():
        if key not in fields:
            yield f"{place}.{key} isn't a field of {kind.__name__}"
        else:
            yield from faults(one, hints[fields[key]], models, f"{place}.{key}")
