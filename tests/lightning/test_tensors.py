"""Models that aren't plain: frozen, tied, compiled, narrow, with buffers, or gone bad."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.lightning.helpers import Numbered, Tiny, assert_same_bits, callback, in_threads, loader, trainer, weights


def fleet_of(make: Any, *, count: int = 16, batch_size: int = 1, settings: Any = None, **options: Any) -> list[Any]:
    """Two replicas; for each its module, its callback and its weights before the start."""

    def replica(index: int, collective: Any) -> Any:
        module, before = make(index), None
        before = weights(module)
        ours = callback(collective, **options)
        trainer(ours, **{"max_epochs": 1, **(settings or {})}).fit(module, loader(count, batch_size=batch_size))
        return module, ours, before

    return in_threads(2, replica)


class Thawing(Tiny):
    """The first layer is frozen until step 5."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=0)
        self.index = seed
        self.net[0].requires_grad_(False)
        self.held: list[Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.held.append(self.net[0].weight.detach().clone())
        if batch_idx == 5:
            self.net[0].requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_frozen_layers_are_neither_sent_nor_changed_and_join_when_unfrozen() -> None:
    (first, ours, before), (second, *_) = fleet_of(Thawing, count=24)
    loop = ours.loop.state_dict()
    assert all(torch.equal(held, before["net.0.weight"]) for held in first.held[:6])
    assert not torch.equal(first.held[6], first.held[5])
    assert_same_bits(weights(first), weights(second))
    # Rounds of 4: in the first only the second layer travels (12 elements), from the second on all 47.
    sent = [round.bytes_sent for round in ours.rounds]
    assert 4 * 12 <= sent[0] < 4 * 47 <= sent[1] == sent[2]
    assert set(loop["anchor"]) == {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}
    assert not torch.equal(loop["momentum"]["net.0.weight"], torch.zeros(30))


def test_different_frozen_weights_are_refused() -> None:
    class Frozen(Tiny):
        def __init__(self, seed: int) -> None:
            super().__init__(seed=seed)
            self.net[0].requires_grad_(False)

    with pytest.raises(Exception, match=r"net\.0\.(weight|bias)"):
        fleet_of(Frozen)


class Branching(Tiny):
    """A branch that never gets a gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=0)
        self.unused = nn.Linear(3, 3)


def test_a_branch_that_never_gets_a_gradient_stays_as_it_was_published() -> None:
    (first, _, before), (second, *_) = fleet_of(Branching)
    assert_same_bits(weights(first), weights(second))
    assert torch.equal(first.unused.weight, before["unused.weight"])


class Buffered(Tiny):
    def __init__(self, seed: int) -> None:
        super().__init__(seed=0)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.also = nn.Linear(6, 6, bias=False)
        self.also.weight = self.tied.weight
        self.statistics: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.also(torch.tanh(self.tied(self.norm(batch["x"]))))
        return super().training_step({**batch, "x": x}, batch_idx)

    def on_train_batch_start(self, *_: Any) -> None:
        self.statistics.append(self.norm.running_mean.clone())


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_tied_weights_integer_counters_and_buffers(buffers: str) -> None:
    (first, ours, _), (second, _, _) = fleet_of(Buffered, count=40, batch_size=2, buffers=buffers)
    assert first.also.weight is first.tied.weight
    names = [name for name, tensor in weights(first).items() if tensor.is_floating_point() and "running" not in name]
    assert_same_bits({n: weights(first)[n] for n in names}, {n: weights(second)[n] for n in names})
    # 10 batches each: the integer counter is each replica's own count, not an average or a sum.
    assert (int(first.norm.num_batches_tracked), int(second.norm.num_batches_tracked)) == (10, 10)
    assert (first.scratch.tolist(), second.scratch.tolist()) == ([0.0, 0.0], [1.0, 1.0])
    anchors = ours.loop.state_dict()["anchor"]
    assert "also.weight" not in anchors and "tied.weight" in anchors
    assert "norm.num_batches_tracked" not in anchors and "scratch" not in anchors
    equal = torch.equal(first.norm.running_mean, second.norm.running_mean)
    assert equal == (buffers == "average")
    assert ("norm.running_mean" in anchors) == (buffers == "average")


def test_compiled_and_eager_replicas_share_their_weights() -> None:
    def make(index: int) -> Tiny:
        module = Tiny()
        if index == 0:
            # the whole wrapper, without generated code: names get "_orig_mod." all the same
            module.net = torch.compile(module.net, backend="eager")  # type: ignore[assignment]
        return module

    with torch._dynamo.config.patch(suppress_errors=False):
        (first, ours, _), (second, *_) = fleet_of(make)
    assert any("_orig_mod" in name for name in weights(first))
    plain = {name.replace("_orig_mod.", ""): tensor for name, tensor in weights(first).items()}
    assert_same_bits(plain, weights(second))
    assert all("_orig_mod" not in name for name in ours.loop.state_dict()["anchor"])


class Creeping(pl.LightningModule):
    """bfloat16 weights of 1, moved by about 1e-4 of themselves a round: less than the 2^-8 between neighbours."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight.float().sum()

    def configure_optimizers(self) -> Any:
        # One bfloat16 step down from 1 is 2^-8; an outer rate of 0.0256 makes 1e-4 of it.
        return torch.optim.SGD(self.parameters(), lr=2.0**-8)


def test_the_anchor_moves_where_the_weights_are_too_narrow() -> None:
    options = {"base_horizon": 1, "outer_lr": 0.0256, "outer_momentum": 0.0}
    (first, ours, _), (second, *_) = fleet_of(Creeping, count=20, **options)
    anchor = ours.loop.state_dict()["anchor"]["weight"]
    # Ten rounds of -0.0256 * 2^-8 = -1e-4 each, added in float32.
    torch.testing.assert_close(anchor, torch.full((8,), 1.0 - 10 * 1e-4), rtol=0, atol=1e-6)
    assert anchor.dtype == torch.float32
    assert torch.equal(first.weight, anchor.to(torch.bfloat16)) and torch.equal(first.weight, second.weight)


class GoneBad(Tiny):
    """Replica 1 gets a bad weight in its second step of four."""

    def __init__(self, index: int, value: float) -> None:
        super().__init__(seed=0, optimizer="adamw")
        self.index, self.value = index, value
        self.at_batch: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.at_batch.append(weights(self))
        if self.index == 1 and batch_idx == 2:
            with torch.no_grad():
                self.net[0].weight[0, 0] = self.value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.filterwarnings("ignore:.*weights weren't finite:UserWarning")
def test_nothing_bad_is_ever_committed(value: float) -> None:
    def replica(index: int, collective: Any) -> Any:
        module = GoneBad(index, value)
        ours = callback(collective)
        fit = trainer(ours, max_epochs=1)
        fit.fit(module, loader(32))
        return module, ours, fit.optimizers[0]

    (first, ours, _), (second, theirs, optimizer) = in_threads(2, replica)
    assert_same_bits(weights(first), weights(second))
    assert all(torch.isfinite(tensor).all() for tensor in weights(first).values())
    assert max(float(tensor.abs().max()) for tensor in weights(first).values()) < 100
    opening = ours.rounds[0]
    assert opening.members == (0,) and 1 in opening.absent
    state = ours.loop.state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in state["momentum"].values())
    # The next round has both again, and the bad replica's own optimizer works with finite numbers.
    assert all(summary.members == (0, 1) for summary in ours.rounds[1:])
    assert all(torch.isfinite(s).all() for slots in optimizer.state.values() for s in slots.values())
    assert_same_bits(first.at_batch[4], second.at_batch[4])
    if value != 1e30:
        assert theirs.rounds[0].restored and any("weren't finite" in message for message in theirs.said)
    assert not ours.said


