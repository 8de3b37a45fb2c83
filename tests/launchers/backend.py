"""What the contract suite needs of a back end's stand-in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from composer_replication.diloco.serverless.jobs.job_executor import JobExecutor
from tests.launchers.engine import Container, Engine


@dataclass
class Backend:
    engine: Engine
    make: Callable[..., JobExecutor]  # the executor, with these settings over usual ones
    container: Callable[[str], Container]  # by the service's job id
    # settings that are refused before anything starts, and what the message says
    bad_settings: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # calls that the stand-in doesn't know
    has_vault: bool = True
    retries_itself: bool = False  # the service starts a preempted job again by itself
    lacks: dict[str, str] = field(default_factory=dict)  # tests of the suite that have no meaning here, and why
