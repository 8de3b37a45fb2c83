"""The learning-rate preview against what really happens, bit for bit, for torch's schedulers and some of one's own."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs

from composer_replication.preview import (
    LoopPosition,
    Previewer,
    Scheduled,
    group_weights,
    mean_rate,
    preview_rates,
)

STEPS = 40
GRID = (1, 2, 3, 5, 8, 13)


class HalfEvery:
    """A schedule function with a state of its own, that it only reads."""

    def __init__(self, every: int) -> None:
        self.every = every

    def __call__(self, step: int) -> float:
        return 0.5 ** (step // self.every)


class OwnScheduler(lrs.LRScheduler):
    def get_lr(self) -> list[float]:
        return [group["lr"] * (1.0 - 0.01 * (self.last_epoch % 3)) for group in self.optimizer.param_groups]


class Random(lrs.LRScheduler):
    def get_lr(self) -> list[float]:
        factor = random.random() + torch.rand(()).item()
        return [base * factor for base in self.base_lrs]


class DuckTyped:
    """No torch scheduler at all: something with a step method."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.done = optimizer, 0

    def step(self) -> None:
        self.done += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.done)


class Module(torch.nn.Module):
    """Holds the schedule function as a method, and refuses to be copied: the preview must not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def factor(self, step: int) -> float:
        return 1.0 / (1.0 + step)

    def __deepcopy__(self, memo: dict[int, Any]) -> Module:
        raise AssertionError("the module was copied")


Maker = Callable[[torch.optim.Optimizer], Any]

MAKERS: dict[str, Maker] = {
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "lambda object": lambda o: lrs.LambdaLR(o, HalfEvery(4)),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.97),
    "step": lambda o: lrs.StepLR(o, 5, gamma=0.3),
    "multistep": lambda o: lrs.MultiStepLR(o, [3, 9, 11], gamma=0.3),
    "constant": lambda o: lrs.ConstantLR(o, factor=0.3, total_iters=7),
    "linear": lambda o: lrs.LinearLR(o, total_iters=11),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.93),
    "polynomial": lambda o: lrs.PolynomialLR(o, total_iters=30, power=2.0),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, STEPS // 2),  # climbs again in the second half
    "warm restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 7, 2),
    "one cycle": lambda o: lrs.OneCycleLR(o, max_lr=[0.3, 0.2], total_steps=STEPS),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=4),
    "cyclic scaled": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=4, scale_fn=HalfEvery(2)),
    "cyclic scaled by a function": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=4, scale_fn=lambda x: 1 / (1 + x)),
    "sequential": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=6), lrs.LambdaLR(o, lambda s: 0.9**s)], milestones=[6]
    ),
    "sequential in sequential": lambda o: lrs.SequentialLR(
        o,
        [
            lrs.SequentialLR(o, [lrs.LinearLR(o, 0.1, total_iters=6), lrs.ExponentialLR(o, 0.9)], milestones=[6]),
            lrs.ConstantLR(o, 0.1, 3),
        ],
        milestones=[11],
    ),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.1, 4), lrs.ExponentialLR(o, 0.9)]),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=9),
    "own": OwnScheduler,
    "random": Random,
    "duck": DuckTyped,
}


def new_optimizer(tensor_lr: bool = False) -> torch.optim.Optimizer:
    def rate(value: float) -> Any:
        return torch.tensor(value, dtype=torch.float64) if tensor_lr else value

    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(7, 3))], "lr": rate(0.1)},
        {"params": [torch.nn.Parameter(torch.zeros(5))], "lr": rate(0.02)},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def train(
    optimizer: torch.optim.Optimizer, schedulers: list[Scheduled], loop: LoopPosition, steps: int
) -> tuple[list[float], LoopPosition]:
    """A training loop written out: the rates that `steps` optimizer steps ran with, and where it stands then."""
    weights, rates = group_weights(optimizer), []
    batch, epoch = loop.batch, loop.epoch
    while len(rates) < steps:
        if batch == loop.batches_per_epoch:
            batch, epoch = 0, epoch + 1
        batch += 1
        last = batch == loop.batches_per_epoch
        if batch % loop.accumulate == 0 or last:
            rates.append(mean_rate(optimizer.param_groups, weights))
            optimizer.step()
            for one in schedulers:
                if one.interval == "step" and batch % one.frequency == 0:
                    one.scheduler.step()
        if last:
            for one in schedulers:
                if one.interval == "epoch" and (epoch + 1) % one.frequency == 0:
                    one.scheduler.step()
    return rates, LoopPosition(
        batches_per_epoch=loop.batches_per_epoch, accumulate=loop.accumulate, batch=batch, epoch=epoch
    )


def sums_of(rates: list[float]) -> tuple[float, ...]:
    sums = []
    for length in GRID:
        total = 0.0
        for rate in rates[:length]:
            total += rate
        sums.append(total)
    return tuple(sums)


def picture(optimizer: torch.optim.Optimizer, schedulers: list[Scheduled]) -> Any:
    """All that a preview could disturb."""
    states = [
        one.scheduler.state_dict() if hasattr(one.scheduler, "state_dict") else dict(vars(one.scheduler))
        for one in schedulers
    ]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return repr((groups, [sorted(state.items(), key=str) for state in states], random.getstate())) + str(
        torch.random.get_rng_state().sum()
    )


def check(make: Maker, loop: LoopPosition, *, tensor_lr: bool = False, interval: str = "step", frequency: int = 1):
    optimizer = new_optimizer(tensor_lr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some schedulers warn about themselves when they are made
        schedulers = [Scheduled(scheduler=make(optimizer), interval=interval, frequency=frequency)]
    done = 0
    for stretch in (0, 1, 4, 9, 13):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, loop = train(optimizer, schedulers, loop, stretch)
        done += stretch
        remaining = STEPS - done
        before = picture(optimizer, schedulers)
        taken = preview_rates(optimizer, schedulers, loop, grid=GRID, remaining=remaining)
        assert picture(optimizer, schedulers) == before
        assert taken.mode == "exact", taken.reason
        # What really comes, run on a twin (a copy of everything, optimizer and parameters included).
        twin_optimizer, twin_schedulers = copy.deepcopy((optimizer, schedulers))
        states = random.getstate(), torch.random.get_rng_state()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rates, _ = train(twin_optimizer, twin_schedulers, loop, min(GRID[-1], remaining))
        random.setstate(states[0])
        torch.random.set_rng_state(states[1])
        assert taken.preview.sums == sums_of(rates)
        assert taken.preview.next_lr == rates[0]
        assert taken.preview.remaining == remaining


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float lr", "tensor lr"])
def test_the_preview_is_what_the_run_then_does(name: str, tensor_lr: bool) -> None:
    check(MAKERS[name], LoopPosition(), tensor_lr=tensor_lr)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("interval,frequency", [("step", 1), ("step", 2), ("step", 3), ("epoch", 1), ("epoch", 2)])
def test_accumulation_epochs_and_frequency(accumulate: int, interval: str, frequency: int) -> None:
    loop = LoopPosition(batches_per_epoch=7, accumulate=accumulate)
    check(MAKERS["exponential"], loop, interval=interval, frequency=frequency)


def test_two_schedulers_of_one_optimizer() -> None:
    optimizer = new_optimizer()
    schedulers = [
        Scheduled(scheduler=lrs.ExponentialLR(optimizer, 0.9)),
        Scheduled(scheduler=lrs.StepLR(optimizer, 1, gamma=0.5), interval="epoch"),
    ]
    loop = LoopPosition(batches_per_epoch=3, batch=1)
    taken = preview_rates(optimizer, schedulers, loop, grid=GRID)
    rates, _ = train(optimizer, schedulers, loop, GRID[-1])
    assert taken.preview.sums == sums_of(rates)


def test_a_method_of_a_pinned_module_is_followed_without_copying_the_module() -> None:
    module = Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    schedulers = [Scheduled(scheduler=lrs.LambdaLR(optimizer, module.factor))]
    taken = preview_rates(optimizer, schedulers, LoopPosition(), grid=(3,), pinned=[module])
    assert (taken.mode, taken.preview.sums) == ("exact", (1.0 + 1 / 2 + 1 / 3,))


def test_nothing_beyond_the_budget_is_counted() -> None:
    optimizer = new_optimizer()
    schedulers = [Scheduled(scheduler=lrs.OneCycleLR(optimizer, max_lr=0.1, total_steps=5))]
    # one step more than 5 raises, so a preview that looked beyond the budget could not be exact
    taken = preview_rates(optimizer, schedulers, LoopPosition(), grid=(2, 4, 6, 8), remaining=5)
    rates, _ = train(optimizer, [Scheduled(scheduler=schedulers[0].scheduler)], LoopPosition(), 5)
    assert taken.mode == "exact"
    assert taken.preview.sums == (sum(rates[:2]), sum(rates[:4]), sum(rates), sum(rates))
    assert taken.preview.mass(5) == sum(rates)
    nothing = preview_rates(optimizer, schedulers, LoopPosition(), grid=(2, 4), remaining=0)
    assert (nothing.mode, nothing.preview.sums, nothing.preview.mass(0)) == ("exact", (0.0, 0.0), 0.0)


def test_beyond_a_scheduler_s_end_the_last_rate_is_kept_and_that_is_said() -> None:
    optimizer = new_optimizer()
    schedulers = [Scheduled(scheduler=lrs.OneCycleLR(optimizer, max_lr=0.1, total_steps=5))]
    taken = preview_rates(optimizer, schedulers, LoopPosition(), grid=(5, 6, 8))
    assert taken.mode == "constant" and "failed" in taken.reason
    # torch allows one step beyond the end before it raises
    five, six, eight = taken.preview.sums
    assert eight == pytest.approx(six + 2 * (six - five), rel=1e-12)  # rounding of the sums


@pytest.mark.parametrize(
    "make,interval,because",
    [
        (lrs.ReduceLROnPlateau, "epoch", "waits for a metric"),
        (lambda o: lrs.ExponentialLR(o, 0.9), "epoch", "length of an epoch is not known"),
    ],
    ids=["plateau", "epoch of unknown length"],
)
def test_what_cannot_be_told_is_taken_as_constant_and_said_once(make: Maker, interval: str, because: str) -> None:
    optimizer = new_optimizer()
    told: list[str] = []
    previewer = Previewer(optimizer, [Scheduled(scheduler=make(optimizer), interval=interval)], tell=told.append)
    for _ in range(3):
        taken = previewer.take(LoopPosition(), grid=(1, 3), remaining=2, weights=(1, 0))
        assert (taken.mode, taken.preview.sums, taken.preview.next_lr) == ("constant", (0.1, 0.2), 0.1)
    assert len(told) == 1 and because in told[0]


def test_the_caller_can_say_that_schedulers_do_not_tell() -> None:
    optimizer = new_optimizer()
    schedulers = [Scheduled(scheduler=lrs.ExponentialLR(optimizer, 0.5))]
    with pytest.warns(UserWarning, match="manual optimization"):
        taken = Previewer(optimizer, schedulers, constant_because="manual optimization").take(LoopPosition(), grid=(2,))
    assert taken.preview.sums == (2 * taken.preview.next_lr,)


def test_a_scheduler_that_cannot_be_copied_is_left_alone() -> None:
    class Stubborn(DuckTyped):
        def __deepcopy__(self, memo: dict[int, Any]) -> Stubborn:
            raise RuntimeError("no copies")

    optimizer = new_optimizer()
    stubborn = Stubborn(optimizer)
    taken = preview_rates(optimizer, [Scheduled(scheduler=stubborn)], LoopPosition(), grid=(2,))
    assert taken.mode == "constant" and "no copies" in taken.reason and stubborn.done == 0


def test_no_scheduler_is_an_exact_constant() -> None:
    taken = preview_rates(new_optimizer(), [], LoopPosition(), grid=(2,), weights=(1, 0))
    assert (taken.mode, taken.preview.sums) == ("exact", (0.2,))


def test_groups_count_by_their_trainable_elements() -> None:
    optimizer = new_optimizer()
    assert group_weights(optimizer) == (21, 5)
    assert mean_rate(optimizer.param_groups, (21, 5)) == pytest.approx((21 * 0.1 + 5 * 0.02) / 26, rel=1e-15)
    optimizer.param_groups[0]["params"][0].requires_grad_(False)
    assert mean_rate(optimizer.param_groups, group_weights(optimizer)) == 0.02
    assert mean_rate(optimizer.param_groups, (0, 0)) == pytest.approx(0.06, rel=1e-15)
    with pytest.raises(ValueError, match="weights must have one item"):
        mean_rate(optimizer.param_groups, (1,))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Scheduled(scheduler=None, interval="batch"),
        lambda: Scheduled(scheduler=None, frequency=0),
        lambda: LoopPosition(accumulate=0),
        lambda: LoopPosition(batches_per_epoch=0),
        lambda: LoopPosition(batch=-1),
        lambda: preview_rates(new_optimizer(), [], LoopPosition(), grid=()),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        make()
