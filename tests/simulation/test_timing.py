"""Time by arithmetic: who waits for whom, and what an exchange takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication.collective.object_store.costs import Link, busiest_share
from composer_replication.simulation import Machines, timeline

LINK = Link(up=1e6, down=1e6, request_seconds=0.0)


def test_everyone_waits_for_the_slowest() -> None:
    machines = Machines(step_seconds=0.5, link=LINK, slower={1: 2.0})
    rounds = timeline([10, 4], machines, replicas=2, elements=1000, codec="float32")
    _, exchange = busiest_share(2, 1000, "float32", LINK)
    assert [one.train for one in rounds] == [(5.0, 10.0), (2.0, 4.0)]
    assert [one.wait for one in rounds] == [(5.0, 0.0), (2.0, 0.0)]
    assert [one.slowest for one in rounds] == [1, 1]
    assert rounds[-1].ends == pytest.approx(14.0 + 2 * exchange)


def test_an_exchange_is_that_of_the_busiest_replica() -> None:
    # Direct at this size: each reads both contributions of 4,000 bytes and some header.
    assert busiest_share(2, 1000, "float32", LINK)[1] == pytest.approx(2 * 4000e-6, rel=0.1)
    share, seconds = busiest_share(4, 100_000_000, "bfloat16", Link(up=12.5e6, down=12.5e6, request_seconds=0.0))
    # 200 MB up, then three quarters of it down: what docs/performance.md calls 1.17 of the floor of 24 s.
    assert not share.direct and seconds == pytest.approx(1.75 * 16.0, rel=0.02)


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=20),
    st.dictionaries(st.integers(0, 3), st.floats(0.25, 4.0), max_size=4),
)
def test_nobody_waits_in_vain(intervals: list[int], slower: dict[int, float]) -> None:
    machines = Machines(step_seconds=0.1, link=LINK, slower=slower)
    rounds = timeline(intervals, machines, replicas=4, elements=5000, codec="int8")
    ends = [one.ends for one in rounds]
    assert ends == sorted(ends)
    for one in rounds:
        assert min(one.wait) == 0.0
        assert all(t + w == pytest.approx(max(one.train)) for t, w in zip(one.train, one.wait, strict=True))


def test_bad_machines_are_refused() -> None:
    with pytest.raises(ValueError, match="step_seconds must be more than 0"):
        Machines(step_seconds=0.0, link=LINK)
    with pytest.raises(ValueError, match="up must be more than 0"):
        Machines(step_seconds=1.0, link=Link(up=0.0, down=1.0))
    with pytest.raises(ValueError, match="replica 2 can't be"):
        Machines(step_seconds=1.0, link=LINK, slower={2: -1.0})
    with pytest.raises(ValueError, match="no replica 7 in a fleet of 2"):
        timeline([1], Machines(step_seconds=1.0, link=LINK, slower={7: 2.0}), replicas=2, elements=1, codec="int8")
