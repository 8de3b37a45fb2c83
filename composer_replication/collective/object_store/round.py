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

Several shards are on their way at a time: a reduce or fetch that is Busy is left, and asked for in the next look. The
order in which shards come doesn't matter; that all of them do comes before Done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.events import (
    Action,
    Busy,
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

__all__ = ["MAX_FETCHES", "State", "advance", "begin", "deadline_of", "enough_for"]

MAX_FETCHES = 5  # looks at a blob before it is given up
AVERAGING = 2  # shards that are averaged at a time: one is computed while the other is written
FETCHING = 4  # shards that are fetched at a time; while so many are, nobody's next one is asked for


# -- the state

Phase = Literal[
    "start", "look", "own", "upload", "uploading", "declare", "wait", "last", "commit", "committed",
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
    arrivals: Mapping[int, float] = field(default_factory=dict[int, float])  # seconds after this replica's own ready
    # agreed
    roster: Roster | None = None
    roster_hash: str = ""
    roster_since: float = 0.0
    verdicts: Mapping[int, Verdict] = field(default_factory=dict[int, Verdict])
    fetched: frozenset[int] = frozenset()
    reducing: frozenset[int] = frozenset()  # shards whose averaging has begun
    fetching: frozenset[int] = frozenset()
    looks: Mapping[int, tuple[float, float]] = field(default_factory=dict[int, tuple[float, float]])
    # ^ of a shard that wasn't there: when that was, and how long to leave it
    shard: int = 0
    learning: int = 0  # whose ready is being read
    tries: int = 0
    failures: Mapping[int, int] = field(default_factory=dict[int, int])  # to get a shard
    repaired: frozenset[int] = frozenset()  # shards that were averaged again, for want of their mean

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
            if isinstance(event, Busy):
                return replace(state, phase="uploading"), Sleep(state.job.timing.max_poll_seconds)
            assert isinstance(event, Uploaded)
            blobs = (state.attempt, state.job.incarnation)
            return _declare(replace(state, uploaded=event.chunks, blobs=blobs))
        case "uploading":
            return replace(state, phase="upload"), Upload(state.attempt)
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
            state = _arrived(_take(state, replica, event.data), (replica,), now)
        elif _stays(state, replica, event.data):
            state = replace(state, late=state.late | {replica})
    if rest:
        return _next(state)
    if state.phase != "wait":
        return _commit(state, now)
    if state.contributed is None:
        return _sleep(state, now)
    deadline = deadline_of(state)
    if state.awaited and now < deadline:
        return _sleep(state, now, deadline)
    return _last_look(state, now)


def deadline_of(state: State) -> float:
    """Until when the missing are waited for: not so long where the round can close without them."""
    timing = state.job.timing
    assert state.waiting_since is not None
    seconds = min(timing.patience_seconds, timing.timeout_seconds) if enough_for(state) else timing.timeout_seconds
    return state.waiting_since + seconds


def enough_for(state: State) -> bool:
    """Are enough replicas there to close the round without the rest?"""
    plan, policy = state.job.plan, state.job.policy
    return not policy.strict and policy.enough(state.declared, plan.expected, plan.round)


def _arrived(state: State, replicas: Iterable[int], now: float) -> State:
    """Note when contributions were seen first, at whichever attempt that was."""
    if state.waiting_since is None:
        return state
    new = {r: now - state.waiting_since for r in replicas if r != state.job.replica and r not in state.arrivals}
    return replace(state, arrivals={**new, **state.arrivals}) if new else state


def _stays(state: State, replica: int, data: bytes) -> bool:
    """Does what a replica wrote for the round before say that it is alive, and wants to go on?"""
    plan, round = state.job.plan, state.job.plan.round - 1
    try:
        ready = parse_ready(data, keys.ready(round, 0, replica), run=plan.run, round=round, attempt=0, replica=replica)
    except ObjectCorrupt:
        return False
    return ready.report is None or not ready.report.leaving


def _last_look(state: State, now: float) -> Step:
    """Before proposing: each missing ready once more, those who aren't expected, and who announced itself."""
    job = state.job
    queue = tuple(("ready", replica) for replica in state.awaited)
    if not job.policy.strict:
        outside = [i for i in job.policy.fleet if i not in job.plan.expected and i not in state.declared]
        queue += tuple(("ready", replica) for replica in outside)
        if job.plan.round > 0:
            queue += tuple(("late", replica) for replica in outside)
    if not queue:
        return _commit(state, now)
    return _next(replace(state, phase="last", queue=queue))


def _commit(state: State, now: float) -> Step:
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
    assert state.waiting_since is not None
    latest = state.waiting_since + job.timing.timeout_seconds
    if proposal.kind == "abort" and not job.policy.strict and state.awaited and now < latest:
        return _sleep(state, now, latest)  # who is still missing may make it a round
    if proposal.kind == "roster" and proposal.base != job.plan.base:
        return _fail(state, "diverged", "most of the fleet starts this round from another state")
    return replace(state, phase="commit"), Create(_roster_key(state), dump_roster(proposal), "roster")


# -- the roster is there


def _enter(state: State, data: bytes, now: float) -> Step:
    """Check what the store holds, whoever wrote it."""
    job, plan = state.job, state.job.plan
    roster = parse_roster(data, _roster_key(state), run=plan.run, round=plan.round, attempt=state.attempt)
    state = replace(state, roster=roster, roster_hash=pointer_hash(data), roster_since=now, pause=0.0, tries=0)
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
    state = _arrived(state, roster.present, now)  # who came between the last look and the roster
    if not roster.members:
        return _finish(state)
    return _gather(state, now)


def _gather(state: State, now: float) -> Step:
    """One look at everything that isn't here yet: what was begun, then the first open shard of each owner."""
    assert state.roster is not None
    begun = tuple(("begun", shard) for shard in sorted(state.reducing | state.fetching))
    return _next_shard(replace(state, queue=begun + tuple(("mean", shard) for shard in _open(state))), now)


def _open(state: State) -> list[int]:
    """The shards to ask for: what is decided and isn't here; and of each owner, who goes through its own in order, the
    first that isn't decided (of this replica's own, as many as it averages at a time)."""
    roster = state.roster
    assert roster is not None
    found: list[int] = []
    per_owner: dict[int, int] = {}
    for shard in range(roster.shards):
        if shard in state.fetched or shard in state.fetching:
            continue
        owner = roster.owners[shard]
        if shard not in state.verdicts:
            per_owner[owner] = per_owner.get(owner, 0) + 1
            if per_owner[owner] > (AVERAGING if owner == state.job.replica else 1):
                continue
        if shard not in state.reducing:
            found.append(shard)
    return found


def _next_shard(state: State, now: float) -> Step:
    roster = state.roster
    assert roster is not None
    while state.queue:
        what, shard = state.queue[0]
        state = replace(state, shard=shard)
        if what == "begun":
            return _reduce(state, now) if shard in state.reducing else _fetch(state)
        if _due(state, shard, now) and _has_room(state, shard, now):
            if shard in state.verdicts:
                return _fetch(state)
            return replace(state, phase="gather"), Read(_mean_key(state, shard))
        state = replace(state, queue=state.queue[1:])
    if len(state.fetched) == roster.shards:
        return _finish(state)
    ready = [shard for shard in _open(state) if _has_room(state, shard, now)]
    if any(_due(state, shard, now) for shard in ready):
        return _gather(state, now)  # what has been found, or has ended, makes room
    times = [since + pause - now for since, pause in (state.looks[shard] for shard in ready)]
    seconds = min((*times, state.job.timing.max_poll_seconds))
    return replace(state, phase="asleep"), Sleep(max(seconds, 0.0))


def _due(state: State, shard: int, now: float) -> bool:
    since, pause = state.looks.get(shard, (now, 0.0))
    return now >= since + 0.5 * pause  # a driver shortens its sleeps at random, down to half


def _has_room(state: State, shard: int, now: float) -> bool:
    """Could something be done about it, if it were there, or if it weren't?"""
    if shard not in state.verdicts and _my_turn(state, shard, now):
        return len(state.reducing) < AVERAGING
    return len(state.fetching) < FETCHING


def _later(state: State, shard: int, now: float) -> State:
    """Leave a shard alone for a while, each time for longer."""
    timing = state.job.timing
    pause = min(max(state.looks.get(shard, (0.0, 0.0))[1] * 1.5, timing.poll_seconds), timing.max_poll_seconds)
    return replace(state, looks={**state.looks, shard: (now, pause)})


def _past(state: State) -> State:
    """Done with the first of the queue."""
    return replace(state, queue=state.queue[1:])


def _my_turn(state: State, shard: int, now: float) -> bool:
    """The owner at once; the next in order after a grace each; an onlooker after all of them."""
    roster = state.roster
    assert roster is not None
    if roster.mode == "direct":
        return True
    order = takeover_order(tuple(report.replica for report in roster.members), roster.round)
    place = len(order)
    if state.job.replica in order:
        place = (order.index(state.job.replica) - order.index(roster.owners[shard])) % len(order)
    return now >= state.roster_since + place * state.job.timing.takeover_seconds


def _gathered(state: State, event: Event, now: float) -> Step:
    if state.phase == "learn":
        return _learned(state, event, now)
    if isinstance(event, Found):
        return _ruled(state, event.data, now)
    if _my_turn(state, state.shard, now):
        return _reduce(state, now)
    return _next_shard(_past(_later(state, state.shard, now)), now)


def _reduce(state: State, now: float) -> Step:
    """Average a shard; first the members' readies, if they aren't known."""
    roster = state.roster
    assert roster is not None
    for report, wanted in zip(roster.members, roster.hashes, strict=True):
        known = state.declared.get(report.replica)
        if known is None or known.hash != wanted:
            return replace(state, phase="learn", learning=report.replica), Read(_ready_key(state, report.replica))
    readies = tuple(state.declared[report.replica].ready for report in roster.members)
    reducing = state.reducing | {state.shard}
    return replace(state, phase="reduce", reducing=reducing), Reduce(state.attempt, roster, state.shard, readies)


def _fetch(state: State) -> Step:
    """Get a decided shard."""
    assert state.roster is not None
    fetch = Fetch(state.attempt, state.roster, state.verdicts[state.shard])
    return replace(state, phase="fetch", fetching=state.fetching | {state.shard}), fetch


def _learned(state: State, event: Event, now: float) -> Step:
    roster, replica = state.roster, state.learning
    assert roster is not None
    if not isinstance(event, Found):
        if state.tries >= MAX_FETCHES:
            return _fail(state, "store", f"{_ready_key(state, replica)} is in the roster, but isn't there")
        return _next_shard(_past(_later(replace(state, tries=state.tries + 1), state.shard, now)), now)
    members = [report.replica for report in roster.members]
    if pointer_hash(event.data) != roster.hashes[members.index(replica)]:
        return _fail(state, "corrupt", f"{_ready_key(state, replica)} isn't the one that the roster names")
    return _reduce(_take(replace(state, tries=0), replica, event.data), now)


def _reduced(state: State, event: Event, now: float) -> Step:
    job = state.job
    if isinstance(event, Busy):
        return _next_shard(_past(state), now)
    state = replace(state, reducing=state.reducing - {state.shard})
    if state.shard in state.verdicts:  # it has been decided already: this was a repair, or a direct reading
        if isinstance(event, Spoiled):
            return _after_fetch(state, Unfetched(event.reason, event.gone), now)
        return _fetch(state)
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
    job = state.job
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
        return _next_shard(_past(replace(state, fetched=state.fetched | {state.shard})), now)
    return _fetch(state)


def _next_attempt(state: State, culprits: Mapping[int, str]) -> Step:
    job = state.job
    fresh = State(
        job=job,
        attempt=state.attempt + 1,
        uploaded=state.uploaded,
        blobs=state.blobs,
        contributed=state.contributed,
        arrivals=state.arrivals,
        banned={**state.banned, **culprits},
    )
    return _look(fresh)


def _after_fetch(state: State, event: Event, now: float) -> Step:
    shard = state.shard
    if isinstance(event, Busy):
        return _next_shard(_past(state), now)
    state = replace(state, fetching=state.fetching - {shard})
    if isinstance(event, Fetched):
        return _next_shard(_past(replace(state, fetched=state.fetched | {shard})), now)
    assert isinstance(event, Unfetched)
    if event.differs:
        return _fail(state, "diverged", event.reason)
    if shard not in state.repaired:  # the contributions may be there still: the same bytes come out of them
        return _reduce(replace(state, repaired=state.repaired | {shard}), now)
    failures = state.failures.get(shard, 0) + 1
    if failures > MAX_FETCHES:
        return _fail(state, "behind" if event.gone else "corrupt", event.reason)
    state = replace(state, failures={**state.failures, shard: failures}, repaired=state.repaired - {shard})
    return _next_shard(_past(_later(state, shard, now)), now)


# -- the end


def _closed(state: State) -> Closed:
    assert state.roster is not None
    shards = range(state.roster.shards)
    chunks = tuple(fact for shard in shards if shard in state.verdicts for fact in state.verdicts[shard].chunks)
    late = {replica: seconds for replica, seconds in state.arrivals.items() if replica in state.roster.present}
    incarnations = {replica: found.ready.incarnation for replica, found in state.declared.items()}
    return Closed(state.attempt, state.roster, state.roster_hash, chunks, late, incarnations)


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
