"""One replica's way through one round, as pure transitions: `advance(state, event, now)` gives the next state and the
one action to do next. No store, no clock, no tensor: a driver (or a simulation) acts, and says what came of it.

Invariant: every decision is a function of pointers read back from the store, and each pointer is created once.

    look ─► own ─► upload ─► declare ─► wait ◄──► sleep
                                         │ all expected, or deadline
                                         ▼
    (roster found) ◄────────────────── commit
         │ abort, sealed, diverged ─► Fail
         ▼
       gather ─► learn ─► reduce ─► verdict ─► fetch ─► … ─► (late) ─► Done
         │ void: the next attempt, or Fail under strict
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.events import (
    Action,
    Closed,
    Create,
    Done,
    Event,
    Fail,
    Failure,
    Fetch,
    Fetched,
    Found,
    Job,
    Read,
    Reduce,
    Reduced,
    Sleep,
    Spoiled,
    Unfetched,
    Upload,
    Uploaded,
)
from composer_replication.collective.object_store.pointers import (
    ChunkFact,
    Ready,
    Roster,
    Verdict,
    dump_ready,
    dump_roster,
    dump_verdict,
    parse_ready,
    parse_roster,
    parse_verdict,
)
from composer_replication.collective.object_store.roster import OTHER_TENSORS, Declared, propose, takeover_order
from composer_replication.collective.object_store.wire import pointer_hash
from composer_replication.errors import ObjectCorrupt

__all__ = ["MAX_FETCHES", "State", "advance", "begin"]

MAX_FETCHES = 5  # looks at a blob before it is given up


# -- the state

Phase = Literal[
    "start", "look", "own", "upload", "declare", "wait", "last", "commit", "committed",
    "gather", "learn", "reduce", "verdict", "ruled", "fetch", "late", "asleep", "over",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    job: Job
    attempt: int
    phase: Phase = "start"
    queue: tuple[tuple[str, int], ...] = ()  # what is being read, and next: (what, replica or shard)
    pause: float = 0.0
    # declared
    uploaded: tuple[ChunkFact, ...] | None = None
    blobs: tuple[int, int] = (0, 0)  # attempt and incarnation under which they lie
    contributed: Ready | None = None  # this replica's ready, as the store holds it
    declared: Mapping[int, Declared] = field(default_factory=dict[int, Declared])
    damaged: Mapping[int, str] = field(default_factory=dict[int, str])
    late: frozenset[int] = frozenset()
    banned: Mapping[int, str] = field(default_factory=dict[int, str])
    waiting_since: float | None = None
    # agreed
    roster: Roster | None = None
    roster_hash: str = ""
    roster_since: float = 0.0
    verdicts: Mapping[int, Verdict] = field(default_factory=dict[int, Verdict])
    fetched: frozenset[int] = frozenset()
    shard: int = 0
    learning: int = 0  # whose ready is being read
    tries: int = 0
    repaired: bool = False

    @property
    def awaited(self) -> tuple[int, ...]:
        """Expected replicas whose ready hasn't been seen at this attempt."""
        settled = (*self.declared, *self.damaged, *self.banned)
        return tuple(replica for replica in self.job.plan.expected if replica not in settled)


Step = tuple[State, Action]


def begin(job: Job) -> State:
    return State(job=job, attempt=job.first_attempt)


