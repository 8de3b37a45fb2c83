"""Models that aren't plain: frozen, tied, compiled, narrow, with buffers, or gone bad."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainers.harness import Core, Fitted, Kind, Share, adamw, assert_same_bits, in_threads, sgd, weights


def fleet_of(
    kind: Kind, make: Callable[[int], Any], *, count: int = 16, batch_size: int = 1, optimize: Any = sgd, **options: Any
) -> list[tuple[Fitted, dict[str, Tensor]]]:
    """Two replicas; for each what its fit left, and its weights before the start."""

    def replica(index: int, collective: Any) -> Any:
        core = make(index)
        before = weights(core)
        share = Share(count, index, 2, batch_size=batch_size)
        return kind.fit(core, share, kind.ours(collective, **options), optimize=optimize), before

    return in_threads(2, replica)


def named(tensors: dict[str, Any]) -> dict[str, Any]:
    """By the core's names, whatever it is put into."""
    return {name.removeprefix("core."): value for name, value in tensors.items()}


class Thawing(Core):
    """The first layer is frozen until step 5."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=0)
        self.net[0].requires_grad_(False)
        self.held: list[Tensor] = []

    def begin(self, number: int) -> None:
        self.held.append(self.net[0].weight.detach().clone())
        if number == 5:
            self.net[0].requires_grad_(True)


def test_frozen_layers_are_neither_sent_nor_changed_and_join_when_unfrozen(kind: Kind) -> None:
    (first, before), (second, _) = fleet_of(kind, Thawing, count=24)
    loop = first.ours.loop.state_dict()
    held = first.core.held
    assert all(torch.equal(one, before["net.0.weight"]) for one in held[:6])
    assert not torch.equal(held[6], held[5])
    assert_same_bits(first.weights, second.weights)
    # Rounds of 4: in the first only the second layer travels (12 elements), from the second on all 47.
    sent = [round.bytes_sent for round in first.ours.rounds]
    assert 4 * 12 <= sent[0] < 4 * 47 <= sent[1] == sent[2]
    assert set(named(loop["anchor"])) == {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}
    assert not torch.equal(named(loop["momentum"])["net.0.weight"], torch.zeros(30))


class Frozen(Core):
    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self.net[0].requires_grad_(False)


class Wider(Core):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net[2] = nn.Linear(5, 2 + seed)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["x"]).square().mean()


@pytest.mark.parametrize(("make", "name"), [(Frozen, r"net\.0\.(weight|bias)"), (Wider, r"net\.2\.(weight|bias)")])
def test_models_that_differ_are_refused_with_the_tensor_s_name(kind: Kind, make: Any, name: str) -> None:
    with pytest.raises(Exception, match=name):
        fleet_of(kind, make)


class Branching(Core):
    """A branch that never gets a gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=0)
        self.unused = nn.Linear(3, 3)


def test_a_branch_that_never_gets_a_gradient_stays_as_it_was_published(kind: Kind) -> None:
    (first, before), (second, _) = fleet_of(kind, Branching)
    assert_same_bits(first.weights, second.weights)
    assert torch.equal(first.core.unused.weight, before["unused.weight"])


class Buffered(Core):
    def __init__(self, seed: int) -> None:
        super().__init__(seed=0)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.also = nn.Linear(6, 6, bias=False)
        self.also.weight = self.tied.weight

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.also(torch.tanh(self.tied(self.norm(batch["x"]))))
        return super().loss({**batch, "x": x})


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_tied_weights_integer_counters_and_buffers(kind: Kind, buffers: str) -> None:
    (one, _), (other, _) = fleet_of(kind, Buffered, count=40, batch_size=2, buffers=buffers)
    first, second = one.core, other.core
    assert first.also.weight is first.tied.weight
    names = [name for name, tensor in weights(first).items() if tensor.is_floating_point() and "running" not in name]
    assert_same_bits({n: weights(first)[n] for n in names}, {n: weights(second)[n] for n in names})
    # 10 batches each: the integer counter is each replica's own count, not an average or a sum.
    assert (int(first.norm.num_batches_tracked), int(second.norm.num_batches_tracked)) == (10, 10)
    assert (first.scratch.tolist(), second.scratch.tolist()) == ([0.0, 0.0], [1.0, 1.0])
    anchors = named(one.ours.loop.state_dict()["anchor"])
    assert "also.weight" not in anchors and "tied.weight" in anchors
    assert "norm.num_batches_tracked" not in anchors and "scratch" not in anchors
    assert torch.equal(first.norm.running_mean, second.norm.running_mean) == (buffers == "average")
    assert ("norm.running_mean" in anchors) == (buffers == "average")