def test_models_that_differ_are_refused_with_the_tensor_s_name() -> None:
    class Wider(Tiny):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.net[2] = nn.Linear(5, 2 + index)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.net(batch["x"]).square().mean()

    with pytest.raises(Exception, match=r"net\.2\.(weight|bias)"):
        fleet_of(Wider)


def test_replicas_that_start_from_different_seeds_train_from_one_state() -> None:
    starts: dict[int, dict[str, Tensor]] = {}

    class Different(Tiny):
        def __init__(self, index: int) -> None:
            super().__init__(seed=index)
            self.index = index

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                starts[self.index] = weights(self)

    (_, _, before), (_, _, other) = fleet_of(Different)
    assert not torch.equal(before["net.0.weight"], other["net.0.weight"])
    assert_same_bits(before, starts[0], starts[1])


def test_outer_state_beside_the_model_gives_the_same() -> None:
    results = [
        [weights(module) for module, *_ in fleet_of(lambda index: Tiny(), outer_device=device)]
        for device in ("cpu", "model")
    ]
    assert_same_bits(*results[0], *results[1])


def test_epochs_reload_and_restart_between_rounds() -> None:
    """Rounds don't care where epochs end: 3 epochs of 6 steps, rounds of 4."""

    def replica(index: int, collective: Any) -> Any:
        ours = callback(collective)
        data = DataLoader(Numbered(12), batch_size=1, shuffle=True)
        trainer(ours, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(Tiny(), data)
        return [summary.steps for summary in ours.rounds]

    assert in_threads(2, replica) == [[4, 4, 4, 4, 2]] * 2