def advance(state: State, event: Event, now: float) -> Step:
    """The next state and action. `now` is the local monotonic clock. Raises ObjectCorrupt for a damaged pointer, and
    ValueError for a report of this replica's own that nobody could read."""
    match state.phase:
        case "start":
            return _look(state)
        case "look":
            return _enter(state, event.data, now) if isinstance(event, Found) else _own(state)
        case "own":
            return _after_own(state, event, now)
        case "upload":
            assert isinstance(event, Uploaded)
            blobs = (state.attempt, state.job.incarnation)
            return _declare(replace(state, uploaded=event.chunks, blobs=blobs))
        case "declare":
            return _own(state)  # what the store holds counts: it may be an earlier process's
        case "wait" | "last":
            return _collect(state, event, now)
        case "commit":
            return replace(state, phase="committed"), Read(_roster_key(state))
        case "committed":
            if isinstance(event, Found):
                return _enter(state, event.data, now)
            return _fail(state, "store", f"{_roster_key(state)} was written, but isn't there")
        case "gather" | "learn":
            return _gathered(state, event, now)
        case "reduce":
            return _reduced(state, event, now)
        case "verdict":
            return replace(state, phase="ruled"), Read(_mean_key(state, state.shard))
        case "ruled":
            if isinstance(event, Found):
                return _ruled(state, event.data, now)
            return _fail(state, "store", f"{_mean_key(state, state.shard)} was written, but isn't there")
        case "fetch":
            return _after_fetch(state, event, now)
        case "asleep":
            return _sweep(state) if state.roster is None else _gather(state, now)
        case "late":
            return _done(state)
        case "over":
            raise AssertionError("the round is over")


def _roster_key(state: State) -> str:
    return keys.roster(state.job.plan.round, state.attempt)


def _ready_key(state: State, replica: int) -> str:
    return keys.ready(state.job.plan.round, state.attempt, replica)


def _mean_key(state: State, shard: int) -> str:
    return keys.mean(state.job.plan.round, state.attempt, shard)


def _fail(state: State, kind: Failure, reason: str) -> Step:
    return replace(state, phase="over"), Fail(kind, reason, state.roster)


def _sleep(state: State, now: float, until: float | None = None) -> Step:
    timing = state.job.timing
    pause = min(max(state.pause * 1.5, timing.poll_seconds), timing.max_poll_seconds)
    seconds = pause if until is None else max(min(pause, until - now), 0.0)
    return replace(state, phase="asleep", pause=pause), Sleep(seconds)


# -- publish


def _look(state: State) -> Step:
    """Has this attempt been decided already?"""
    return replace(state, phase="look"), Read(_roster_key(state))


def _own(state: State) -> Step:
    """Is this replica's contribution there already? One for each replica and attempt, whoever wrote it."""
    return replace(state, phase="own"), Read(_ready_key(state, state.job.replica))


def _after_own(state: State, event: Event, now: float) -> Step:
    job = state.job
    if isinstance(event, Found):
        state = _take(state, job.replica, event.data)
        if job.replica in state.damaged:
            raise ObjectCorrupt(state.damaged[job.replica])
        if job.replica in state.declared:
            state = replace(state, contributed=state.declared[job.replica].ready)
        return _sweep(replace(state, tries=0, waiting_since=now))
    if state.tries:
        return _fail(state, "store", f"{_ready_key(state, job.replica)} was written, but isn't there")
    if state.uploaded is not None or state.contributed is not None:
        return _declare(state)
    if job.report is None:
        if job.wait:
            return _sweep(replace(state, waiting_since=now))
        return replace(state, phase="over"), Done(None)
    if job.report.finite:
        return replace(state, phase="upload"), Upload(state.attempt)
    return _declare(replace(state, uploaded=()))


def _declare(state: State) -> Step:
    job = state.job
    if state.contributed is not None:  # from an earlier attempt, whose blobs lie where they lay
        ready = replace(state.contributed, attempt=state.attempt)
    else:
        assert state.uploaded is not None
        ready = Ready(
            run=job.plan.run,
            round=job.plan.round,
            attempt=state.attempt,
            replica=job.replica,
            incarnation=job.incarnation,
            report=job.report,
            prev=job.plan.prev,
            blob_attempt=state.blobs[0],
            blob_incarnation=state.blobs[1],
            chunks=state.uploaded,
        )
    key, plan = _ready_key(state, job.replica), job.plan
    try:
        data = dump_ready(ready)
        parse_ready(data, key, run=plan.run, round=plan.round, attempt=state.attempt, replica=job.replica)
    except (ObjectCorrupt, TypeError, ValueError, OverflowError) as error:
        # Here, and not on everyone who would read it: what is created once stays.
        raise ValueError(f"replica {job.replica} can't declare its report of round {plan.round}: {error}") from error
    return replace(state, phase="declare", tries=1), Create(key, data, "ready")


