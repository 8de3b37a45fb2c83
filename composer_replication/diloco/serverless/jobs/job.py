"""What a service is asked to run, and what it says of it.

Invariant: plain values. What is secret is in `secrets` and nowhere else, and is never shown.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Job", "Seen", "job_name", "masked", "run_slug"]

MASK = "***"


@dataclass(frozen=True)
class Job:
    """One submission of one replica."""

    name: str  # letters, digits and dashes; at most 40 characters
    run: str  # the same for all jobs of a run
    replica: int
    submission: int
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # variables, too: through the service's vault
    time_limit_seconds: int = 24 * 3600

    @property
    def labels(self) -> dict[str, str]:
        """Lower-case letters, digits and dashes only: what every service takes."""
        return {"composer-replication-run": self.run, "composer-replication-job": self.name}


@dataclass(frozen=True)
class Seen:
    """What a service says of a job, in our words (`state`, one of `STATES`) and in its own (`native`)."""

    state: str
    native: str
    reason: str = ""
    exit_code: int | None = None
    attempt: int = 1  # the service's own count of starts
    will_retry: bool = False  # the service starts it again by itself
    timed_out: bool = False  # it has ended because its time was over
    log_url: str | None = None


def run_slug(rendezvous_uri: str, name: str = "") -> str:
    """A short name of the run, the same for whoever launches it: at most 24 lower-case letters, digits and dashes."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:15].rstrip("-")
    digest = hashlib.sha256(rendezvous_uri.rstrip("/").encode()).hexdigest()[:8]
    return f"{words}-{digest}" if words and words[0].isalpha() else f"run-{digest}"


def job_name(run: str, replica: int, submission: int) -> str:
    """At most 40 characters: 24 of the run, the replica's number and the submission's."""
    return f"{run}-r{replica}-{submission}"


def masked(payload: Any, secrets: Iterable[str]) -> Any:
    """The same nested value, as plain lists and dicts, with every occurrence of a secret blotted out."""
    hidden = sorted((value for value in secrets if value), key=len, reverse=True)

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            for secret in hidden:
                value = value.replace(secret, MASK)
            return value
        if isinstance(value, Mapping):
            return {clean(key): clean(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(one) for one in value]
        return value

    return clean(payload)
