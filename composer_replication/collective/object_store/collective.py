"""A fleet that meets in an object store: no coordinator process, no connection between replicas.

Invariant: all replicas that apply a round apply the same bytes, whatever dies, lags or comes back meanwhile
(docs/protocol.md says what that rests on).
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from composer_replication.collective.base import Contribution, RoundOutcome, Snapshot
from composer_replication.collective.codec import check_codec
from composer_replication.collective.guards import Guards
from composer_replication.collective.layout import Layout
from composer_replication.collective.object_store import checkpoints, keys
from composer_replication.collective.object_store.checkpointer import Checkpointer
from composer_replication.collective.object_store.driver import drive
from composer_replication.collective.object_store.ending import close_run
from composer_replication.collective.object_store.entrants import Entrants
from composer_replication.collective.object_store.events import Closed, Fail, Job, Timing
from composer_replication.collective.object_store.failures import round_error
from composer_replication.collective.object_store.fleet import agree_on_fleet, claim_replica
from composer_replication.collective.object_store.forecast import forecast
from composer_replication.collective.object_store.garbage import Collector
from composer_replication.collective.object_store.heartbeat import Heartbeat
from composer_replication.collective.object_store.joining import (
    Standpoint,
    enter_epoch,
    first_state,
    fleet_sizes,
    standpoint,
)
from composer_replication.collective.object_store.outcome import outcome_of
from composer_replication.collective.object_store.place import check_signing, open_run
from composer_replication.collective.object_store.pointers import Roster
from composer_replication.collective.object_store.requests import Requests, create
from composer_replication.collective.object_store.roster import Mode, Plan
from composer_replication.collective.object_store.round import State, deadline_of, enough_for
from composer_replication.collective.object_store.settings import check_positive, make_patience, make_policy
from composer_replication.collective.object_store.shards import ShardWork, Trace, input_sizes
from composer_replication.collective.object_store.waiting import backed_off, duration, seen, telling, watching
from composer_replication.collective.object_store.wire import dump, for_people
from composer_replication.collective.retention import CHECKPOINT_EVERY
from composer_replication.errors import (
    Fenced,
    Interrupted,
    RoundError,
    StoreError,
)
from composer_replication.store import ObjectStore, SigningKey

__all__ = ["STEPS", "ObjectStoreCollective"]

STEPS = (
    "claim",  # this incarnation's claim on its id
    "fleet",  # fleet.json
    "upload",  # one chunk of the contribution
    "ready",  # the contribution is declared
    "roster",  # who is averaged, or that the round is off
    "reduce",  # averaging a shard
    "mean",  # a shard's mean is decided
    "fetch",  # getting a shard's mean
    "late",  # "I'm alive", of a replica that the round went on without
    "applied",  # after the outer step
    "checkpoint",  # one chunk of a checkpoint
    "manifest",  # the checkpoint exists
    "collect",  # old blobs are deleted
    "result",  # how this replica ended
    "final",  # how the run ended
)


START_SECONDS = 900.0  # machines don't come up at the same moment


def _no_trace(step: str) -> None:
    """Does nothing."""


class ObjectStoreCollective:
    """One replica's side of a fleet in a store; satisfies `Collective`.

    Args:
        store: a store, or its URI.
        control: a second store for all but the blobs, where the first can't create an object only once.
        replica: this replica's id, from 0 to replicas - 1; under skip also a higher one, which joins the run.
        replicas: how many the run begins with.
        run: prefix of the run within the store.
        codec: "float32", "bfloat16" or "int8".
        failure_policy: "strict": a replica that is missing at the deadline ends the run for all; "skip": the round
            closes without it.
        min_replicas: under skip, how many a round needs; more than half of the fleet unless given.
        timeout_seconds: how long after its own contribution a replica waits for the others'.
        deadline: under skip, where enough replicas are there: "adaptive" waits for the others twice as long as they
            have made anyone wait in the last rounds, at least `deadline_floor_seconds` and a quarter of the
            interval's own time, at most `timeout_seconds`; "fixed" always waits `timeout_seconds`.
        deadline_floor_seconds: see `deadline`.
        start_timeout_seconds: the same for the beginning: the first state, round 0, and the first round of a resumed
            replica. None: 900, or `timeout_seconds` if that is longer.
        poll_seconds: the shortest pause between two looks; they grow to `max_poll_seconds`.
        heartbeat_seconds: how often this replica shows itself, and looks whether it has been overtaken.
        checkpoint_every: rounds between two checkpoints of the shared state.
        takeover_seconds: after how long the next replica does a shard whose owner doesn't.
        tolerated_misses: under skip, rounds in a row that a replica may miss and still be waited for.
        mode: how tensors travel: "auto" (by the roster's size and the payload), "direct" or "sharded".
        guards: how outliers are treated, and what kind of mean is taken: a robust one needs three replicas in a round.
        signing_key: a key, or the file that holds it: every object is signed, and what isn't is refused
            (docs/security.md). None: the key in COMPOSER_REPLICATION_SIGNING_KEY, if there is one.
        nonce: the run's own name, if the launcher gives one: another run under the same prefix is refused then.
        interrupted: asked while waiting; True ends the wait with Interrupted.
        clock, sleep: the local monotonic clock. The time of day is never used.
        trace: called with "before:step" and "after:step" around everything that is written or averaged (see STEPS).

    Raises ValueError for a setting that is out of range.
    """

    def __init__(
        self,
        store: ObjectStore | str,
        *,
        replica: int,
        replicas: int,
        control: ObjectStore | str | None = None,
        run: str = "",
        codec: str = "float32",
        failure_policy: Literal["strict", "skip"] = "strict",
        min_replicas: int | None = None,
        timeout_seconds: float = 600.0,
        deadline: Literal["adaptive", "fixed"] = "adaptive",
        deadline_floor_seconds: float = 10.0,
        start_timeout_seconds: float | None = None,
        poll_seconds: float = 0.05,
        max_poll_seconds: float = 1.0,
        heartbeat_seconds: float = 5.0,
        checkpoint_every: int = CHECKPOINT_EVERY,
        takeover_seconds: float | None = None,
        tolerated_misses: int = 1,
        mode: Mode = "auto",
        guards: Guards | None = None,
        signing_key: SigningKey | str | os.PathLike[str] | None = None,
        nonce: str = "",
        interrupted: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        trace: Trace = _no_trace,
    ) -> None:
        guards = guards or Guards()
        self._policy = make_policy(
            replica=replica,
            replicas=replicas,
            failure_policy=failure_policy,
            min_replicas=min_replicas,
            tolerated_misses=tolerated_misses,
            mode=mode,
            guards=guards,
        )
        if start_timeout_seconds is None:
            start_timeout_seconds = max(START_SECONDS, timeout_seconds)
        check_positive(
            timeout_seconds=timeout_seconds,
            start_timeout_seconds=start_timeout_seconds,
            deadline_floor_seconds=deadline_floor_seconds,
            poll_seconds=poll_seconds,
            max_poll_seconds=max_poll_seconds,
            heartbeat_seconds=heartbeat_seconds,
            checkpoint_every=checkpoint_every,
        )
        self._raw = open_run(store, control=control, run=run, signing_key=signing_key)
        self._store = Requests(self._raw, sleep=sleep)
        self._replica = replica
        self._codec = check_codec(codec)
        self._timing = Timing(
            timeout_seconds=timeout_seconds,
            takeover_seconds=takeover_seconds if takeover_seconds is not None else min(30.0, timeout_seconds / 10),
            poll_seconds=poll_seconds,
            max_poll_seconds=max(max_poll_seconds, poll_seconds),
        )
        self._patience = make_patience(deadline, self._policy, deadline_floor_seconds, timeout_seconds)
        self._start_timeout = start_timeout_seconds
        self._heartbeat_seconds = heartbeat_seconds
        self._every = checkpoint_every
        self._nonce: str = nonce
        self._interrupted = interrupted
        self._clock = clock
        self._sleep = sleep
        self._trace = trace
        self._jitter = random.Random()
        # set by start()
        self._run = ""
        self._incarnation = 0
        self._plan: Plan | None = None
        self._stand: Standpoint | None = None
        self._sizes: dict[int, int] = {0: replicas}  # first round of each epoch -> replicas that it began with
        self._heart: Heartbeat | None = None
        self._collector: Collector | None = None
        self._checkpointer: Checkpointer | None = None
        self._entrants: Entrants | None = None  # under skip
        self._before: ObjectStore | None = None  # the epoch before this one, if there is one
        # of the present round
        self._work: ShardWork | None = None
        self._roster: Roster | None = None
        self._incarnations: dict[int, int] = {}  # of the others, as they were last seen
        self._layouts: set[str] = set()
        self._left = False
        self._waited = 0.0
        self._longest: float | None = None  # wait for one of the others in the last round
        self._present: deque[frozenset[int]] = deque(maxlen=2)  # in the last rounds
        self._interval_began: float | None = None  # when the last round was applied
        self._closed = False

    @property
    def replica(self) -> int:
        return self._replica

    @property
    def fleet(self) -> tuple[int, ...]:
        return self._policy.fleet

    @property
    def overtaken(self) -> bool:
        return self._heart is not None and self._heart.overtaken

    @property
    def requests(self) -> Mapping[str, int]:
        """Requests to the store so far, by kind (heartbeats not counted)."""
        return dict(self._store.count)

    # -- start

    def start(self, offered: Snapshot, *, settings: Mapping[str, Any], resumed: bool) -> Snapshot:
        assert self._plan is None, "start() is called once"
        self._policy.guards.check_settings(settings)
        check_signing(self._raw)
        self._enter_epoch()
        self._incarnation = claim_replica(
            self._store,
            self._replica,
            heartbeat_seconds=self._heartbeat_seconds,
            clock=self._clock,
            pause=self._pause,
            trace=self._trace,
        )
        try:
            return self._join(offered, settings, resumed)
        except BaseException:
            self.close()
            raise

    def _enter_epoch(self) -> None:
        """Be part of the run's newest epoch."""
        entered = enter_epoch(self._raw, self._store, replicas=len(self.fleet), nonce=self._nonce)
        if entered is not None:
            self._sizes = fleet_sizes(self._raw)
            self._before, self._raw, epoch = entered
            self._store = Requests(self._raw, sleep=self._sleep)
            self._policy = replace(self._policy, first_round=epoch.first)
            self._nonce = epoch.run

    def _join(self, offered: Snapshot, settings: Mapping[str, Any], resumed: bool) -> Snapshot:
        own = {
            "replicas": len(self.fleet),
            "codec": self._codec,
            "failure_policy": "strict" if self._policy.strict else "skip",
            "min_replicas": self._policy.min_replicas,
            "tolerated_misses": self._policy.tolerated_misses,
            "checkpoint_every": self._every,
            "guards": self._policy.guards.to_json(),
            "settings": json.loads(json.dumps(dict(settings))),
        }
        heart = Heartbeat(self._raw, self._replica, self._incarnation, self._heartbeat_seconds, socket.gethostname())
        heart.start()
        self._heart = heart
        lowest = min(self.fleet)
        wait = backed_off(
            self._timing.poll_seconds,
            self._timing.max_poll_seconds,
            self._jitter,
            self._pause,
            clock=self._clock,
            timeout_seconds=self._start_timeout,
            waiting_for=f"replica {lowest} has not published the first weights in {self._store.uri}: "
            "is it running, with the same store?",
            line=lambda: f"replica {self._replica} waits for {seen(self._raw, [lowest])} in {self._store.uri}",
        )
        self._run = agree_on_fleet(
            self._store,
            own,
            offered.layout,
            nonce=self._nonce,
            resumed=resumed,
            before=self._before,
            first=self._replica == lowest,
            wait=wait,
            trace=self._trace,
        )
        fleet = self.fleet
        if not self._policy.strict:
            self._entrants = Entrants(self._store, self._run, len(fleet))
            if self._replica not in fleet:
                self._entrants.announce(self._replica)
            fleet = self._entrants.look()
        snapshot = offered
        if not resumed:
            snapshot = first_state(
                self._store,
                self._run,
                offered,
                replica=self._replica,
                lowest=lowest,
                wait=wait,
                trace=self._trace,
            )
        self._stand = stand = standpoint(
            self._store, self._run, snapshot, policy=self._policy, replica=self._replica, ids=fleet, resumed=resumed
        )
        self._plan, self._left, self._roster = stand.plan, stand.left, stand.last
        newest = checkpoints.latest_round(self._store) or 0
        self._collector = Collector(self._store, self._replica, checkpoint=newest, every=self._every)
        if self._roster is not None:
            self._collector.closed(self._roster)
        self._checkpointer = Checkpointer(self._store, self._run, self._replica, every=self._every, trace=self._trace)
        heart.watch(self._run, snapshot.round, stand.attempts.get(snapshot.round, 0))
        heart.look()
        return replace(snapshot, ended=not stand.plan.expected, awaited=stand.awaited)

    # -- rounds

    def average(self, contribution: Contribution) -> RoundOutcome:
        report = contribution.report
        if self._left:
            raise RoundError(f"replica {self._replica} has left the run: it can only follow")
        outcome = self._round(contribution.round, contribution.layout, report.base, contribution, wait=True)
        assert outcome is not None
        return outcome

    def follow(self, round: int, layout: Layout, base: str, *, wait: bool) -> RoundOutcome | None:
        """As the contract says; and if this replica's contribution to the round is in the store already (from before
        a restart), its part is done: the round is waited for, and taken part in."""
        return self._round(round, layout, base, None, wait=wait)

    def _round(
        self, round: int, layout: Layout, base: str, contribution: Contribution | None, *, wait: bool
    ) -> RoundOutcome | None:
        plan = self._ready_for(round, base)
        self._drop_work()
        self._publish_layout(layout)
        work = ShardWork(
            self._store,
            codec=self._codec,
            run=self._run,
            round=round,
            layout=layout,
            replica=self._replica,
            incarnation=self._incarnation,
            contribution=contribution,
            forecast=forecast(
                self._policy.mode,
                plan.expected,
                self._replica,
                round,
                input_sizes(self._codec, self._run, round, layout, self._replica),
            ),
            incarnations=self._incarnations,
            poll_seconds=self._timing.poll_seconds,
            max_poll_seconds=self._timing.max_poll_seconds,
            sleep=self._sleep,
            trace=self._trace,
            guards=self._policy.guards,
        )
        self._work = work
        assert self._stand is not None, "_ready_for has seen to it"
        timing, usual = self._timing, round != self._stand.slow_round
        if not usual:
            timing = replace(timing, timeout_seconds=self._start_timeout)
        elif self._patience is not None and self._interval_began is not None:
            interval = self._clock() - self._interval_began
            # Two rounds: how late it was in the first one that it came to again is told in the second.
            others = set(plan.expected) - {self._replica}
            returning = any(not others <= present for present in self._present)
            timing = replace(timing, patience_seconds=self._patience.seconds(interval, returning=returning))
        policy = self._policy
        if self._entrants is not None:
            policy = replace(policy, fleet=self._entrants.look())
        job = Job(
            plan=plan,
            policy=policy,
            timing=timing,
            replica=self._replica,
            incarnation=self._incarnation,
            layout=layout.fingerprint,
            report=None if contribution is None else replace(contribution.report, longest_wait_seconds=self._longest),
            wait=wait,
            announce=not self._left and round >= self._stand.tip - 1,
            first_attempt=self._stand.attempts.get(round, 0),
        )
        sent, received, self._waited = self._store.bytes_sent, self._store.bytes_received, 0.0
        pause = self._pause if contribution is not None else self._watching(round, plan.expected, timing)
        tell = telling(self._clock)
        ending = drive(
            job,
            work,
            self._store,
            clock=self._clock,
            pause=pause,
            trace=self._trace,
            jitter=self._jitter,
            waits=lambda state: self._tell(tell, state),
        )
        assert self._collector is not None
        self._collector.wrote(round, work.blobs)
        if isinstance(ending, Fail):
            raise round_error(ending, self._store, plan.round, self._replica, layout)
        if ending.closed is None:
            return None
        took_part = contribution is not None and self._replica in ending.closed.roster.present
        # In a round that it came too late for it didn't wait, and in the first one others may have been starting still.
        self._longest = max((0.0, *ending.closed.lateness.values())) if usual and took_part else None
        if self._patience is not None:
            reports = (*ending.closed.roster.members, *ending.closed.roster.others)
            self._patience.saw(report.longest_wait_seconds for report in reports)
        assert self._checkpointer is not None
        self._checkpointer.confirm(ending.closed.roster)
        self._advance(ending.closed)
        return outcome_of(
            ending.closed,
            work,
            self._policy.guards,
            fleet_size=self._sizes[max((first for first in self._sizes if first <= round), default=0)],
            wait_seconds=self._waited,
            bytes_sent=self._store.bytes_sent - sent,
            bytes_received=self._store.bytes_received - received,
        )

    def _ready_for(self, round: int, base: str) -> Plan:
        self._check_fence()
        plan = self._plan
        if plan is None or self._closed:
            raise RoundError("rounds come after start() and before close()")
        if round != plan.round:
            raise RoundError(f"replica {self._replica} is at round {plan.round}, not at round {round}")
        if not plan.expected:
            raise RoundError(f"the run is over: nobody is expected in round {round}")
        return replace(plan, base=base)

    def _advance(self, closed: Closed) -> None:
        roster, stand = closed.roster, self._stand
        assert stand is not None and self._heart is not None and self._collector is not None
        self._roster = roster
        self._present.append(roster.present)
        self._incarnations |= closed.incarnations
        reports = (*roster.members, *roster.others)
        if roster.round >= stand.joined_at:
            self._left = self._left or any(r.replica == self._replica and r.leaving for r in reports)
        first = roster.round + 1 == self._policy.first_round  # then who the epoch before expected doesn't matter
        self._plan = Plan(
            run=self._run,
            round=roster.round + 1,
            prev=closed.roster_hash,
            base="",
            expected=self.fleet if first else roster.expected_next,
            misses={} if first else roster.misses,
        )
        self._heart.watch(self._run, roster.round + 1, stand.attempts.get(roster.round + 1, 0))
        if roster.round + 1 < stand.tip:
            self._heart.look()
        self._collector.closed(roster)

    def _publish_layout(self, layout: Layout) -> None:
        if layout.fingerprint not in self._layouts:
            create(self._store, keys.layout(layout.fingerprint), dump(layout.to_json()))
            self._layouts.add(layout.fingerprint)

    # -- after a round

    def applied(self, take: Callable[[], Snapshot]) -> None:
        roster = self._roster
        assert roster is not None and self._collector is not None and self._checkpointer is not None
        self._trace("before:applied")
        self._drop_work()
        self._checkpointer.applied(roster, take)
        self._trace("before:collect")
        self._collector.collect(roster)
        self._trace("after:collect")
        self._trace("after:applied")
        self._interval_began = self._clock()

    def publish(self, status: Mapping[str, Any]) -> None:
        if self._heart is not None:
            self._heart.show(status)

    def finish(self, digest: str, result: Mapping[str, Any]) -> None:
        content = {"replica": self._replica, "digest": digest, "incarnation": self._incarnation, "run": self._run}
        over = self._roster is not None and not self._roster.expected_next
        if over and self._checkpointer is not None:
            self._checkpointer.leave_draft(digest)
        self._trace("before:result")
        self._store.put(keys.result(self._replica), for_people({**content, "result": dict(result)}))
        self._trace("after:result")
        if self._roster is not None and not self._roster.expected_next:
            close_run(self._store, self._roster, digest, self._trace)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._drop_work()
        if self._checkpointer is not None:
            self._checkpointer.close()
        if self._heart is not None:
            self._heart.stop("closed")
        if self._incarnation:
            try:
                create(self._store, keys.closed(self._replica, self._incarnation), b"{}")
            except StoreError:
                pass  # whoever comes next finds out by the process, or by the heartbeat

    # -- inside

    def _drop_work(self) -> None:
        if self._work is not None:
            self._work.close()
            self._work = None

    def _check_fence(self) -> None:
        if self._heart is not None and self._heart.fenced:
            raise Fenced(
                f"a newer process has taken replica {self._replica} over ({self._store.uri}): this one stops, "
                "and is not to be restarted"
            )

    def _pause(self, seconds: float) -> None:
        self._check_fence()
        if self._interrupted is not None and self._interrupted():
            raise Interrupted(f"replica {self._replica} was asked to stop while it waited for the others")
        if self._work is not None and self._work.active:
            self._work.wait(seconds)  # not for others, but for this replica's own transfers
            return
        began = self._clock()
        self._sleep(seconds)
        self._waited += self._clock() - began

    def _tell(self, tell: Callable[[Callable[[], str]], None], state: State) -> None:
        """Whom this round waits for. An onlooker says nothing: the others may train for hours."""
        job, since = state.job, state.waiting_since
        if state.roster is None and since is not None:

            def line() -> str:
                left = duration(deadline_of(state) - self._clock())
                return (
                    f"replica {self._replica} waits for {seen(self._raw, state.awaited)} in {self._store.uri}, "
                    f"round {job.plan.round}; {'goes on without' if enough_for(state) else 'gives up'} in {left}"
                )

            tell(line)

    def _watching(self, round: int, expected: tuple[int, ...], timing: Timing) -> Callable[[float], None]:
        return watching(
            self._raw,
            round,
            tuple(replica for replica in expected if replica != self._replica),
            pause=self._pause,
            clock=self._clock,
            heartbeat_seconds=self._heartbeat_seconds,
            timeout_seconds=timing.timeout_seconds,
        )
