"""With any one rule taken out, something breaks; with the rule in its place, the same schedule is sound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from composer_replication.collective.base import Report
from composer_replication.collective.object_store import events, fleet, keys
from composer_replication.collective.object_store import round as machine
from composer_replication.collective.object_store.pointers import Ready, Roster, dump_ready, dump_roster
from composer_replication.collective.object_store.roster import Declared, Plan, Policy, propose
from composer_replication.errors import ReplicaTaken
from composer_replication.store import MemoryStore
from tests.collective.object_store.mutations import (
    MUTATIONS,
    Mutation,
    any_history,
    bereaved,
    damaged,
    diverged,
    interrupted,
    no_majority,
    stopped,
)
from tests.collective.object_store.simulation import TIMING, Simulation

LOOKS = 12  # schedules that are tried from a mutation's seed on


def failure(mutation: Mutation, seed: int, *, broken: bool) -> str:
    schedule = mutation.schedule(seed)
    try:
        if broken:
            with mutation.breaks():
                schedule.run(steps=mutation.steps)
        else:
            schedule.run(steps=mutation.steps)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_a_rule_a_schedule_breaks(name: str) -> None:
    mutation = MUTATIONS[name]
    seeds = range(mutation.seed, mutation.seed + LOOKS)
    found = next((seed for seed in seeds if failure(mutation, seed, broken=True)), None)
    assert found is not None, f"{name}: no schedule failed, so nothing here guards the rule"
    assert failure(mutation, found, broken=False) == "", "and that very schedule is sound with it"


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [stopped, interrupted, bereaved, damaged, diverged])
def test_the_schedules_made_for_mutations_are_sound(schedule: Callable[[int], Simulation]) -> None:
    for seed in range(1000, 1020):
        schedule(seed).run()


def test_the_page_names_every_mutation_beside_its_rule() -> None:
    page = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    for name, mutation in MUTATIONS.items():
        assert any(mutation.rule in row[0] and f"`{name}`" in row[1] for row in rows), (mutation.rule, name)


# -- rules that no schedule can break, since others hold meanwhile: each alone


def report(replica: int, base: str) -> Report:
    return Report(
        replica=replica,
        steps=1,
        tokens=None,
        mass=1.0,
        square_norm=1.0,
        finite=True,
        leaving=False,
        next_lr=1.0,
        preview=(),
        remaining=None,
        base=base,
        layout="layout",
    )


def proposed(bases: tuple[str, ...], policy: Policy, round: int = 1, expected: int = 0) -> Roster:
    """What a replica in state "a" proposes that has found these, where so many are expected."""
    declared: dict[int, Declared] = {}
    for replica, base in enumerate(bases):
        ready = Ready(run="r", round=round, attempt=0, replica=replica, incarnation=1, report=report(replica, base))
        declared[replica] = Declared.of(ready, dump_ready(ready))
    plan = Plan(run="r", round=round, prev="p", base="a", expected=tuple(range(expected or len(bases))))
    return propose(plan, policy, 0, declared, damaged={}, late=frozenset(), banned={}, writer=(0, 1))


def test_half_a_fleet_is_no_majority() -> None:
    """Only where `min_replicas` was set to half of the fleet or less does this rule stand alone."""
    policy = Policy(strict=False, fleet=(0, 1), min_replicas=1)
    assert proposed(("a", "b"), policy).kind == "abort"
    with no_majority():
        assert proposed(("a", "b"), policy).kind == "roster"


def test_the_first_round_needs_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(strict=False, fleet=(0, 1, 2), min_replicas=2)
    assert proposed(("a", "a"), policy, round=0, expected=3).kind == "abort"
    monkeypatch.setattr(Policy, "needed", lambda self, expected, round: self.min_replicas)
    assert proposed(("a", "a"), policy, round=0, expected=3).kind == "roster"


def entered(prev: str) -> events.Action:
    """What a replica makes of a roster that follows on `prev`; it has itself come from "mine"."""
    plan = Plan(run="r", round=3, prev="mine", base="b", expected=(0,))
    job = events.Job(
        plan=plan,
        policy=Policy(strict=True, fleet=(0,), min_replicas=1),
        timing=TIMING,
        replica=0,
        incarnation=1,
        layout="layout",
        report=report(0, "b"),
    )
    found = Roster(run="r", round=3, attempt=0, writer=(1, 1), kind="roster", prev=prev, base="b")
    state, action = machine.advance(machine.begin(job), events.Started(), 0.0)
    assert action == events.Read(keys.roster(3, 0))
    return machine.advance(state, events.Found(dump_roster(found)), 0.0)[1]


def test_a_roster_of_another_history_is_not_followed() -> None:
    """A state can be the same after two histories (rounds that averaged nobody): who is expected then differs."""
    refused = entered("another")
    assert isinstance(refused, events.Fail) and refused.kind == "diverged"
    assert isinstance(entered("mine"), events.Done)
    with any_history():
        assert isinstance(entered("another"), events.Done)


def claimed() -> list[int]:
    """The numbers that two processes get under one id, the second of which claims it while the first is about to."""
    store, got = MemoryStore(), list[int]()

    def take(trace: Callable[[str], None]) -> None:
        got.append(fleet.claim_replica(store, 0, heartbeat_seconds=1.0, clock=float, pause=abs, trace=trace))

    def other(step: str) -> None:
        if step == "before:claim" and not got:
            take(lambda step: None)

    take(other)
    return got


def test_an_id_is_claimed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReplicaTaken):
        claimed()
    monkeypatch.setattr(fleet, "_holds", lambda store, key, data: True)  # whatever is there is taken for one's own
    assert claimed() == [1, 1]