def _take(state: State, replica: int, data: bytes) -> State:
    """Add a ready that was found."""
    plan, key = state.job.plan, _ready_key(state, replica)
    try:
        ready = parse_ready(data, key, run=plan.run, round=plan.round, attempt=state.attempt, replica=replica)
    except ObjectCorrupt as error:
        return replace(state, damaged={**state.damaged, replica: str(error)})
    if ready.late:
        return replace(state, late=state.late | {replica})
    return replace(state, declared={**state.declared, replica: Declared.of(ready, data)})


# -- wait for the roster, or make it


def _sweep(state: State) -> Step:
    """One poll: the roster first, then the readies that are missing."""
    queue: tuple[tuple[str, int], ...] = (("roster", 0),)
    if state.contributed is not None:
        queue += tuple(("ready", replica) for replica in state.awaited)
    return _next(replace(state, phase="wait", queue=queue))


def _next(state: State) -> Step:
    what, replica = state.queue[0]
    if what == "roster":
        return state, Read(_roster_key(state))
    if what == "ready":
        return state, Read(_ready_key(state, replica))
    return state, Read(keys.ready(state.job.plan.round - 1, 0, replica))


def _collect(state: State, event: Event, now: float) -> Step:
    (what, replica), rest = state.queue[0], state.queue[1:]
    state = replace(state, queue=rest)
    if isinstance(event, Found):
        if what == "roster":
            return _enter(state, event.data, now)
        if what == "ready":
            state = _take(state, replica, event.data)
        elif _stays(state, replica, event.data):
            state = replace(state, late=state.late | {replica})
    if rest:
        return _next(state)
    if state.phase != "wait":
        return _commit(state)
    if state.contributed is None:
        return _sleep(state, now)
    assert state.waiting_since is not None
    deadline = state.waiting_since + state.job.timing.timeout_seconds
    if state.awaited and now < deadline:
        return _sleep(state, now, deadline)
    return _last_look(state)


def _stays(state: State, replica: int, data: bytes) -> bool:
    """Does what a replica wrote for the round before say that it is alive, and wants to go on?"""
    plan, round = state.job.plan, state.job.plan.round - 1
    try:
        ready = parse_ready(data, keys.ready(round, 0, replica), run=plan.run, round=round, attempt=0, replica=replica)
    except ObjectCorrupt:
        return False
    return ready.report is None or not ready.report.leaving


def _last_look(state: State) -> Step:
    """Before proposing: each missing ready once more, those who aren't expected, and who announced itself."""
    job = state.job
    queue = tuple(("ready", replica) for replica in state.awaited)
    if not job.policy.strict:
        outside = [i for i in job.policy.fleet if i not in job.plan.expected and i not in state.declared]
        queue += tuple(("ready", replica) for replica in outside)
        if job.plan.round > 0:
            queue += tuple(("late", replica) for replica in outside)
    if not queue:
        return _commit(state)
    return _next(replace(state, phase="last", queue=queue))


def _commit(state: State) -> Step:
    job = state.job
    proposal = propose(
        job.plan,
        job.policy,
        state.attempt,
        state.declared,
        damaged=state.damaged,
        late=state.late - state.declared.keys(),
        banned=state.banned,
        writer=(job.replica, job.incarnation),
    )
    if proposal.kind == "roster" and proposal.base != job.plan.base:
        return _fail(state, "diverged", "most of the fleet starts this round from another state")
    return replace(state, phase="commit"), Create(_roster_key(state), dump_roster(proposal), "roster")


# -- the roster is there


