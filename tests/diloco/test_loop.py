"""The outer loop over threads: equivalences, hand-computed rounds, resumption, odd models, uneven ends."""

from __future__ import annotations

import copy
import dataclasses
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer_replication.autoloco import AutoLoCoConfig, AutoLoCoPolicy, FixedPolicy, OuterConfig
from composer_replication.autoloco.values import Policy, Preview
from composer_replication.collective.base import Contribution, RoundOutcome
from composer_replication.collective.in_process import InProcessFleet
from composer_replication.diloco.loop import OuterLoop
from composer_replication.diloco.repair import repair_optimizer_state
from composer_replication.diloco.summary import RoundSummary
from composer_replication.errors import FleetMismatch, RoundError
from tests.support.threads import run_threads

PLAIN = OuterConfig(lr=1.0, momentum=0.0)


def constant_preview(grid: tuple[int, ...], lr: float, remaining: int | None) -> Preview:
    def saturated(steps: int) -> int:
        return steps if remaining is None else min(steps, remaining)

    next_lr = 0.0 if remaining == 0 else lr
    return Preview(steps=grid, sums=tuple(lr * saturated(s) for s in grid), next_lr=next_lr, remaining=remaining)


@dataclass
class Replica:
    """A hand-written training loop around an OuterLoop."""

    model: nn.Module
    loop: OuterLoop
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Tensor, Tensor]]
    lr: float
    done: int = 0
    summaries: list[RoundSummary] | None = None

    def preview(self) -> Preview:
        return constant_preview(self.loop.grid, self.lr, len(self.batches) - self.done)

    def run(self, steps: int | None = None, before: Callable[[int], None] = lambda step: None) -> Replica:
        self.summaries = self.summaries or []
        if not self.loop.started:
            self.loop.start(self.preview())
        stop = len(self.batches) if steps is None else min(self.done + steps, len(self.batches))
        while self.done < stop and not self.loop.ended:
            inputs, targets = self.batches[self.done]
            before(self.done)
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(inputs), targets).backward()
            self.loop.before_step()
            self.optimizer.step()
            self.done += 1
            self.loop.step_done(self.lr, tokens=len(inputs))
            if self.loop.due or self.loop.overtaken:
                self.summaries.append(self.loop.close_interval(self.preview()))
        return self

    def finish(self) -> Replica:
        self.run()
        self.loop.finish(self.preview())
        return self


def make_replica(
    collective: Any,
    *,
    model: nn.Module | None = None,
    policy: Policy | None = None,
    outer: OuterConfig = PLAIN,
    batches: int = 12,
    lr: float = 0.05,
    adam: bool = False,
    seed: int = 0,
    **options: Any,
) -> Replica:
    torch.manual_seed(7 + seed)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(100 + collective.replica)
    data = [(torch.randn(6, 4, generator=generator), torch.randn(6, 1, generator=generator)) for _ in range(batches)]
    loop = OuterLoop(model, collective, policy=policy or FixedPolicy(horizon=4), outer=outer, **options)
    trained = [p for p in model.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=lr) if adam else torch.optim.SGD(trained, lr=lr)
    return Replica(model, loop, optimizer, data, lr)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def run_fleet(count: int, make: Callable[[Any], Replica]) -> list[Replica]:
    collectives = InProcessFleet(count).collectives()
    replicas = [make(collective) for collective in collectives]
    return run_threads([replica.finish for replica in replicas])


def test_one_replica_at_outer_lr_one_without_momentum_is_plain_training() -> None:
    (replica,) = run_fleet(1, lambda c: make_replica(c, adam=True, batches=17))
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for inputs, targets in replica.batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    # anchor - (anchor - local) differs from local by at most one rounding of the difference, each of five rounds.
    torch.testing.assert_close(weights(replica.model), weights(model), rtol=0, atol=5e-6)
    assert [s.steps for s in replica.summaries or []] == [4, 4, 4, 4, 1]


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(1))


