"""Where the replicas meet: a store that is opened when a fit begins, or a collective that the caller has made.

Invariant: nothing is opened before a fit begins, so that building an adapter has no effect.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from composer_replication.collective.base import Collective
from composer_replication.isolate import STORE, Identity

__all__ = ["Meet", "given_collective", "open_store"]

Meet = Callable[[int], Collective]  # number of the fit, from 0 -> the collective of its run


def given_collective(
    collective: Collective | Meet, *, replica: int | None, replicas: int | None
) -> tuple[Identity, Meet]:
    """Whose place a ready collective is, and how to get it. A function is called at each fit's start."""
    if callable(collective):
        if replica is None or replicas is None:
            raise ValueError("collective is a function: say replica= and replicas=, too")
        return Identity(replica=replica, replicas=replicas), collective
    fleet = collective.fleet
    identity = Identity(replica=collective.replica, replicas=len(fleet))
    if (replica, replicas) not in ((None, None), (identity.replica, identity.replicas)):
        raise ValueError(f"the collective is that of {identity}, not of replica {replica} of {replicas}")
    used: list[int] = []

    def once(fit: int) -> Collective:
        if used:
            raise ValueError("a collective serves one fit: give a function that makes one for each")
        used.append(fit)
        return collective

    return identity, once


def open_store(
    store: Any, identity: Identity, *, control: Any, run: str, interrupted: Callable[[], bool], **settings: Any
) -> Meet:
    """Opens the run of a fit inside `store`: a URI, or an open store; None: COMPOSER_REPLICATION_STORE."""
    where = _place("store", store if store is not None else os.environ.get(STORE))
    if where is None:
        raise ValueError(f"no store: say where the replicas meet, e.g. store='file:///shared/run1', or set {STORE}")
    given = {"control": _place("control", control), **settings}
    given = {name: value for name, value in given.items() if value is not None}

    def meet(fit: int) -> Collective:
        from composer_replication.collective.object_store import ObjectStoreCollective

        name = run if fit == 0 else f"{run or 'run'}-fit{fit + 1}"
        return ObjectStoreCollective(
            where, replica=identity.replica, replicas=identity.replicas, run=name, interrupted=interrupted, **given
        )

    return meet


def _place(name: str, value: Any) -> Any:
    """A URI or an open store; None if nothing was given."""
    where = os.fspath(value) if isinstance(value, os.PathLike) else value
    if where is None or (isinstance(where, str) and not where.strip()):
        return None
    if not isinstance(where, str) and not hasattr(where, "put_if_absent"):
        raise ValueError(f"{name} must be a URI or an open store, got {where!r}")
    if isinstance(where, str) and "\0" in where:
        raise ValueError(f"{name} holds a NUL byte, which no place can have in its name")
    return where