def _enter(state: State, data: bytes, now: float) -> Step:
    """Check what the store holds, whoever wrote it."""
    job, plan = state.job, state.job.plan
    roster = parse_roster(data, _roster_key(state), run=plan.run, round=plan.round, attempt=state.attempt)
    state = replace(
        state, roster=roster, roster_hash=pointer_hash(data), roster_since=now, pause=0.0, tries=0, repaired=False
    )
    if roster.kind == "sealed":
        return _fail(state, "sealed", roster.reason)
    if roster.kind == "abort":
        if roster.differing.get(job.replica) == OTHER_TENSORS:
            return _fail(state, "mismatch", roster.layout)
        if job.replica in roster.differing:
            return _fail(state, "diverged", roster.differing[job.replica])
        return _fail(state, "aborted", roster.reason)
    if roster.prev != plan.prev:
        return _fail(state, "diverged", "the round before was another one for the fleet than for this replica")
    if roster.base != plan.base:
        return _fail(state, "diverged", "the fleet starts this round from another state")
    if roster.members and roster.layout != job.layout:
        return _fail(state, "mismatch", roster.layout)
    if not roster.members:
        return _finish(state)
    return _gather(state, now)


def _gather(state: State, now: float) -> Step:
    """One look at each shard that isn't here yet."""
    assert state.roster is not None
    queue = tuple(("mean", shard) for shard in range(state.roster.shards) if shard not in state.fetched)
    return _next_shard(replace(state, queue=queue), now)


def _next_shard(state: State, now: float) -> Step:
    if state.queue:
        shard = state.queue[0][1]
        return replace(state, phase="gather", shard=shard), Read(_mean_key(state, shard))
    assert state.roster is not None
    return _finish(state) if len(state.fetched) == state.roster.shards else _sleep(state, now)


def _my_turn(state: State, shard: int, now: float) -> bool:
    """The owner at once; the next in order after a grace each; an onlooker after all of them."""
    roster = state.roster
    assert roster is not None
    if roster.mode == "direct":
        return True
    order = takeover_order(tuple(report.replica for report in roster.members), roster.round)
    place = len(order)
    if state.job.replica in order:
        place = (order.index(state.job.replica) - shard) % len(order)
    return now >= state.roster_since + place * state.job.timing.takeover_seconds


def _gathered(state: State, event: Event, now: float) -> Step:
    if state.phase == "learn":
        return _learned(state, event, now)
    state = replace(state, queue=state.queue[1:])
    if isinstance(event, Found):
        return _ruled(state, event.data, now)
    if _my_turn(state, state.shard, now):
        return _reduce(state)
    return _next_shard(state, now)


def _reduce(state: State) -> Step:
    """Average a shard; first the members' readies, if they aren't known."""
    roster = state.roster
    assert roster is not None
    for report, wanted in zip(roster.members, roster.hashes, strict=True):
        known = state.declared.get(report.replica)
        if known is None or known.hash != wanted:
            return replace(state, phase="learn", learning=report.replica), Read(_ready_key(state, report.replica))
    readies = tuple(state.declared[report.replica].ready for report in roster.members)
    return replace(state, phase="reduce"), Reduce(state.attempt, roster, state.shard, readies)


def _learned(state: State, event: Event, now: float) -> Step:
    roster, replica = state.roster, state.learning
    assert roster is not None
    if not isinstance(event, Found):
        if state.tries >= MAX_FETCHES:
            return _fail(state, "store", f"{_ready_key(state, replica)} is in the roster, but isn't there")
        return _sleep(replace(state, tries=state.tries + 1), now)
    members = [report.replica for report in roster.members]
    if pointer_hash(event.data) != roster.hashes[members.index(replica)]:
        return _fail(state, "corrupt", f"{_ready_key(state, replica)} isn't the one that the roster names")
    return _reduce(_take(state, replica, event.data))


