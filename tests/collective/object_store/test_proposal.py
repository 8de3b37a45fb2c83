"""Whom a roster names: the cases that need replicas which disagree."""

from __future__ import annotations

import pytest

from composer_replication.collective.base import Report
from composer_replication.collective.object_store.pointers import Ready, Roster, dump_ready
from composer_replication.collective.object_store.roster import Declared, Plan, Policy, propose


def proposed(layouts: dict[int, str], policy: Policy) -> Roster:
    """A roster of round 1 for replicas that trained tensors of these layouts."""
    declared = {}
    for replica, layout in layouts.items():
        report = Report(
            replica=replica,
            steps=1,
            tokens=None,
            mass=1.0,
            square_norm=1.0,
            finite=True,
            leaving=False,
            next_lr=1.0,
            preview=(1.0,),
            remaining=None,
            base="b",
            layout=layout,
        )
        ready = Ready(
            run="r",
            round=1,
            attempt=0,
            replica=replica,
            incarnation=1,
            report=report,
            prev="p",
            blob_attempt=0,
            blob_incarnation=1,
            chunks=(),
        )
        declared[replica] = Declared.of(ready, dump_ready(ready))
    plan = Plan(run="r", round=1, prev="p", base="b", expected=tuple(layouts))
    return propose(plan, policy, 0, declared, damaged={}, late=frozenset(), banned={}, writer=(0, 1))


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_that_trained_other_tensors_is_left_out_whichever_it_is(odd: int) -> None:
    policy = Policy(strict=False, fleet=(0, 1, 2), min_replicas=2)
    roster = proposed({replica: "other" if replica == odd else "same" for replica in range(3)}, policy)
    assert roster.kind == "roster" and roster.layout == "same"
    assert [report.replica for report in roster.members] == [r for r in range(3) if r != odd]
    assert odd in roster.absent


def test_under_strict_it_ends_the_round_for_all() -> None:
    policy = Policy(strict=True, fleet=(0, 1, 2), min_replicas=3)
    roster = proposed({0: "other", 1: "same", 2: "same"}, policy)
    assert roster.kind == "abort"
