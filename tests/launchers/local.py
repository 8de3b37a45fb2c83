"""`local` under the same contract: the processes themselves, with no service between.

What has no meaning there is listed in `lacks`, with the reason.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from composer_replication.diloco.serverless import LocalProcessExecutor, ReplicaHandle
from tests.launchers.backend import Backend
from tests.launchers.engine import Engine

NO_SERVICE = "no service stands between: nothing refuses, throttles, or goes away"
ENDS = "processes end with their launcher; the next one starts them from their checkpoints (tests/cli/test_resume.py)"
LACKS = {
    "test_a_partial_launch_gives_all_handles_and_can_be_cancelled": NO_SERVICE + "; tests/serverless/test_executor.py",
    "test_a_full_service_is_asked_again": NO_SERVICE,
    "test_a_service_that_does_not_answer_leaves_the_state_as_it_was": NO_SERVICE,
    "test_launching_twice_starts_nothing_twice": ENDS,
    "test_another_launcher_takes_over": ENDS,
    "test_preemptions_beyond_the_budget_are_final": "a killed process has failed (tests/serverless/test_executor.py)",
    "test_its_time_runs_out": "a process has no time limit",
    "test_secrets_arrive_and_are_seen_nowhere": "replicas get the launcher's own environment",
    "test_what_cannot_work_is_said_before_anything_starts": "tests/serverless/test_executor.py",
}


class Process:
    """A replica's process as the suite looks at containers."""

    def __init__(self, executor: LocalProcessExecutor, handle: ReplicaHandle) -> None:
        self._executor, self._handle = executor, handle

    @property
    def lines(self) -> list[str]:
        return Path(urlsplit(self._handle.log_url or "").path).read_text(encoding="utf-8").splitlines()

    @property
    def ended(self) -> bool:
        return self._executor.poll([self._handle])[0].ended

    def kill(self) -> None:
        pid = self._executor.process_id(self._handle)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


class Processes(Engine):
    def wait_for(self, condition: Callable[[], Any], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.01)

    def take_machine(self, container: Any, *, retried: bool = False) -> None:
        container.kill()


@contextlib.contextmanager
def backend(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    made: list[LocalProcessExecutor] = []

    def make(**settings: Any) -> LocalProcessExecutor:
        settings.pop("max_concurrent_launches", None)
        made.append(LocalProcessExecutor(grace_seconds=20.0, **settings))
        return made[-1]

    def container(job_id: str) -> Any:
        executor = next(one for one in made if job_id in one.job_ids)
        return Process(executor, executor.handle(job_id))

    yield Backend(Processes(), make=make, container=container, lacks=LACKS)  # type: ignore[arg-type]