def test_compiled_and_eager_replicas_share_their_weights(kind: Kind) -> None:
    def make(index: int) -> Core:
        core = Core()
        if index == 0:
            # the whole wrapper, without generated code: names get "_orig_mod." all the same
            core.net = torch.compile(core.net, backend="eager")  # type: ignore[assignment]
        return core

    with torch._dynamo.config.patch(suppress_errors=False):
        (first, _), (second, _) = fleet_of(kind, make)
    assert any("_orig_mod" in name for name in first.weights)
    plain = {name.replace("_orig_mod.", ""): tensor for name, tensor in first.weights.items()}
    assert_same_bits(plain, second.weights)
    assert all("_orig_mod" not in name for name in first.ours.loop.state_dict()["anchor"])


class Creeping(nn.Module):
    """bfloat16 weights of 1, moved by about 1e-4 of themselves a round: less than the 2^-8 between neighbours."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def loss(self, batch: Any) -> Tensor:
        return self.weight.float().sum()

    def begin(self, number: int) -> None:
        """Nothing changes."""


def test_the_anchor_moves_where_the_weights_are_too_narrow(kind: Kind) -> None:
    # One bfloat16 step down from 1 is 2^-8; an outer rate of 0.0256 makes 1e-4 of it.
    options = {"base_horizon": 1, "outer_lr": 0.0256, "outer_momentum": 0.0}
    (one, _), (other, _) = fleet_of(
        kind, Creeping, count=20, optimize=lambda module: sgd(module, lr=2.0**-8), **options
    )
    anchor = named(one.ours.loop.state_dict()["anchor"])["weight"]
    # Ten rounds of -0.0256 * 2^-8 = -1e-4 each, added in float32.
    torch.testing.assert_close(anchor, torch.full((8,), 1.0 - 10 * 1e-4), rtol=0, atol=1e-6)
    assert anchor.dtype == torch.float32
    assert torch.equal(one.core.weight, anchor.to(torch.bfloat16)) and torch.equal(one.core.weight, other.core.weight)


class GoneBad(Core):
    """Replica 1 gets a bad weight before its third step of four."""

    def __init__(self, seed: int, value: float) -> None:
        super().__init__(seed=0)
        self.index, self.value = seed, value
        self.at_batch: list[dict[str, Tensor]] = []

    def begin(self, number: int) -> None:
        self.at_batch.append(weights(self))
        if self.index == 1 and number == 2:
            with torch.no_grad():
                self.net[0].weight[0, 0] = self.value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.filterwarnings("ignore:.*weights weren't finite:UserWarning")
def test_nothing_bad_is_ever_committed(kind: Kind, value: float) -> None:
    def replica(index: int, collective: Any) -> Fitted:
        return kind.fit(GoneBad(index, value), Share(32, index, 2), kind.ours(collective), optimize=adamw)

    first, second = in_threads(2, replica)
    assert_same_bits(first.weights, second.weights)
    assert all(torch.isfinite(tensor).all() for tensor in first.weights.values())
    assert max(float(tensor.abs().max()) for tensor in first.weights.values()) < 100
    ours, theirs = first.ours, second.ours
    opening = ours.rounds[0]
    assert opening.members == (0,) and 1 in opening.absent
    state = ours.loop.state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in state["momentum"].values())
    # The next round has both again, and the bad replica's own optimizer works with finite numbers.
    assert all(summary.members == (0, 1) for summary in ours.rounds[1:])
    assert second.optimizer is not None
    assert all(torch.isfinite(s).all() for slots in second.optimizer.state.values() for s in slots.values())
    assert_same_bits(first.core.at_batch[4], second.core.at_batch[4])
    if value != 1e30:
        assert theirs.rounds[0].restored and any("weren't finite" in message for message in theirs.said)
    assert not ours.said


def test_outer_state_beside_the_model_gives_the_same(kind: Kind) -> None:
    ends = [fleet_of(kind, lambda index: Core(), outer_device=device) for device in ("cpu", "model")]
    assert_same_bits(*(fitted.weights for fleet in ends for fitted, _ in fleet))
