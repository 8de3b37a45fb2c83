"""An executor over any service that runs containers: names, retries, budgets, marks, logs. A back end adds six methods.

Invariant: all state is in the handles, the service and the store, so that a launcher can die and another go on. A
replica's jobs are numbered; their names follow from the store's URI, so that no launcher submits one twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from composer_replication.diloco.serverless.executor import BackendUnavailable, BaseExecutor, JobGone
from composer_replication.diloco.serverless.handle import ReplicaHandle, ReplicaResult, preemption_metrics
from composer_replication.diloco.serverless.jobs.container import RECIPE
from composer_replication.diloco.serverless.jobs.job import Job, Seen, job_name, masked, run_slug
from composer_replication.diloco.serverless.jobs.marks import CLAIM_SECONDS, Mark, Marks
from composer_replication.diloco.serverless.jobs.output import replica_output, shipped_output
from composer_replication.diloco.serverless.jobs.verdict import SILENT_SECONDS, Budgets, judge, next_job
from composer_replication.diloco.serverless.spec import ReplicaSpec, check_fleet, replica_command
from composer_replication.errors import ExecutorError, ReplicationError, StoreError
from composer_replication.recipe.credentials import looks_secret
from composer_replication.store import open_store

__all__ = ["JobExecutor"]

logger = logging.getLogger(__name__)

IMAGE = "COMPOSER_REPLICATION_IMAGE"
CONTAINER = "composer_replication.diloco.serverless.jobs.container"
_T = TypeVar("_T")
_MOST_HOURS = 100_000  # eleven years
_CLAIM_PAUSE_SECONDS = 3.0


class JobExecutor(BaseExecutor):
    """What all services have in common. Their adapters say more; these settings go for each:

    Args:
        image: the container image, by reference; it holds this package (`docker/`). None: that in the environment's
            `COMPOSER_REPLICATION_IMAGE`, if there is one.
        time_limit_hours: of one job. None: the service's longest.
        env: variables for all replicas (a spec's `extra_env` goes over them).
        secrets: names of variables of *this* process that replicas need, such as `AWS_SECRET_ACCESS_KEY`. They go
            through the service's vault, never into arguments, handles, logs or the store.
        requirements: what pip installs in the container before the replica starts.
        code: an archive made by `pack_code`, which becomes the replica's working directory.
        output: the replica's folder for checkpoints, if a volume is mounted there; else it is lost with the machine,
            and a replica that is started again goes on from the fleet's state in the store.
        restarts: how often one replica may be submitted again after a preemption, a kill or a store's failure.
        error_restarts: and how often after an exception in its own code.
        backoff_seconds: before the first of these; doubles with each.
        max_concurrent_launches: how many submissions are under way at once.
        run_name: part of the jobs' names.
    """

    # Said by each back end.
    backend_name: str = ""  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]
    extra: str = ""  # of this package, which installs the client
    longest_seconds: int = 24 * 3600
    name_limit: int = 63
    has_vault: bool = True  # can the service hand over secrets?
    ship_logs: bool = False  # the service keeps no output: the replica's goes into the store
    relaunches_at_limit: bool = False  # a longer time limit means several jobs, one after another

    poll_seconds = 10.0
    submit_attempts = 5
    log_pause_seconds: float = 2.0

    def __init__(
        self,
        *,
        image: str | None = None,
        time_limit_hours: float | None = None,
        env: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
        requirements: Sequence[str] = (),
        code: bytes | None = None,
        output: str | None = None,
        restarts: int = 3,
        error_restarts: int = 0,
        backoff_seconds: float = 10.0,
        max_concurrent_launches: int = 4,
        run_name: str = "",
    ) -> None:
        budgets = Budgets(restarts, error_restarts, backoff_seconds)
        if max_concurrent_launches < 1:
            raise ValueError(f"max_concurrent_launches must be at least 1, got {max_concurrent_launches}")
        self.image = image or os.environ.get(IMAGE)
        self.env = dict(env or {})
        self.secrets = tuple(secrets)
        self.requirements = tuple(requirements)
        self.code = code
        self.output = output
        self.max_concurrent_launches = max_concurrent_launches
        self.run_name = run_name
        self.time_limit_seconds = self._limit(time_limit_hours)
        # A replica that is to run for longer than one job may is submitted again each time, beyond other restarts.
        more = math.ceil((time_limit_hours or 0) * 3600 / self.longest_seconds) - 1
        self.budgets = replace(budgets, restarts=restarts + max(0, more))
        self._specs: dict[int, ReplicaSpec] = {}
        self._marks: Marks | None = None
        self._uri: str | None = None

    # -- what a back end adds ------------------------------------------------------------------------------------------

    @abstractmethod
    def check(self, job: Job) -> None:
        """Raise ValueError or ExecutorError for what the service would refuse. Starts nothing; may ask the service."""

    @abstractmethod
    def payload(self, job: Job) -> dict[str, Any]:
        """The request that `submit_job` sends, as plain values."""

    @abstractmethod
    def submit_job(self, job: Job) -> str:
        """Send it; returns the service's id. Raises QuotaExceeded, BackendUnavailable, ExecutorError."""

    @abstractmethod
    def find_job(self, job: Job) -> str | None:
        """The id of the job of this name, if the service has one, whether it runs or has ended."""

    @abstractmethod
    def look(self, job_id: str) -> Seen:
        """How the service says the job stands. Raises BackendUnavailable, JobGone."""

    @abstractmethod
    def stop_job(self, job_id: str) -> None:
        """Ask it to end; harmless if it has. Raises JobGone for one that the service doesn't know."""

    @abstractmethod
    def follow(self, job_id: str) -> Iterator[str]:
        """The job's output by lines, from the first, until it has ended or the service ends the connection."""

    # -- launching -----------------------------------------------------------------------------------------------------

    def launch_replicas(self, specs: list[ReplicaSpec]) -> list[ReplicaHandle]:
        """Check everything, then submit what isn't there. Raises ValueError, ExecutorError, StoreError before that."""
        check_fleet(specs)
        if not specs:
            return []
        open_store(specs[0].rendezvous_uri)  # first: a URI with a password in it is shown to no service
        self._check(specs)
        self.marks(specs[0].rendezvous_uri)
        self._specs |= {spec.replica_id: spec for spec in specs}
        return super().launch_replicas(specs)

    def job(self, spec: ReplicaSpec, submission: int = 0) -> Job:
        """What the service is asked for. Reads the recipe and the secrets; sends nothing."""
        run = run_slug(spec.rendezvous_uri, self.run_name)
        name = job_name(run, spec.replica_id, submission)
        words = ["python", "-m", CONTAINER, f"--job={name}", f"--replica-id={spec.replica_id}"]
        words += [f"--num-replicas={spec.num_replicas}", f"--rendezvous-uri={spec.rendezvous_uri}"]
        if spec.recipe is not None:
            words.append(f"--recipe-sha256={_sha256(Path(spec.recipe).read_bytes())}")
        if self.code is not None:
            words.append(f"--code-sha256={_sha256(self.code)}")
        words += [f"--requirement={one}" for one in self.requirements]
        if self.output:
            words.append(f"--output={self.output}")
        if self.ship_logs:
            words.append("--ship-logs")
        words += ["--", *replica_command(spec, recipe=RECIPE)]
        env = {**self.env, **(spec.extra_env or {})}
        secrets = {name: self._secret(name) for name in self.secrets}
        secrets |= {name: env.pop(name) for name in sorted(env) if looks_secret(name, env[name])}
        return Job(
            name=name,
            run=run,
            replica=spec.replica_id,
            submission=submission,
            command=tuple(words),
            env=env,
            secrets=secrets,
            time_limit_seconds=self.time_limit_seconds,
        )

    def shown_payload(self, spec: ReplicaSpec, submission: int = 0) -> dict[str, Any]:
        """The request for this replica with secrets masked: what `launch --dry-run` prints."""
        job = self.job(spec, submission)
        return masked(self.payload(job), job.secrets.values())

    def check_specs(self, specs: list[ReplicaSpec]) -> None:
        """Raise what `launch_replicas` would raise before it starts anything."""
        check_fleet(specs)
        self._check(specs)

    def _check(self, specs: Sequence[ReplicaSpec]) -> None:
        for spec in specs:
            job = self.job(spec)
            if len(job.name) + 4 > self.name_limit:
                raise ValueError(f"{self.backend_name}: the job's name {job.name!r} is too long: shorten run_name")
            if any(looks_secret("", word) for word in (*self.requirements, *spec.overrides)):
                raise ValueError(
                    "requirements or overrides hold what looks like a password, and whoever may look at the job sees "
                    "its arguments: name a variable in secrets, such as PIP_INDEX_URL, instead"
                )
            for name in (*job.env, *job.secrets):
                if not name.replace("_", "a").isalnum() or name[0].isdigit():
                    raise ValueError(f"{name!r} can't be the name of an environment variable")
            if job.secrets and not self.has_vault:
                raise ValueError(
                    f"{self.backend_name} shows a job's variables to whoever may look at the job, so "
                    f"{', '.join(sorted(job.secrets))} can't be handed over: give the job's identity access to the "
                    "store instead (composer-replication policy), or keep them in the cloud's secret manager"
                )
            self.check(job)

    def _limit(self, hours: float | None) -> int:
        if hours is None:
            return self.longest_seconds
        if not 0 < hours <= _MOST_HOURS:
            raise ValueError(f"time_limit_hours must be more than 0 and at most {_MOST_HOURS}, got {hours}")
        seconds = int(hours * 3600)
        if seconds > self.longest_seconds and not self.relaunches_at_limit:
            raise ValueError(
                f"time_limit_hours={hours:g}: {self.backend_name} runs a job for {self.longest_seconds / 3600:g} hours "
                "at most; a replica whose time is over is submitted again and goes on from the store's checkpoint"
            )
        return max(60, min(seconds, self.longest_seconds))

    def _secret(self, name: str) -> str:
        value = os.environ.get(name)
        if not value:
            raise ValueError(f"secrets: {name} isn't set in this environment")
        return value

    def _submit(self, spec: ReplicaSpec) -> ReplicaHandle:
        marks = self.marks(spec.rendezvous_uri)
        known = marks.handle(spec.replica_id)
        if known is not None and known.job_id:
            if known.backend == self.backend_name:
                known = self._look_at(known)
                if not known.ended or known.state == "completed":
                    return self._saved(known)
            elif not known.ended:
                logger.warning("replica %d had a job on %s, which may still run", spec.replica_id, known.backend)
        if known is None:  # or what is there can't be read
            first = int(marks.jobs().get(spec.replica_id, "-0").rpartition("-")[2])
        else:
            first = known.submission + 1 if known.job_id else 0
        return self._begin(spec, ReplicaHandle(spec.replica_id, self.backend_name, "", submission=first))

    def _begin(self, spec: ReplicaSpec, handle: ReplicaHandle) -> ReplicaHandle:
        """Submit job number `handle.submission` of a replica, or find it if somebody has."""
        marks = self.marks(spec.rendezvous_uri)
        job = self.job(spec, handle.submission)
        if spec.recipe is not None:
            marks.send(Path(spec.recipe).read_bytes())
        if self.code is not None:
            marks.send(self.code)
        job_id = self._asked(self.find_job, job)
        if self._forgotten(job_id, job, marks) if job_id else self._over(job, marks):
            return self._begin(spec, replace(handle, submission=handle.submission + 1))
        begun = replace(
            handle,
            job_id=job_id or self._claimed(job, marks),
            name=job.name,
            state="pending",
            will_retry=False,
            retry_at=None,
            exit_code=None,
            reason="",
            native="",
            attempt=handle.submission + 1,
        )
        try:
            return self._saved(begun)
        except ReplicationError as error:  # it runs: whoever launched it must be able to stop it
            logger.warning("replica %d: its handle isn't in the store yet: %s", handle.replica_id, error)
            return begun

    def _claimed(self, job: Job, marks: Marks) -> str:
        """Submit it, unless another launcher is about it at this moment: then the id is that of what it submits."""
        for _ in range(1 + math.ceil(CLAIM_SECONDS / _CLAIM_PAUSE_SECONDS)):
            claim = marks.claim(job.name, self.clock())
            if claim is not None:
                try:
                    return self._sent(job)
                except BaseException:
                    with contextlib.suppress(StoreError):  # it goes stale by itself
                        marks.give_up(claim)
                    raise
            logger.info("another launcher is submitting %s: waiting for it", job.name)
            self.sleep(_CLAIM_PAUSE_SECONDS)
            job_id = self._asked(self.find_job, job)
            if job_id:
                return job_id
        raise BackendUnavailable(f"another launcher is submitting {job.name}")

    def _sent(self, job: Job) -> str:
        """`submit_job`. A service may quote a request that it refuses: what it says ends up in handles and logs."""
        try:
            return self._asked(self.submit_job, job)
        except ExecutorError as error:
            words = masked(str(error), job.secrets.values())
            if words == str(error):
                raise
            raise type(error)(words) from None

    def _asked(self, call: Callable[[Any], _T], about: Any) -> _T:
        """What the service says. An answer that its client stumbles over, such as a proxy's page, is none."""
        try:
            return call(about)
        except (OSError, ReplicationError):
            raise
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            raise BackendUnavailable(f"{self.backend_name} answers what its client can't read ({words})") from error

    def _forgotten(self, job_id: str, job: Job, marks: Marks) -> bool:
        """Is this an ended job of which the store knows nothing: of a run whose store was cleared since?"""
        return (
            self._asked(self.look, job_id).state not in ("pending", "running")
            and marks.read(job.replica, job.name) is None
        )

    def _over(self, job: Job, marks: Marks) -> bool:
        """Has a job of this name, which the service has no more, ended in vain? A container started under its name
        again could find that, and do nothing."""
        mark = marks.read(job.replica, job.name)
        return mark is not None and mark.exit_code not in (None, 0)

    # -- watching ------------------------------------------------------------------------------------------------------

    def marks(self, rendezvous_uri: str | None = None) -> Marks:
        """The launch's objects in the run's store; an executor looks after one run at a time."""
        if self._marks is None or rendezvous_uri not in (None, self._uri):
            if rendezvous_uri is None:
                raise ExecutorError("attach(URI) first: this executor hasn't launched anything")
            self._marks, self._uri = Marks(open_store(rendezvous_uri)), rendezvous_uri
        return self._marks

    def attach(self, rendezvous_uri: str) -> list[ReplicaHandle]:
        """The handles of the replicas that some launcher started on this back end, and of the jobs that it could no
        longer write down: replicas tell of themselves, and a job is found by its name."""
        marks = self.marks(rendezvous_uri)
        handles = {one.replica_id: one for one in marks.handles()}
        for replica, name in marks.jobs().items():
            if replica not in handles and (found := self._by_job_name(replica, name)):
                handles[replica] = found
        return [one for _, one in sorted(handles.items()) if one.backend == self.backend_name]

    def _by_job_name(self, replica: int, name: str) -> ReplicaHandle | None:
        run, _, number = name.rpartition("-r")
        job = Job(name, run, replica, int(number.partition("-")[2]), command=())
        try:
            job_id = self._asked(self.find_job, job)
        except (OSError, ReplicationError) as error:
            logger.warning("replica %d has no handle in the store, and %s", replica, error)
            return None
        if job_id is None:
            return None
        attempt = job.submission + 1
        return ReplicaHandle(
            replica, self.backend_name, job_id, state="pending", attempt=attempt, name=name, submission=job.submission
        )

    def poll(self, handles: list[ReplicaHandle]) -> list[ReplicaHandle]:
        with ThreadPoolExecutor(max(1, min(8, len(handles)))) as pool:
            return list(pool.map(self._poll_one, handles))

    def _poll_one(self, handle: ReplicaHandle) -> ReplicaHandle:
        if not handle.job_id or handle.ended:
            return handle
        try:
            handle = self._newest(handle)
            if handle.ended:
                return handle
            if handle.retry_at is None:
                found = self._look_at(handle)
            elif self.marks().asked_to_stop(handle.name):  # by whatever launcher, between two jobs
                found = replace(handle, state="cancelled", will_retry=False, retry_at=None)
            else:
                found = handle
            if found.will_retry and found.retry_at is not None and self._due(found):
                found = self._again(found)
        except (OSError, BackendUnavailable, ReplicationError) as error:
            logger.warning("replica %d: %s", handle.replica_id, error)
            return replace(handle, reason=f"{self.backend_name} doesn't answer: {error}")
        return self._saved(found) if found != handle else found

    def _newest(self, handle: ReplicaHandle) -> ReplicaHandle:
        """That of the replica's newest job: it may have been submitted again since this one was given out."""
        known = self.marks().handle(handle.replica_id)
        if known is None or known.backend != self.backend_name or known.submission <= handle.submission:
            return handle
        return known

    def _look_at(self, handle: ReplicaHandle) -> ReplicaHandle:
        marks = self.marks()
        try:
            seen = self._asked(self.look, handle.job_id)
        except JobGone as error:
            seen = self._gone(handle, error)
        final = seen.timed_out and self.time_limit_seconds < self.longest_seconds  # the user's limit, not the service's
        if seen.timed_out:
            seen = replace(
                seen,
                state="failed" if final else "preempted",
                reason=f"its time limit of {self.time_limit_seconds / 3600:g} hours was over",
            )
        mark = marks.read(handle.replica_id, handle.name)
        asked = seen.state in ("failed", "preempted", "cancelled", "completed") and marks.asked_to_stop(handle.name)
        found = judge(handle, seen, mark, asked_to_stop=asked, now=self.clock())
        return next_job(found, self.budgets, self.clock()) if found.ended and not final else found

    def _gone(self, handle: ReplicaHandle, error: JobGone) -> Seen:
        """Of a job that the service doesn't know: deleted, or another account's, where it may well run. It has ended
        if its replica has said so or gone silent, or if it never began and was asked to stop. Else raises `error`."""
        mark = self.marks().read(handle.replica_id, handle.name)
        if self._alive(mark) or (mark is None and not self.marks().asked_to_stop(handle.name)):
            raise error
        return Seen("failed" if mark is not None and mark.exit_code is not None else "preempted", "gone", str(error))

    def _alive(self, mark: Mark | None) -> bool:
        return mark is not None and mark.exit_code is None and self.clock() - mark.seen <= SILENT_SECONDS

    def _due(self, handle: ReplicaHandle) -> bool:
        assert handle.retry_at is not None
        # Without its spec, this process only looks on: the launcher that has it starts the replica.
        return handle.replica_id in self._specs and self.clock() >= handle.retry_at

    def _again(self, handle: ReplicaHandle) -> ReplicaHandle:
        own = handle.state == "failed"
        counted = replace(
            handle,
            submission=handle.submission + 1,
            errors=handle.errors + own,
            preemptions=handle.preemptions + (not own),
        )
        logger.warning("replica %d: %s; submitting it again", handle.replica_id, handle.reason or handle.state)
        begun = self._begin(self._specs[handle.replica_id], counted)
        if self.marks().asked_to_stop(handle.name):  # while it was submitted, which takes as long as a service likes
            self.cancel([begun])
        return begun

    def _saved(self, handle: ReplicaHandle) -> ReplicaHandle:
        self.marks().save(handle)
        return handle

    def stream_logs(self, handle: ReplicaHandle, *, after: int = 0) -> Iterator[str]:
        """The replica's output, through all of its jobs from this handle's on, until it has ended.

        A connection that breaks is made again; `after` lines of the first job are passed over.
        """

        def poll(handle: ReplicaHandle) -> ReplicaHandle:
            return self.poll([handle])[0]

        return replica_output(handle, after, lines=self._lines, poll=poll, newest=self._newest, pause=self._log_pause)

    def _lines(self, handle: ReplicaHandle) -> Iterator[str]:
        if not self.ship_logs:
            return self.follow(handle.job_id)

        def ended() -> bool:
            return self._asked(self.look, handle.job_id).state not in ("pending", "running")

        return shipped_output(partial(self.marks().log, handle.name), ended=ended, pause=self._log_pause)

    def _log_pause(self) -> None:
        self.sleep(self.log_pause_seconds)

    def cancel(self, handles: list[ReplicaHandle]) -> None:
        def stop(handle: ReplicaHandle) -> None:
            if not handle.job_id or handle.ended:
                return
            handle = self._newest(handle)
            if handle.ended:
                return
            self.marks().ask_to_stop(handle.name)
            try:
                self._asked(self.stop_job, handle.job_id)
            except JobGone as error:
                mark = self.marks().read(handle.replica_id, handle.name)
                if mark is not None and self._alive(mark) and handle.retry_at is None:  # else it was seen to end
                    ago = max(0.0, self.clock() - mark.seen)
                    raise ExecutorError(
                        f"{error}; but its replica was alive {ago:.0f} s ago: another account's?"
                    ) from None
            if handle.will_retry:
                self._saved(replace(handle, state="cancelled", will_retry=False, retry_at=None))

        problems: list[str] = []
        for handle in handles:
            try:
                stop(handle)
            except (OSError, ReplicationError) as error:  # the others first
                problems.append(f"replica {handle.replica_id}: {error}")
        if problems:
            raise ExecutorError(f"{self.backend_name} could not be asked to stop {'; '.join(problems)}")

    def _result(self, handle: ReplicaHandle) -> ReplicaResult:
        mark = self.marks().read(handle.replica_id, handle.name)
        values = dict(mark.result) if mark is not None else {}
        checkpoint = values.pop("final_checkpoint_uri", None)
        if mark is not None:
            values["job_seconds"] = mark.seen - mark.began
        metrics = {**values, "exit_code": handle.exit_code, "restarts": handle.restarts, **preemption_metrics(handle)}
        if handle.state != "completed":
            metrics["error"] = handle.reason or handle.native
        # A path in a container that is gone is no checkpoint; the fleet's last state is in the store.
        kept = checkpoint if self.output else None
        return ReplicaResult(handle.replica_id, handle.state, kept, metrics)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
