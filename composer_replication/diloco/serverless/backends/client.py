"""Loading a service's client, asking it, and refusing what isn't on its lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeVar

from composer_replication.errors import ExecutorError, ReplicationError

__all__ = ["answer", "check_known", "client_module", "stop_if_running"]

T = TypeVar("T")


def client_module(name: str, extra: str) -> Any:
    """Import a client. Raises ExecutorError that names the extra which installs it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ExecutorError(f"{name} isn't installed ({error}): pip install 'composer-replication[{extra}]'") from error


def answer(call: Callable[[], T], translated: Callable[[Exception], Exception]) -> T:
    """What a call to the service gives, or its error in our words."""
    try:
        return call()
    except ReplicationError:  # in our words already
        raise
    except Exception as error:
        raise translated(error) from error


def stop_if_running(stop: Callable[[], object], running: Callable[[], bool]) -> None:
    """Ask a job to end. Services refuse that of one that has ended: their error counts only if it still runs."""
    try:
        stop()
    except ExecutorError:
        if running():
            raise


def check_known(what: str, value: str, known: Iterable[str]) -> None:
    """Raise ValueError if `value` isn't one of `known`, with the nearest that is."""
    names = sorted(known)
    if value in names:
        return
    spelt = {name.lower(): name for name in names}
    longer = sorted((name for name in spelt if value and value.lower() in name), key=len)  # a name cut short
    close = longer or get_close_matches(value.lower(), spelt, n=1, cutoff=0.5)
    hint = f" Did you mean {spelt[close[0]]!r}?" if close else f" There are: {', '.join(names)}."
    raise ValueError(f"{what} {value!r} isn't known.{hint}")
