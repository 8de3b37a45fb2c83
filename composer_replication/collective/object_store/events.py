"""What passes between a round's state machine and whoever drives it: a job, then actions one way and events the other.

Invariant: frozen values; an action says all that is needed to carry it out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from composer_replication.collective.base import Report
from composer_replication.collective.object_store.pointers import ChunkFact, Ready, Roster, Verdict
from composer_replication.collective.object_store.roster import Plan, Policy

__all__ = [
    "Action",
    "Busy",
    "Closed",
    "Create",
    "Done",
    "Event",
    "Fail",
    "Failure",
    "Fetch",
    "Fetched",
    "Found",
    "Job",
    "Missing",
    "Read",
    "Reduce",
    "Reduced",
    "Sleep",
    "Spoiled",
    "Started",
    "Timing",
    "Unfetched",
    "Upload",
    "Uploaded",
    "Woke",
    "Written",
]

Failure = Literal["aborted", "diverged", "mismatch", "sealed", "corrupt", "behind", "store"]


# -- what is fixed for a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds on this replica's own monotonic clock; they may differ between replicas."""

    timeout_seconds: float
    takeover_seconds: float
    poll_seconds: float
    max_poll_seconds: float
    # Under skip, where enough are there: how long the others are waited for, if that is less than timeout_seconds.
    patience_seconds: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A round from one replica's side. `report` None: it looks on, and contributes nothing new."""

    plan: Plan
    policy: Policy
    timing: Timing
    replica: int
    incarnation: int
    layout: str
    report: Report | None
    wait: bool = True  # an onlooker: wait for the round to close, or say that it is open
    announce: bool = True  # an onlooker whom the next round may expect
    first_attempt: int = 0  # attempts before this one had failed for good when this process began


# -- actions


@dataclass(frozen=True, slots=True)
class Read:
    key: str


@dataclass(frozen=True, slots=True)
class Create:
    """Create-if-absent. Whether it was there already doesn't matter: it is read back next."""

    key: str
    data: bytes
    step: str  # ready | roster | mean | late: names the step for people and for fault tests


# Upload, Reduce and Fetch take long. They are begun when they are given first, and answered Busy until they are done;
# whoever wants the answer gives the same action again.


@dataclass(frozen=True, slots=True)
class Upload:
    """Encode and write this replica's chunks under this attempt."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Verify and average the chunks of a shard, from the members' readies (in roster order)."""

    attempt: int
    roster: Roster
    shard: int
    readies: tuple[Ready, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the committed chunks of a shard, verified. What this replica reduced itself will do if the hashes agree."""

    attempt: int
    roster: Roster
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Sleep:
    """At most so long: it may end as soon as something that was Busy is done."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Closed:
    """A closed round; the chunks of the mean in order."""

    attempt: int
    roster: Roster
    roster_hash: str
    chunks: tuple[ChunkFact, ...]
    # seconds after this replica's own contribution at which each other one's was seen, of those that took part
    lateness: Mapping[int, float] = field(default_factory=dict[int, float])
    incarnations: Mapping[int, int] = field(default_factory=dict[int, int])  # of the others, where their ready was read


@dataclass(frozen=True, slots=True)
class Done:
    closed: Closed | None  # None: open still, and the onlooker doesn't wait


@dataclass(frozen=True, slots=True)
class Fail:
    kind: Failure
    reason: str
    roster: Roster | None = None


Action = Read | Create | Upload | Reduce | Fetch | Sleep | Done | Fail


# -- events


@dataclass(frozen=True, slots=True)
class Started:
    pass


@dataclass(frozen=True, slots=True)
class Found:
    data: bytes


@dataclass(frozen=True, slots=True)
class Missing:
    pass


@dataclass(frozen=True, slots=True)
class Written:
    pass


@dataclass(frozen=True, slots=True)
class Busy:
    """It has begun, and isn't done."""


@dataclass(frozen=True, slots=True)
class Uploaded:
    chunks: tuple[ChunkFact, ...]


@dataclass(frozen=True, slots=True)
class Reduced:
    chunks: tuple[ChunkFact, ...]


@dataclass(frozen=True, slots=True)
class Spoiled:
    """A member's chunks can't be used: gone, or not what its ready says."""

    culprit: int
    reason: str
    gone: bool = False  # not there, rather than damaged


@dataclass(frozen=True, slots=True)
class Fetched:
    pass


@dataclass(frozen=True, slots=True)
class Unfetched:
    reason: str
    gone: bool  # not there, rather than damaged
    differs: bool = False  # direct: what this replica computes isn't what was committed


@dataclass(frozen=True, slots=True)
class Woke:
    pass


Event = Started | Found | Missing | Written | Busy | Uploaded | Reduced | Spoiled | Fetched | Unfetched | Woke
