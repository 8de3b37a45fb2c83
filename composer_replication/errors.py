"""Every error this package raises on purpose.

    ReplicationError
    ├── StoreError              the store refused, failed or can't be reached
    │   ├── ObjectMissing       there is no object under that key
    │   ├── ObjectExists        create-if-absent found one
    │   ├── StoreRefused        it won't do that, however often it is asked: rights, expired credentials, no bucket
    │   ├── StoreUnavailable    throttled, failing or unreachable for longer than operations are tried again
    │   └── ObjectCorrupt       bytes that don't match their size, hash or header
    │       └── SignatureError  not signed with this run's key for where it lies
    ├── FleetError              this process can't be part of that fleet
    │   ├── FleetMismatch       model, settings, codec or wire version differ: says which
    │   ├── ReplicaTaken        a live process already holds this replica id
    │   └── Fenced              a newer process has taken this replica id over: stop, don't restart
    ├── RoundError              a round that can't be used
    │   ├── RoundAborted        strict: replicas were missing at the deadline; all replicas raise alike
    │   ├── RoundTimeout        the store or the others gave no answer in time
    │   └── Diverged            this replica's state isn't the fleet's
    ├── RankLost                another process of this replica has failed, died or gone silent
    ├── Interrupted             asked to stop (SIGTERM) while waiting for the others
    ├── RecipeError             a recipe that can't be run (also a ValueError)
    └── ExecutorError           a replica could not be started, or has died for good

A user's bad setting is a plain ValueError at construction. `assert` is for our own mistakes.
"""

from __future__ import annotations

__all__ = [
    "Diverged",
    "ExecutorError",
    "Fenced",
    "FleetError",
    "FleetMismatch",
    "Interrupted",
    "ObjectCorrupt",
    "ObjectExists",
    "ObjectMissing",
    "RankLost",
    "RecipeError",
    "ReplicaTaken",
    "ReplicationError",
    "RoundAborted",
    "RoundError",
    "RoundTimeout",
    "SignatureError",
    "StoreError",
    "StoreRefused",
    "StoreUnavailable",
]


class ReplicationError(Exception):
    """The root: everything this package raises on purpose."""


class StoreError(ReplicationError):
    """The store refused, failed or can't be reached."""


class ObjectMissing(StoreError):
    """There is no object under that key."""


class ObjectExists(StoreError):
    """Create-if-absent found an object under that key."""


class ObjectCorrupt(StoreError):
    """Bytes that don't match their size, hash or header."""


class SignatureError(ObjectCorrupt):
    """An object that isn't signed with this run's key for the place where it lies."""


class StoreRefused(StoreError):
    """The store won't do that, however often it is asked: rights, expired credentials, no such bucket."""


class StoreUnavailable(StoreError):
    """The store was throttled, failing or unreachable for longer than an operation is tried again."""


class FleetError(ReplicationError):
    """This process can't be part of that fleet."""


class FleetMismatch(FleetError):
    """Model, settings, codec or wire version differ from the fleet's."""


class ReplicaTaken(FleetError):
    """A live process already holds this replica id."""


class Fenced(FleetError):
    """A newer process has taken this replica id over."""


class RoundError(ReplicationError):
    """A round that can't be used."""


class RoundAborted(RoundError):
    """Strict policy: replicas were missing at the deadline. Every replica raises this alike."""


class RoundTimeout(RoundError):
    """The store, or the other replicas, gave no answer in time."""


class Diverged(RoundError):
    """This replica's anchor, momentum or controller isn't the fleet's."""


class RankLost(ReplicationError):
    """Another process of this replica has failed, died or gone silent."""


class Interrupted(ReplicationError):
    """The process was asked to stop while it waited for the others."""


class RecipeError(ReplicationError, ValueError):
    """A recipe that can't be run."""


class ExecutorError(ReplicationError):
    """A replica could not be started, or has died for good."""
