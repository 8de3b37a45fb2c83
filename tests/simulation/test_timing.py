"""Time by arithmetic: who waits for whom, what an exchange takes, what failures cost."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.collective.object_store.costs import Link, busiest_share
from composer_replication.simulation.exchange import Exchange
from composer_replication.simulation.lockstep import lockstep
from composer_replication.simulation.machines import LinkDown, Machines, Outage
from composer_replication.simulation.timing import Rules, Timeline, timeline

LINK = Link(up=1e6, down=1e6, request_seconds=0.0)
SKIP = Rules(failure_policy="skip")
SMALL = {"replicas": 2, "elements": 1000, "codec": "float32"}


def run(intervals: list[int], machines: Machines, rules: Rules | None = None, **more) -> Timeline:
    found = timeline(intervals, machines, rules=rules, **{**SMALL, **more})
    for parts in found.totals:
        assert min(parts.train, parts.lost, parts.exchange, parts.wait, parts.down) >= 0
        assert parts.whole == pytest.approx(found.seconds, abs=1e-6, rel=1e-9)
    if not found.aborted:  # what is told by the round is all of it
        for replica, parts in enumerate(found.totals):
            assert sum(one.parts[replica].whole for one in found.rounds) == pytest.approx(parts.whole, rel=1e-9)
    return found


# -- nothing fails


def test_everyone_waits_for_the_slowest() -> None:
    found = run([10, 4], Machines(step_seconds=0.5, link=LINK, slower={1: 2.0}))
    _, exchange = busiest_share(2, 1000, "float32", LINK)
    assert [[p.train for p in one.parts] for one in found.rounds] == [[5.0, 10.0], [2.0, 4.0]]
    assert [one.slowest for one in found.rounds] == [1, 1]
    fast, slow = found.totals
    # Both read both contributions; the fast one has its own already when the slow one's comes.
    assert slow.wait == pytest.approx(0.0) and 6.9 < fast.wait < 7.0
    assert found.seconds == pytest.approx(14.0 + 2 * exchange, abs=0.02)
    assert found.utilisation == pytest.approx((7.0 / found.seconds, 14.0 / found.seconds))


def test_an_exchange_is_that_of_the_busiest_replica() -> None:
    # Direct at this size: each reads both contributions of 4,000 bytes and some header.
    assert busiest_share(2, 1000, "float32", LINK)[1] == pytest.approx(2 * 4000e-6, rel=0.1)
    share, seconds = busiest_share(4, 100_000_000, "bfloat16", Link(up=12.5e6, down=12.5e6, request_seconds=0.0))
    # 200 MB up, then three quarters of it down: what docs/performance.md calls 1.17 of the floor of 24 s.
    assert not share.direct and seconds == pytest.approx(1.75 * 16.0, rel=0.02)


@pytest.mark.parametrize("elements", [5000, 8 * 4 * 1024 * 1024])  # direct; in shards, as many for each
@pytest.mark.parametrize("latency", [0.0, 0.05])
def test_an_even_fleet_takes_the_closed_form(elements: int, latency: float) -> None:
    link = Link(up=12.5e6, down=25e6, request_seconds=latency)
    intervals = [10, 20, 30]
    found = run(intervals, Machines(step_seconds=0.5, link=link), replicas=4, elements=elements, codec="int8")
    _, exchange = busiest_share(4, elements, "int8", link)
    assert found.seconds == pytest.approx(30.0 + 3 * exchange, rel=1e-9)
    assert all(parts.wait == pytest.approx(0.0, abs=1e-9) for parts in found.totals)


def test_a_narrow_link_holds_up_everyone() -> None:
    plain = Machines(step_seconds=1.0, link=Link(up=1e6, down=1e6, request_seconds=0.0))
    slow = replace(plain, links={1: Link(up=0.1e6, down=1e6, request_seconds=0.0)})
    usual, found = (run([10], one, elements=100_000) for one in (plain, slow))
    # Its 400 kB take 4 s instead of 0.4; reading both takes 0.8 s, of which 0.4 s are its own.
    assert usual.seconds == pytest.approx(10.8, rel=0.001) and found.seconds == pytest.approx(14.0, rel=0.04)
    assert found.totals[0].wait > 3.0 and found.totals[1].wait < 0.1


machines = st.builds(
    Machines,
    step_seconds=st.floats(0.01, 10.0),
    link=st.builds(Link, up=st.floats(1e5, 1e9), down=st.floats(1e5, 1e9), request_seconds=st.floats(0.0, 0.2)),
    slower=st.dictionaries(st.integers(0, 3), st.floats(0.25, 4.0), max_size=4),
    jitter=st.floats(0.0, 1.0),
    seed=st.integers(0, 99),
)
fleets = st.integers(4, 6)
schedules = st.lists(st.integers(1, 500), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(schedules, machines, fleets, st.sampled_from([1000, 40_000_000]), st.floats(1.0, 8.0), st.integers(0, 3))
def test_more_bandwidth_never_takes_longer(
    intervals: list[int], given: Machines, replicas: int, elements: int, factor: float, whose: int
) -> None:
    patient = Rules(timeout_seconds=1e9)
    more = Link(up=given.link.up * factor, down=given.link.down * factor, request_seconds=given.link.request_seconds)
    each = {"replicas": replicas, "elements": elements, "codec": "int8"}
    now = run(intervals, given, patient, **each)
    for better in (replace(given, link=more), replace(given, links={whose: more})):
        assert run(intervals, better, patient, **each).seconds <= now.seconds * (1 + 1e-9)
    assert all(0.0 < part <= 1.0 for part in now.utilisation)


outages = st.lists(
    st.builds(
        Outage,
        replica=st.integers(0, 3),
        at=st.floats(0.0, 3000.0),
        seconds=st.one_of(st.floats(0.1, 900.0), st.just(math.inf)),
        warned=st.booleans(),
    ),
    max_size=6,
).map(tuple)
downs = st.lists(
    st.builds(LinkDown, replica=st.integers(0, 3), at=st.floats(0.0, 3000.0), seconds=st.floats(0.1, 900.0)), max_size=3
).map(tuple)


@settings(max_examples=100, deadline=None)
@given(
    schedules,
    machines,
    fleets,
    outages,
    downs,
    st.sampled_from(["strict", "skip"]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([1000, 40_000_000]),
)
def test_every_second_is_somewhere(
    intervals: list[int],
    given: Machines,
    replicas: int,
    outages: tuple[Outage, ...],
    downs: tuple[LinkDown, ...],
    policy: str,
    rate: float,
    elements: int,
) -> None:
    failing = replace(given, outages=outages, links_down=downs, failures_per_hour=rate, startup_seconds=7.0)
    each = {"replicas": replicas, "elements": elements, "codec": "int8"}
    rules = Rules(failure_policy=policy, timeout_seconds=2000.0)
    found = run(intervals, failing, rules, **each)  # which looks that the parts add up
    assert all(0.0 <= part <= 1.0 for part in found.utilisation)
    assert all(parts.down >= 7.0 for parts in found.totals)
    assert len(found.rounds) == len(intervals) or found.aborted
    ends = [one.ends for one in found.rounds]
    assert ends == sorted(ends) and all(one.members for one in found.rounds)
    if policy == "strict":
        assert found.short_rounds == 0
    assert found == timeline(intervals, failing, rules=rules, **each)  # and again the same


# -- failures, by hand. An exchange is of 4 kB here: a few milliseconds.

KILLED = (Outage(replica=1, at=105.0, seconds=30.0),)


def test_strict_waits_for_one_that_is_killed_and_begins_again() -> None:
    found = run([100, 100], Machines(step_seconds=1.0, link=LINK, outages=KILLED))
    # 5 s into its second interval; gone for 30 s; then all of the interval again.
    assert found.seconds == pytest.approx(235.0, abs=0.1)
    other, killed = found.totals
    assert killed.lost == pytest.approx(5.0, abs=0.1) and killed.down == 30.0 and killed.train == pytest.approx(200.0)
    assert other.wait == pytest.approx(35.0, abs=0.1) and found.lost == (0, 1)


def test_a_warned_one_goes_on_where_it_was() -> None:
    warned = (replace(KILLED[0], warned=True),)
    found = run([100, 100], Machines(step_seconds=1.0, link=LINK, outages=warned))
    assert found.seconds == pytest.approx(230.0, abs=0.1) and found.lost == (0, 0)
    assert found.totals[1].lost == 0.0 and found.totals[1].down == 30.0


def test_skip_goes_on_after_the_wait_that_it_has_learned() -> None:
    killed = Machines(step_seconds=1.0, link=LINK, outages=(Outage(replica=3, at=305.0, seconds=60.0),))
    strict, skip = (run([100] * 6, killed, rules, replicas=4) for rules in (Rules(), SKIP))
    # Strict: 5 s in vain and 60 s. Skip: the others close the round a quarter of the interval after their own end.
    assert strict.seconds == pytest.approx(665.0, abs=0.2)
    assert skip.rounds[3].members == (0, 1, 2) and skip.rounds[3].ends == pytest.approx(425.0, abs=0.2)
    # It is back at 365 s, trains until it hears of that within a heartbeat or half a step, and takes the next one with
    # it, for which the others wait up to twice as long, since it is coming back.
    assert skip.rounds[4].members == (0, 1, 2, 3) and skip.totals[3].lost == pytest.approx(65.0 + 3.0, abs=0.2)
    assert skip.absences(3) == 1 and skip.short_rounds == 1 and skip.lost[3] == 2
    assert skip.seconds == pytest.approx(600.0 + 25.0 + 3.0, abs=0.3)
    assert skip.totals[3].train == pytest.approx(500.0)


def test_someone_who_is_always_slow_is_waited_for_as_long_as_learned() -> None:
    slow = Machines(step_seconds=1.0, link=LINK, slower={2: 1.8})
    found = run([100] * 5, slow, SKIP, replicas=3)
    assert found.short_rounds == 0 and found.seconds == pytest.approx(900.0, abs=1.0)
    fixed = run([100] * 5, slow, replace(SKIP, deadline="fixed", timeout_seconds=30.0), replicas=3)
    # The first round needs everyone, and the second waits as long as is allowed: 30 s, not 80.
    assert fixed.rounds[0].absent == () and fixed.rounds[1].absent == (2,)
    assert fixed.seconds < 800.0


def test_one_that_never_comes_back() -> None:
    gone = Machines(step_seconds=1.0, link=LINK, outages=(Outage(replica=1, at=350.0, seconds=math.inf),))
    strict = run([100] * 5, gone, replicas=3)
    assert len(strict.rounds) == 3 and "round 3 is given up: replica 1 missed for more than 600 s" in strict.aborted
    assert strict.seconds == pytest.approx(1000.0, abs=0.5) and strict.totals[0].lost == pytest.approx(100.0)
    skip = run([100] * 5, gone, SKIP, replicas=3)
    assert [one.absent for one in skip.rounds] == [(), (), (), (1,), (1,)]
    # 25 s in round 3, and 50 in the next, in which it is expected back.
    assert skip.seconds == pytest.approx(575.0, abs=0.5)
    assert skip.totals[1].down == pytest.approx(225.0, abs=0.5) and skip.lost[1] == 1
    # From then on nobody waits for it.
    assert run([100] * 9, gone, SKIP, replicas=3).seconds == pytest.approx(975.0, abs=0.5)
    lonely = run([100] * 5, gone, replace(SKIP, min_replicas=3), replicas=3)
    assert "too few were there" in lonely.aborted


def test_before_there_is_a_round_to_learn_from_skip_waits_as_long_as_it_may() -> None:
    # What round 1 has taught is told in round 2 and counts from round 3.
    early = Machines(step_seconds=1.0, link=LINK, outages=(Outage(replica=1, at=250.0, seconds=math.inf),))
    found = run([100] * 5, early, SKIP, replicas=3)
    assert found.rounds[2].ends == pytest.approx(300.0 + 600.0, abs=0.5)


def test_all_may_die() -> None:
    ends = (150.0, 150.0, 170.0)
    gone = tuple(Outage(replica=replica, at=at, seconds=math.inf) for replica, at in enumerate(ends))
    for rules in (Rules(), SKIP):
        found = run([100] * 3, Machines(step_seconds=1.0, link=LINK, outages=gone), rules, replicas=3)
        assert len(found.rounds) == 1 and found.aborted and found.seconds == 170.0 and found.lost == (1, 1, 1)


def test_the_first_round_needs_everyone_and_has_time() -> None:
    late = Machines(step_seconds=1.0, link=LINK, outages=(Outage(replica=1, at=50.0, seconds=850.0),))
    for rules in (Rules(), SKIP):
        found = run([100, 100], late, rules, replicas=3)
        assert not found.aborted and found.seconds == pytest.approx(1100.0, abs=0.5)


def test_who_is_killed_after_its_contribution_is_counted() -> None:
    link = Link(up=1e6, down=1e6, request_seconds=0.0)
    # 40 M values in 10 chunks of int8: 40 s up, by 141 s; replica 0 dies while the slow one still trains.
    machines = Machines(
        step_seconds=1.0, link=link, slower={1: 1.5}, outages=(Outage(replica=0, at=145.0, seconds=20.0),)
    )
    each = {"replicas": 2, "elements": 40_000_000, "codec": "int8"}
    found = run([100, 100], machines, **each)
    still = run([100, 100], replace(machines, outages=()), **each)
    assert found.lost == (0, 0) and found.totals[0].down == 20.0 and found.totals[0].lost == 0.0
    assert found.seconds == pytest.approx(still.seconds)  # it was back before anyone needed it
    # Dead while it should average its half, the others wait until they do it themselves.
    dead = replace(machines, outages=(Outage(replica=0, at=192.0, seconds=100.0),))
    assert 20.0 < run([100], dead, **each).seconds - run([100], replace(machines, outages=()), **each).seconds <= 150.0


def test_a_broken_link_stops_transfers_and_not_training() -> None:
    plain = Machines(step_seconds=1.0, link=LINK)
    in_training = replace(plain, links_down=(LinkDown(replica=0, at=10.0, seconds=50.0),))
    in_exchange = replace(plain, links_down=(LinkDown(replica=0, at=99.0, seconds=50.0),))
    usual = run([100], plain).seconds
    assert run([100], in_training).seconds == pytest.approx(usual)
    assert run([100], in_exchange).seconds == pytest.approx(usual + 49.0, abs=0.01)


def test_transfers_stand_still_while_the_link_is_down() -> None:
    downs = (LinkDown(replica=0, at=5.0, seconds=10.0), LinkDown(replica=0, at=20.0, seconds=1.0))
    one = Machines(step_seconds=1.0, link=LINK, links_down=downs)
    assert one.carried(0, 0.0, 4.0) == 4.0 and one.carried(0, 0.0, 7.0) == 17.0
    assert one.carried(0, 7.0, 6.0) == 22.0 and one.carried(1, 0.0, 7.0) == 7.0


def test_random_failures_are_as_frequent_as_said_and_each_replica_s_own() -> None:
    often = Machines(step_seconds=1.0, link=LINK, failures_per_hour=1.0, restart_seconds=10.0, seed=3)
    four, five = (run([50] * 600, often, Rules(timeout_seconds=1e6), replicas=n) for n in (4, 5))
    for found in (four, five):
        hours = found.seconds / 3600
        for parts in found.totals:  # within five times the spread of a Poisson count
            assert abs(parts.down / 10.0 - hours) < 5 * math.sqrt(hours)
    first, again = (run([50] * 40, often, Rules(timeout_seconds=1e6), replicas=4) for _ in range(2))
    assert first == again != run([50] * 40, replace(often, seed=4), Rules(timeout_seconds=1e6), replicas=4)


def test_jitter_has_the_spread_that_it_says() -> None:
    found = run([100] * 2000, Machines(step_seconds=1.0, link=LINK, jitter=0.2))
    times = [one.parts[0].train for one in found.rounds]
    mean = sum(times) / len(times)
    spread = math.sqrt(sum((value - mean) ** 2 for value in times) / len(times))
    # Of 2,000 draws: the mean within 5 standard errors of 2/sqrt(2000), the spread within 8 %, 5 of its own.
    assert mean == pytest.approx(100.0, abs=0.23) and spread == pytest.approx(0.2 * math.sqrt(100), rel=0.08)


def test_bad_machines_are_refused() -> None:
    with pytest.raises(ValueError, match="step_seconds must be more than 0"):
        Machines(step_seconds=0.0, link=LINK)
    with pytest.raises(ValueError, match="up must be more than 0"):
        Machines(step_seconds=1.0, link=Link(up=0.0, down=1.0))
    with pytest.raises(ValueError, match="replica 2 can't be"):
        Machines(step_seconds=1.0, link=LINK, slower={2: -1.0})
    with pytest.raises(ValueError, match="can't fail at -1"):
        Outage(replica=0, at=-1.0, seconds=1.0)
    with pytest.raises(ValueError, match="can't be down for inf"):
        LinkDown(replica=0, at=1.0, seconds=math.inf)
    with pytest.raises(ValueError, match="no replica 7 in a fleet of 2"):
        timeline([1], Machines(step_seconds=1.0, link=LINK, slower={7: 2.0}), **SMALL)
    with pytest.raises(ValueError, match="min_replicas must be from 1 to 2"):
        timeline([1], Machines(step_seconds=1.0, link=LINK), rules=replace(SKIP, min_replicas=3), **SMALL)
    hopeless = Machines(step_seconds=60.0, link=LINK, failures_per_hour=60.0)
    with pytest.raises(ValueError, match="never gets through an interval of 100 steps"):
        timeline([100], hopeless, **SMALL)


# -- gradients in every step


def test_lockstep_by_hand() -> None:
    link = Link(up=1e6, down=2e6)
    plain = Machines(step_seconds=1.0, link=link, peer_seconds=0.01)
    # 4 replicas, 1 M gradients of 4 bytes: 6 MB through a link of 1 MB/s, and 6 messages.
    found = lockstep(10, plain, replicas=4, elements=1_000_000)
    assert found.all_reduce_seconds == pytest.approx(6.06) == found.step_seconds
    assert found.seconds == pytest.approx(60.6) and found.utilisation == pytest.approx(1 / 6.06)
    quick = lockstep(10, replace(plain, link=Link(up=1e9, down=1e9)), replicas=4, elements=1_000_000)
    assert quick.seconds == pytest.approx(10.0) and quick.utilisation == pytest.approx(1.0)
    narrow = replace(plain, links={2: Link(up=1e6, down=0.5e6)})
    assert lockstep(10, narrow, replicas=4, elements=1_000_000).all_reduce_seconds == pytest.approx(12.06)
    alone = lockstep(10, replace(plain, slower={0: 2.0}), replicas=1, elements=1_000_000)
    assert alone.seconds == pytest.approx(20.0) and alone.all_reduce_seconds == 0.0


def test_lockstep_goes_back_to_its_checkpoint() -> None:
    quick = Link(up=1e9, down=1e9)
    killed = Machines(step_seconds=1.0, link=quick, outages=(Outage(replica=1, at=250.0, seconds=40.0),))
    found = lockstep(400, killed, replicas=2, elements=1000, checkpoint_seconds=100.0)
    assert (found.lost, found.down, found.seconds) == pytest.approx((50.0, 40.0, 490.0))
    warned = replace(killed, outages=(replace(killed.outages[0], warned=True),))
    assert lockstep(400, warned, replicas=2, elements=1000).seconds == pytest.approx(440.0)
    gone = replace(killed, outages=(replace(killed.outages[0], seconds=math.inf),))
    assert lockstep(400, gone, replicas=2, elements=1000).seconds == math.inf
    broken = Machines(step_seconds=1.0, link=quick, links_down=(LinkDown(replica=1, at=250.0, seconds=40.0),))
    assert lockstep(400, broken, replicas=2, elements=1000).seconds == pytest.approx(440.0)
    both = replace(broken, outages=(Outage(replica=0, at=100.0, seconds=10.0),))
    assert lockstep(400, both, replicas=2, elements=1000, checkpoint_seconds=50.0).seconds == pytest.approx(450.0)


def test_steps_that_vary_make_lockstep_slower_than_intervals() -> None:
    varying = Machines(step_seconds=1.0, link=Link(up=1e9, down=1e9, request_seconds=0.0), jitter=0.3)
    together = lockstep(1000, varying, replicas=8, elements=1000).seconds
    apart = run([100] * 10, varying, replicas=8).seconds
    # The mean of the largest of 8 is about 1.4 spreads above the mean: in each step, or in each sum of 100 steps.
    assert 1300 < together < 1600 and 1000 < apart < 1080


def test_an_exchange_with_one_member_reads_its_own() -> None:
    exchange = Exchange(Machines(step_seconds=1.0, link=LINK), 1000, "float32")
    ends, written = exchange.ends({5: 10.0}, 10.0, 0)
    assert ends[5] == pytest.approx(10.0 + exchange.payload / 1e6) and written == 10.0


@pytest.mark.timeout(60)  # without a bound it has no end
def test_a_replica_that_fails_more_often_than_a_transfer_takes_is_gone_and_not_for_ever_tried() -> None:
    slow = Link(up=125e3, down=125e3)
    machines = Machines(step_seconds=0.01, link=slow, failures_per_hour=60.0, restart_seconds=10.0)
    rules = Rules(failure_policy="skip")
    found = timeline([20] * 3, machines, replicas=64, elements=1_000_000, codec="float32", rules=rules)
    assert found.aborted and math.isfinite(found.seconds)