def _reduced(state: State, event: Event, now: float) -> Step:
    roster, job = state.roster, state.job
    assert roster is not None
    if state.shard in state.verdicts:  # it has been decided already: this was a repair, or a direct reading
        if isinstance(event, Spoiled):
            return _after_fetch(state, Unfetched(event.reason, event.gone), now)
        return replace(state, phase="fetch"), Fetch(state.attempt, roster, state.verdicts[state.shard])
    blank = Verdict(
        run=job.plan.run,
        round=job.plan.round,
        attempt=state.attempt,
        shard=state.shard,
        writer=(job.replica, job.incarnation),
        roster=state.roster_hash,
    )
    if isinstance(event, Spoiled):
        verdict = replace(blank, void=event.reason, culprits=(event.culprit,))
    else:
        assert isinstance(event, Reduced)
        verdict = replace(blank, chunks=event.chunks)
    return replace(state, phase="verdict"), Create(_mean_key(state, state.shard), dump_verdict(verdict), "mean")


def _ruled(state: State, data: bytes, now: float) -> Step:
    """A shard is decided: a mean, or void."""
    job, roster = state.job, state.roster
    assert roster is not None
    key = _mean_key(state, state.shard)
    verdict = parse_verdict(
        data,
        key,
        run=job.plan.run,
        round=job.plan.round,
        attempt=state.attempt,
        shard=state.shard,
        roster=state.roster_hash,
    )
    if verdict.void:
        if job.policy.strict:
            names = ", ".join(str(replica) for replica in verdict.culprits)
            return _fail(state, "aborted", f"the contribution of replica {names} can't be used: {verdict.void}")
        return _next_attempt(state, {replica: verdict.void for replica in verdict.culprits})
    state = replace(state, verdicts={**state.verdicts, state.shard: verdict})
    if not all(fact.finite for fact in verdict.chunks):
        # The round will end without a mean; but only once all shards are known, since a void one comes before that.
        return _next_shard(replace(state, fetched=state.fetched | {state.shard}), now)
    return replace(state, phase="fetch"), Fetch(state.attempt, roster, verdict)


def _next_attempt(state: State, culprits: Mapping[int, str]) -> Step:
    job = state.job
    fresh = State(
        job=job,
        attempt=state.attempt + 1,
        uploaded=state.uploaded,
        blobs=state.blobs,
        contributed=state.contributed,
        banned={**state.banned, **culprits},
    )
    return _look(fresh)


def _after_fetch(state: State, event: Event, now: float) -> Step:
    if isinstance(event, Fetched):
        fetched = state.fetched | {state.shard}
        return _next_shard(replace(state, fetched=fetched, tries=0, repaired=False, pause=0.0), now)
    assert isinstance(event, Unfetched)
    if event.differs:
        return _fail(state, "diverged", event.reason)
    if not state.repaired:  # the contributions may be there still: the same bytes come out of them
        return _reduce(replace(state, repaired=True))
    if state.tries < MAX_FETCHES:
        return _sleep(replace(state, tries=state.tries + 1, repaired=False), now)
    return _fail(state, "behind" if event.gone else "corrupt", event.reason)


# -- the end


def _closed(state: State) -> Closed:
    assert state.roster is not None
    shards = range(state.roster.shards)
    chunks = tuple(fact for shard in shards if shard in state.verdicts for fact in state.verdicts[shard].chunks)
    return Closed(state.attempt, state.roster, state.roster_hash, chunks)


def _finish(state: State) -> Step:
    """Whoever the round went on without says that it is alive, so that the next one may expect it."""
    job, roster = state.job, state.roster
    assert roster is not None
    left_out = job.replica not in roster.present and state.contributed is None
    if left_out and job.announce and not job.policy.strict and job.replica not in state.banned:
        note = Ready(
            run=job.plan.run,
            round=job.plan.round,
            attempt=0,
            replica=job.replica,
            incarnation=job.incarnation,
            late=True,
        )
        key = keys.ready(job.plan.round, 0, job.replica)
        return replace(state, phase="late"), Create(key, dump_ready(note), "late")
    return _done(state)


def _done(state: State) -> Step:
    return replace(state, phase="over"), Done(_closed(state))