def scalar_fleet(moves: list[list[float]], outer: OuterConfig) -> list[float]:
    """Each replica moves its scalar by hand; the value after each round."""

    def run(collective: Any) -> list[float]:
        model = Scalar()
        loop = OuterLoop(model, collective, policy=FixedPolicy(horizon=1), outer=outer)
        loop.start(constant_preview(loop.grid, 1.0, None))
        seen = []
        for move in moves[collective.replica]:
            with torch.no_grad():
                model.theta += move
            loop.step_done(1.0)
            loop.close_interval(constant_preview(loop.grid, 1.0, None))
            seen.append(model.theta.item())
        return seen

    collectives = InProcessFleet(len(moves)).collectives()
    histories = run_threads([lambda c=c: run(c) for c in collectives])
    assert all(history == histories[0] for history in histories)
    return histories[0]


def test_two_replicas_meet_in_the_middle() -> None:
    assert scalar_fleet([[1.0], [3.0]], PLAIN) == [2.0]


def test_nesterov_by_hand() -> None:
    # Round 1: mean gradient g = -2, m = -2, theta = 0 - (g + 0.9 m) = 3.8.
    # Round 2: the same moves from there, g = -2, m = 0.9 * -2 - 2 = -3.8, theta = 3.8 - (-2 - 3.42) = 9.22.
    got = scalar_fleet([[1.0, 1.0], [3.0, 3.0]], OuterConfig(lr=1.0, momentum=0.9))
    assert got == pytest.approx([3.8, 9.22], abs=1e-6)  # float32 holds 0.9 to 2e-8


@pytest.mark.parametrize("policy", [FixedPolicy(horizon=4), AutoLoCoPolicy(config=AutoLoCoConfig(base_horizon=4))])
def test_four_replicas_end_with_the_same_bits(policy: Policy) -> None:
    replicas = run_fleet(
        4, lambda c: make_replica(c, policy=policy, outer=OuterConfig(), adam=True, batches=50, seed=c.replica)
    )
    assert len({replica.loop.digest for replica in replicas}) == 1
    for replica in replicas[1:]:
        assert torch.equal(weights(replica.model), weights(replicas[0].model))
    assert not torch.equal(replicas[0].batches[0][0], replicas[1].batches[0][0])


