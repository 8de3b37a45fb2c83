"""Replicas as processes of this machine: one process, one log file and one supervising thread each.

Invariant: a replica has at most one live process, and none once `cancel` has returned. A replica whose process was
killed is started again, up to a budget; one that ended by its own decision isn't.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from composer_replication.diloco.serverless.executor import BaseExecutor
from composer_replication.diloco.serverless.exit_codes import Exit, again, describe
from composer_replication.diloco.serverless.handle import ENDED, ReplicaHandle, ReplicaResult, preemption_metrics
from composer_replication.diloco.serverless.jobs.verdict import Budgets
from composer_replication.diloco.serverless.spec import ReplicaSpec, entrypoint_command, merged_environment
from composer_replication.errors import ExecutorError

__all__ = ["LocalProcessExecutor"]

RESULT_FILE = "result.json"
_TAIL_SECONDS = 0.1


@dataclass
class _Job:
    spec: ReplicaSpec
    folder: Path
    changed: threading.Condition
    process: subprocess.Popen[bytes] | None = None
    state: str = "running"
    preemptions: int = 0
    errors: int = 0
    exit_code: int | None = None
    asked_to_stop: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def restarts(self) -> int:
        return self.preemptions + self.errors


class LocalProcessExecutor(BaseExecutor):
    """Runs each replica as `python -m composer_replication.diloco.serverless.replica_entrypoint`.

    Args:
        output: folder for the replicas' logs, checkpoints and results; None for a new temporary one.
        restarts: how often one replica may be started again after a kill, a preemption or a store's failure.
        error_restarts: and how often after an exception in its own code.
        backoff_seconds: pause before the first restart; doubles with each, to ten minutes.
        grace_seconds: between asking a replica to stop and killing it.
        env: environment variables for all replicas (a spec's `extra_env` goes over them).
        python: the interpreter; None for this one.

    Processes end when the program that started them ends, however it does.
    """

    def __init__(
        self,
        *,
        output: str | Path | None = None,
        restarts: int = 3,
        error_restarts: int = 0,
        backoff_seconds: float = 1.0,
        grace_seconds: float = 20.0,
        env: Mapping[str, str] | None = None,
        python: str | None = None,
    ) -> None:
        self.budgets = Budgets(restarts, error_restarts, backoff_seconds)
        if grace_seconds < 0:
            raise ValueError(f"grace_seconds must be 0 or more, got {grace_seconds}")
        self.output = Path(
            output if output is not None else tempfile.mkdtemp(prefix="composer-replication-")
        ).absolute()
        self.grace_seconds = grace_seconds
        self.python = python
        self._env = dict(env or {})
        self._jobs: dict[str, _Job] = {}
        self._changed = threading.Condition()

    @property
    def backend_name(self) -> str:
        return "local"

    def command(self, spec: ReplicaSpec, folder: Path) -> list[str]:
        """What is run for one replica. Its folder gets the log, the checkpoints and the result."""
        words = entrypoint_command(spec, self.python)
        return words if spec.command else [*words, f"--output={folder}", "--stop-with-launcher"]

    def check_specs(self, specs: list[ReplicaSpec]) -> None:
        super().check_specs(specs)
        busy = {job.spec.replica_id for job in self._jobs.values() if job.state not in ENDED}
        for spec in specs:
            if spec.replica_id in busy:
                raise ValueError(f"replica {spec.replica_id} is already running here")

    def launch_replicas(self, specs: list[ReplicaSpec]) -> list[ReplicaHandle]:
        self.check_specs(specs)
        return super().launch_replicas(specs)

    def _submit(self, spec: ReplicaSpec) -> ReplicaHandle:
        folder = self.output / f"replica-{spec.replica_id}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULT_FILE).unlink(missing_ok=True)  # of an earlier launch in the same folder
        job = _Job(spec, folder, self._changed)
        job_id = f"{spec.replica_id}-{len(self._jobs)}"
        self._start(job)
        self._jobs[job_id] = job
        threading.Thread(target=self._supervise, args=(job,), name=f"replica-{spec.replica_id}", daemon=True).start()
        return self._handle(job_id, job)

    def _start(self, job: _Job) -> None:
        with job.log.open("ab") as log:
            job.process = subprocess.Popen(
                self.command(job.spec, job.folder),
                stdin=subprocess.PIPE,  # never written to: the replica sees its end when this program is gone
                stdout=log,
                stderr=subprocess.STDOUT,
                env=merged_environment(job.spec, self._env),
                start_new_session=True,  # Ctrl-C reaches the launcher only, which then stops the replicas in order
            )

    def _supervise(self, job: _Job) -> None:
        while True:
            assert job.process is not None
            code = _wait_and_clear_group(job.process)
            if job.process.stdin is not None:
                job.process.stdin.close()
            with self._changed:
                job.exit_code = code
                job.state = self._state_after(job, code)
                self._changed.notify_all()
                if job.state != "restarting":
                    return
                pause = self.budgets.pause_seconds(job.restarts)
                if again(code) == "error":
                    job.errors += 1
                    count = f"{job.errors} of {self.budgets.error_restarts}"
                else:
                    job.preemptions += 1
                    count = f"{job.preemptions} of {self.budgets.restarts}"
            self._note(job, f"{describe(code)}; starting it again in {pause:g} s ({count})")
            with self._changed:
                self._changed.wait_for(lambda: job.asked_to_stop, timeout=pause)
                if job.asked_to_stop:
                    job.state = "cancelled"
                else:
                    try:
                        self._start(job)
                        job.state = "running"
                    except OSError as error:
                        self._note(job, f"it could not be started again: {error}")
                        job.state = "failed"
                self._changed.notify_all()
                if job.state != "running":
                    return

    def _state_after(self, job: _Job, code: int) -> str:
        if code == Exit.COMPLETED:
            return "completed"
        if job.asked_to_stop:
            return "cancelled"
        if self.budgets.allow(again(code), preemptions=job.preemptions, errors=job.errors):
            return "restarting"
        return "preempted" if code == Exit.PREEMPTED else "failed"

    def _note(self, job: _Job, text: str) -> None:
        job.notes.append(text)
        with job.log.open("a", encoding="utf-8") as log:
            log.write(f"[launcher] replica {job.spec.replica_id}: {text}\n")

    def _handle(self, job_id: str, job: _Job) -> ReplicaHandle:
        return ReplicaHandle(
            replica_id=job.spec.replica_id,
            backend=self.backend_name,
            job_id=job_id,
            log_url=job.log.as_uri(),
            state="preempted" if job.state == "restarting" else job.state,
            attempt=job.restarts + 1,
            exit_code=job.exit_code,
            will_retry=job.state == "restarting",
            native=job.state,
            reason=describe(job.exit_code) if job.exit_code else "",
            preemptions=job.preemptions,
            errors=job.errors,
        )

    @property
    def job_ids(self) -> list[str]:
        """Of all that was started here."""
        return list(self._jobs)

    def handle(self, job_id: str) -> ReplicaHandle:
        """The present handle of a job that was started here. Raises KeyError."""
        with self._changed:
            return self._handle(job_id, self._jobs[job_id])

    def _job(self, handle: ReplicaHandle) -> _Job:
        try:
            return self._jobs[handle.job_id]
        except KeyError:
            raise ExecutorError(f"replica {handle.replica_id}: job {handle.job_id!r} was not started here") from None

    def poll(self, handles: list[ReplicaHandle]) -> list[ReplicaHandle]:
        with self._changed:
            return [self._handle(h.job_id, self._job(h)) if h.job_id else replace(h, state="failed") for h in handles]

    def wait(self, handles: list[ReplicaHandle], seconds: float) -> None:
        """Return after `seconds`, or as soon as all have ended."""
        jobs = [self._job(handle) for handle in handles if handle.job_id]
        with self._changed:
            self._changed.wait_for(lambda: all(job.state in ENDED for job in jobs), timeout=seconds)

    def process_id(self, handle: ReplicaHandle) -> int | None:
        """Of the replica's present process; None between two processes and after the end."""
        process = self._job(handle).process
        return process.pid if process is not None and process.poll() is None else None

    def stream_logs(self, handle: ReplicaHandle, *, after: int = 0) -> Iterator[str]:
        """The replica's output by lines, through all its processes, until it has ended; without the first `after`."""
        yield from itertools.islice(self._lines(handle), after, None)

    def _lines(self, handle: ReplicaHandle) -> Iterator[str]:
        if not handle.job_id:
            return
        job = self._job(handle)
        with job.log.open(encoding="utf-8", errors="replace") as log:
            partial = ""
            while True:
                ended = job.state in ENDED  # looked at before reading, so that nothing is missed after the end
                partial += log.read()
                *lines, partial = partial.split("\n")
                yield from lines
                if ended:
                    if partial:
                        yield partial
                    return
                with self._changed:
                    self._changed.wait_for(lambda: job.state in ENDED, timeout=_TAIL_SECONDS)

    def last_lines(self, handle: ReplicaHandle, count: int = 20) -> list[str]:
        """The end of the replica's log."""
        try:
            with self._job(handle).log.open("rb") as log:
                _skip_to_last(log, 64 * 1024)
                return log.read().decode("utf-8", errors="replace").splitlines()[-count:]
        except OSError:
            return []

    def cancel(self, handles: list[ReplicaHandle]) -> None:
        jobs = [self._job(handle) for handle in handles if handle.job_id]
        with self._changed:
            for job in jobs:
                job.asked_to_stop = True
                if job.state == "running" and job.process is not None:
                    job.process.send_signal(signal.SIGTERM)  # does nothing when it has just ended
            self._changed.notify_all()
        deadline = time.monotonic() + self.grace_seconds

        def all_ended() -> bool:
            return all(job.state in ENDED for job in jobs)

        with self._changed:
            if self._changed.wait_for(all_ended, timeout=max(0.0, deadline - time.monotonic())):
                return
        for job in jobs:
            if job.state not in ENDED and job.process is not None:
                self._note(job, f"it didn't stop within {self.grace_seconds:g} s and is killed")
                job.process.kill()
        with self._changed:
            self._changed.wait_for(all_ended)

    def _result(self, handle: ReplicaHandle) -> ReplicaResult:
        job = self._job(handle)
        values = _read_result(job.folder / RESULT_FILE)
        checkpoint = values.pop("final_checkpoint_uri", None)
        metrics = {**values, "restarts": job.restarts, "exit_code": job.exit_code}
        metrics |= preemption_metrics(handle)
        if job.state != "completed":
            metrics["error"] = describe(job.exit_code) if job.exit_code is not None else "it was never started"
        return ReplicaResult(handle.replica_id, job.state, checkpoint, metrics)


def _wait_and_clear_group(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process; unless it ended well, kill what it left behind (data-loading workers), then reap it.

    In this order, because its number names the group and stays its own until it is reaped.
    """
    if not hasattr(os, "waitid"):  # macOS, before Python 3.13
        return process.wait()
    with contextlib.suppress(ChildProcessError):  # reaped already, by a look at its state
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if ended is not None and (ended.si_code != os.CLD_EXITED or ended.si_status != 0):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _read_result(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or cut short by a kill
        return {}
    return values if isinstance(values, dict) else {}


def _skip_to_last(file: IO[bytes], size: int) -> None:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - size))