def through_bytes(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("stop", [0, 3, 4, 10, 13])
def test_resuming_gives_the_bits_of_the_uninterrupted_run(stop: int) -> None:
    def make(collective: Any) -> Replica:
        return make_replica(
            collective,
            adam=True,
            batches=23,
            outer=OuterConfig(),
            policy=AutoLoCoPolicy(config=AutoLoCoConfig(base_horizon=4)),
        )

    whole = run_fleet(2, make)
    fleet = InProcessFleet(2)
    halves = [make(c) for c in fleet.collectives()]
    run_threads([lambda r=r: r.run(stop) for r in halves])
    saved = [
        (
            copy.deepcopy(r.model.state_dict()),
            copy.deepcopy(r.optimizer.state_dict()),
            through_bytes(r.loop.state_dict()),
        )
        for r in halves
    ]
    resumed = []
    for collective, (model, optimizer, outer) in zip(InProcessFleet(2).collectives(), saved, strict=True):
        replica = make(collective)
        replica.model.load_state_dict(model)
        replica.optimizer.load_state_dict(optimizer)
        replica.loop.load_state_dict(outer)
        replica.done = stop
        resumed.append(replica)
    run_threads([r.finish for r in resumed])
    assert {r.loop.digest for r in resumed} == {whole[0].loop.digest}
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(weights(one.model), weights(other.model))
        mine, theirs = one.loop.state_dict(), other.loop.state_dict()
        assert mine["shared"] == theirs["shared"]
        for name in mine["momentum"]:
            assert torch.equal(mine["momentum"][name], theirs["momentum"][name])


class EarlierLife:
    """A collective that finds, in its first round, what an earlier process of this replica has contributed."""

    def __init__(self, inner: Any, *, leaving: bool) -> None:
        self._inner, self._leaving = inner, [leaving]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def average(self, contribution: Contribution) -> RoundOutcome:
        report = contribution.report
        if self._leaving:
            report = dataclasses.replace(report, leaving=self._leaving.pop())
        return self._inner.average(dataclasses.replace(contribution, report=report))


def test_who_has_left_is_what_the_fleet_was_told() -> None:
    inner = InProcessFleet(1, timeout_seconds=2.0).collectives()[0]
    staying = make_replica(EarlierLife(inner, leaving=False))
    staying.run(2)
    staying.loop.finish(staying.preview())  # the fleet expects it: it takes its leave in another round
    assert staying.loop.round == 2 and staying.loop.ended

    inner = InProcessFleet(1, timeout_seconds=2.0).collectives()[0]
    gone = make_replica(EarlierLife(inner, leaving=True))
    gone.run(1)
    gone.loop.close_interval(gone.preview())
    assert gone.loop.left


def test_state_of_another_replica_or_with_a_missing_key_is_refused() -> None:
    a, b = InProcessFleet(2).collectives()
    one, other = make_replica(a), make_replica(b)
    run_threads([lambda: one.run(5), lambda: other.run(5)])
    state = one.loop.state_dict()
    fresh = make_replica(InProcessFleet(2).collectives()[1])
    with pytest.raises(FleetMismatch, match="replica 0 can't resume replica 1"):
        fresh.loop.load_state_dict(state)
    del state["momentum"]
    again = make_replica(InProcessFleet(2).collectives()[0])
    with pytest.raises(KeyError, match="momentum"):
        again.loop.load_state_dict(state)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_a_runaway_weight_never_reaches_the_others(value: float) -> None:
    def make(collective: Any) -> Replica:
        return make_replica(collective, adam=True, batches=16, outer=OuterConfig(momentum=0.9))

    collectives = InProcessFleet(2).collectives()
    replicas = [make(c) for c in collectives]

    def poison(replica: Replica) -> Replica:
        def before(step: int) -> None:
            if step == 2 and replica.loop.replica == 1:
                with torch.no_grad():
                    next(replica.model.parameters()).view(-1)[0] = value

        replica.run(4, before)
        if replica.summaries and replica.summaries[-1].restored:
            repair_optimizer_state(replica.optimizer)
        return replica.finish()

    a, b = run_threads([lambda r=r: poison(r) for r in replicas])
    assert a.loop.digest == b.loop.digest and torch.equal(weights(a.model), weights(b.model))
    assert bool(torch.isfinite(weights(a.model)).all()) and float(weights(a.model).abs().max()) < 100
    assert b.summaries is not None
    assert b.summaries[0].members == (0,) and b.summaries[0].restored == (not math.isfinite(value))
    assert ("outlier" if value == 1e30 else "not finite") in b.summaries[0].absent[1]
    assert all(torch.isfinite(m).all() for m in a.loop.state_dict()["momentum"].values())
    assert b.summaries[1].members == (0, 1)  # it is back in the next round


def test_frozen_layers_are_neither_sent_nor_changed_and_join_later() -> None:
    def run(collective: Any) -> Replica:
        replica = make_replica(collective, outer=OuterConfig(momentum=0.9), batches=12)
        first = replica.model[0]
        assert isinstance(first, nn.Linear)
        return replica

    collectives = InProcessFleet(2).collectives()
    torch.manual_seed(3)
    base = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    models = [copy.deepcopy(base) for _ in collectives]
    for model in models:
        model[0].requires_grad_(False)
    replicas = [
        make_replica(c, model=m, outer=OuterConfig(momentum=0.9)) for c, m in zip(collectives, models, strict=True)
    ]
    sent: dict[int, list[str]] = {}

    def drive(replica: Replica) -> Replica:
        def before(step: int) -> None:
            if step == 4:
                sent[replica.loop.replica] = list(replica.loop.state_dict()["anchor"])
                assert torch.equal(replica.model[0].weight, base[0].weight)
            if step == 5:
                replica.model[0].requires_grad_(True)

        return replica.run(None, before).finish()

    a, b = run_threads([lambda r=r: drive(r) for r in replicas])
    assert sent[0] == ["2.weight", "2.bias"]
    assert sorted(a.loop.state_dict()["anchor"]) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert torch.equal(weights(a.model), weights(b.model)) and a.loop.digest == b.loop.digest
    assert not torch.equal(a.model[0].weight, base[0].weight)


def test_frozen_tensors_that_differ_are_refused_by_name() -> None:
    collectives = InProcessFleet(2).collectives()
    models = [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in collectives]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model[0].requires_grad_(False)
    with torch.no_grad():
        models[1][0].bias += 1.0
    replicas = [make_replica(c, model=m) for c, m in zip(collectives, models, strict=True)]
    with pytest.raises(FleetMismatch, match="0.bias"):
        run_threads([r.finish for r in replicas], timeout_seconds=10)


class Odd(nn.Module):
    """Tied embedding, BatchNorm with its integer counter, a non-persistent buffer, a branch that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x))).sum(1, keepdim=True)


def test_tied_tensors_buffers_and_unused_branches() -> None:
    torch.manual_seed(11)
    base = Odd()

    def make(collective: Any) -> Replica:
        model = copy.deepcopy(base)
        model.cache.fill_(float(collective.replica))
        model.norm.num_batches_tracked.fill_(100 * collective.replica)
        return make_replica(collective, model=model, outer=OuterConfig(momentum=0.9))

    a, b = run_fleet(2, make)
    names = list(a.loop.state_dict()["anchor"])
    assert names.count("embed.weight") == 1 and "head.weight" not in names
    assert "norm.running_mean" in names and "norm.num_batches_tracked" not in names and "cache" not in names
    assert a.model.head.weight is a.model.embed.weight
    for name, value in a.model.state_dict().items():
        other = b.model.state_dict()[name]
        assert torch.equal(value, other) == (name != "norm.num_batches_tracked"), name
    assert torch.equal(a.model.unused.weight, base.unused.weight)
    assert a.model.cache[0] == 0.0 and b.model.cache[0] == 1.0
    assert not torch.equal(a.model.norm.running_mean, base.norm.running_mean)


def test_local_buffers_stay_local() -> None:
    torch.manual_seed(11)
    base = Odd()
    a, b = run_fleet(2, lambda c: make_replica(c, model=copy.deepcopy(base), buffers="local"))
    assert torch.equal(a.model.embed.weight, b.model.embed.weight)
    assert not torch.equal(a.model.norm.running_mean, b.model.norm.running_mean)


def test_the_float32_anchor_moves_where_bfloat16_weights_cannot() -> None:
    """Ten outer updates of 1e-4 of the weight: each is lost in bfloat16 (resolution 2**-8), their sum is not."""
    collective = InProcessFleet(1).collectives()[0]
    model = Scalar().to(torch.bfloat16)
    with torch.no_grad():
        model.theta.fill_(1.0)
    loop = OuterLoop(model, collective, policy=FixedPolicy(horizon=1), outer=OuterConfig(lr=1e-4 / 2**-7, momentum=0.0))
    loop.start(constant_preview(loop.grid, 1.0, None))
    for _ in range(50):
        with torch.no_grad():
            model.theta += 2**-7  # one step of bfloat16 above 1: the least the local weight can move
        loop.step_done(1.0)
        loop.close_interval(constant_preview(loop.grid, 1.0, None))
    anchor = loop.state_dict()["anchor"]["theta"].item()
    assert anchor == pytest.approx(1.0 + 50 * 1e-4, rel=1e-5)  # float32 rounding of fifty additions
    assert model.theta.item() == 1.0078125  # and the narrow weight follows as soon as it can


def test_uneven_lengths_end_alike() -> None:
    """10, 7 and no batches at horizon 4: each leaves with what it has, and takes the final weights."""
    lengths = (10, 7, 0)
    replicas = run_fleet(3, lambda c: make_replica(c, batches=lengths[c.replica], outer=OuterConfig(momentum=0.9)))
    assert len({r.loop.digest for r in replicas}) == 1
    assert all(torch.equal(weights(r.model), weights(replicas[0].model)) for r in replicas)
    assert all(r.loop.ended for r in replicas)
    assert replicas[0].loop.round == 3


def test_narrow_or_renamed_models_are_refused() -> None:
    a, b = InProcessFleet(2).collectives()
    one = make_replica(a, model=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    other = make_replica(b, model=nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1)))
    with pytest.raises(FleetMismatch, match="0.bias"):
        run_threads([one.finish, other.finish], timeout_seconds=10)


def test_compiled_and_eager_models_share_names() -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    compiled = torch.compile(copy.deepcopy(plain), backend="eager")
    assert isinstance(compiled, nn.Module)
    a, b = InProcessFleet(2).collectives()
    replicas = [make_replica(a, model=plain), make_replica(b, model=compiled)]
    run_threads([r.finish for r in replicas])
    assert replicas[0].loop.digest == replicas[1].loop.digest


def test_tokens_weight_the_mean_when_asked() -> None:
    def run(collective: Any) -> float:
        model = Scalar()
        loop = OuterLoop(model, collective, policy=FixedPolicy(horizon=1), outer=PLAIN, weighting="tokens")
        loop.start(constant_preview(loop.grid, 1.0, None))
        with torch.no_grad():
            model.theta += 1.0 if collective.replica == 0 else 3.0
        loop.step_done(1.0, tokens=10 if collective.replica == 0 else 1000)
        loop.close_interval(constant_preview(loop.grid, 1.0, None))
        return model.theta.item()

    values = run_threads([lambda c=c: run(c) for c in InProcessFleet(2).collectives()])
    assert values[0] == values[1] == pytest.approx((10 * 1 + 1000 * 3) / 1010, rel=1e-6)  # float32 rounding


def test_the_shared_weights_can_be_looked_at_inside_an_interval() -> None:
    (collective,) = InProcessFleet(1).collectives()
    replica = make_replica(collective)
    before = weights(replica.model).clone()
    replica.run(2)
    local = weights(replica.model).clone()
    with replica.loop.shared_weights():
        assert torch.equal(weights(replica.model), before)
    assert torch.equal(weights(replica.model), local) and not torch.equal(local, before)


@pytest.mark.parametrize("at", [4, 6])  # between two intervals, and inside one
def test_one_layer_frozen_as_another_is_unfrozen(at: int) -> None:
    """The number of trainable tensors stays the same; which they are does not."""
    torch.manual_seed(3)
    base = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def make(collective: Any) -> Replica:
        model = copy.deepcopy(base)
        model[0].requires_grad_(False)
        return make_replica(collective, model=model, outer=OuterConfig(momentum=0.9))

    def drive(replica: Replica) -> Replica:
        def before(step: int) -> None:
            if step == at:
                replica.model[0].requires_grad_(True)
                replica.model[2].requires_grad_(False)

        return replica.run(None, before).finish()

    replicas = [make(collective) for collective in InProcessFleet(2).collectives()]
    a, b = run_threads([lambda r=r: drive(r) for r in replicas])
    assert torch.equal(weights(a.model), weights(b.model)) and a.loop.digest == b.loop.digest
    for layer in (0, 2):
        assert not torch.equal(a.model[layer].weight, base[layer].weight)


def test_a_run_in_which_nobody_can_be_averaged_ends() -> None:
    def poisoned(collective: Any) -> None:
        replica = make_replica(collective, batches=40)

        def before(step: int) -> None:
            if step >= 8:
                with torch.no_grad():
                    next(replica.model.parameters()).fill_(math.nan)

        replica.run(None, before)

    with pytest.raises(
        RoundError, match=r"nobody could be averaged in the last 3 rounds \(up to round 4\).*not finite"
    ):
        run_threads([lambda c=c: poisoned(c) for c in InProcessFleet(2).collectives()])


@pytest.mark.parametrize("lr, tokens", [(math.nan, 1), (-1.0, 1), (0.1, -8), (0.1, 8.0)])
def test_counts_that_cannot_be_are_refused_here(lr: float, tokens: Any) -> None:
    replica = make_replica(InProcessFleet(1).collectives()[0]).run(1)
    with pytest.raises(ValueError, match="lr must be|tokens must be"):
        replica.loop.step_done(lr, tokens)
