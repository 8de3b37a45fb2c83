"""The rates ahead are those that come, and looking ahead changes none of them."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("composer")

import torch
from composer.core import DataSpec, Event, State
from composer.optim import (
    ConstantScheduler,
    CosineAnnealingWithWarmupScheduler,
    LinearScheduler,
    MultiStepWithWarmupScheduler,
)
from torch.optim import lr_scheduler

from composer_replication.collective.in_process import InProcessFleet
from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.composer.algorithm import AutoLoCo
from composer_replication.preview import LoopPosition
from composer_replication.store import MemoryStore
from tests.composer.helpers import At, Regression, algorithm, data, in_threads, train, weights

AHEAD = (1, 2, 3, 4, 5, 6, 7)


def epochs(state: State) -> float:
    return 0.5 ** int(state.timestamp.epoch)


COMPOSERS: dict[str, Any] = {
    "cosine in batches": lambda: CosineAnnealingWithWarmupScheduler(t_warmup="3ba", t_max="13ba", alpha_f=0.1),
    "cosine in tokens": lambda: CosineAnnealingWithWarmupScheduler(t_warmup="20tok", t_max="60tok", alpha_f=0.1),
    "steps in samples": lambda: MultiStepWithWarmupScheduler(t_warmup="4sp", milestones=["8sp", "14sp"], gamma=0.5),
    "epochs": lambda: epochs,
    "the last one wins": lambda: [LinearScheduler(t_max="12ba"), ConstantScheduler(alpha=0.5)],
    "none": lambda: None,
}
TORCHS: dict[str, Any] = {
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.3, total_steps=20),
    "sequence": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.9)], milestones=[3]
    ),
    "chain": lambda opt: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(opt, 0.9), lr_scheduler.StepLR(opt, 2)]
    ),
}


def watched(schedulers: Any, optimizer: Any, model: Regression, **settings: Any) -> tuple[AutoLoCo, list, list]:
    """Rates that were used, and what was foreseen after each batch."""
    ours = algorithm(InProcessFleet(1).collectives()[0], step_schedulers_every_batch=settings.get("told"))
    settings.pop("told", None)
    used: list[float] = []
    foreseen: list[tuple[float, ...]] = []

    def look(state: State) -> None:
        fit = ours._session.fit
        assert fit is not None
        before = state.timestamp
        taken = fit._previewer.take(LoopPosition(), grid=AHEAD, remaining=fit.remaining())
        assert taken.mode == "exact" and state.timestamp is before
        foreseen.append(taken.preview.sums)

    optimizer.register_step_post_hook(lambda opt, *_: used.append(opt.param_groups[0]["lr"]))
    # 5 tokens a batch of 2, epochs of 5 batches
    spec = DataSpec(data(10, batch_size=2), get_num_tokens_in_batch=lambda batch: 5)
    train(
        model,
        spec,
        At(Event.FIT_START, look),
        ours,
        At(Event.BATCH_END, look),
        optimizers=optimizer,
        schedulers=schedulers,
        max_duration="13ba",
        **settings,
    )
    return ours, used, foreseen


def assert_foreseen(used: list[float], foreseen: list[tuple[float, ...]], *, since: int = 0) -> None:
    assert len(used) == 13 and len(foreseen) == 14
    for done in range(since, 14):
        total, sums = 0.0, []
        for ahead in range(len(AHEAD)):
            total += used[done + ahead] if done + ahead < 13 else 0.0
            sums.append(total)
        assert foreseen[done] == tuple(sums), f"after {done} batches"


@pytest.mark.parametrize("name", COMPOSERS)
def test_composers_schedulers(name: str) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours, used, foreseen = watched(COMPOSERS[name](), optimizer, model)
    # How many tokens a batch has is known from the first batch on.
    assert_foreseen(used, foreseen, since=1 if "tokens" in name else 0)
    assert not any("schedulers" in text for text in ours.said)
    if name not in ("none", "the last one wins"):
        assert len(set(used)) > 2


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")  # torch's own, of its own
@pytest.mark.parametrize("every_batch", [True, False])
@pytest.mark.parametrize("name", TORCHS)
def test_torchs_schedulers(name: str, every_batch: bool) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedulers = TORCHS[name](optimizer)
    settings = {"step_schedulers_every_batch": True, "told": True} if every_batch else {}
    _, used, foreseen = watched(schedulers, optimizer, model, **settings)
    assert_foreseen(used, foreseen)
    assert len(set(used)) >= 3


def test_a_frequency_that_was_not_told_is_found_with_the_first_batch() -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.warns(UserWarning, match="step_schedulers_every_batch=True too"):
        _, used, foreseen = watched(schedule, optimizer, model, step_schedulers_every_batch=True)
    assert_foreseen(used, foreseen, since=1)


def test_a_replica_that_is_overtaken_moves_on_with_the_fleet_s_time_and_rates() -> None:
    """Three replicas, "skip": the third sits out round 1, and time, schedule and budget go on without it."""
    store = MemoryStore()
    used: dict[int, list[float]] = {}

    def replica(index: int, _: Any) -> Any:
        collective = ObjectStoreCollective(
            store,
            replica=index,
            replicas=3,
            failure_policy="skip",
            timeout_seconds=0.3 if index < 2 else 60,
            heartbeat_seconds=0.05,
            poll_seconds=0.01,
        )
        model, ours = Regression(), algorithm(collective)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rates = used[index] = []
        optimizer.register_step_post_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))

        def hold(state: State) -> None:
            if index == 2 and state.timestamp.batch == 5:
                held = threading.Event()
                for _ in range(1000):
                    if collective.overtaken:
                        return
                    held.wait(0.01)
                raise AssertionError("waited in vain")

        made = train(
            model,
            data(3 * 20, index, 3),
            At(Event.BATCH_START, hold),
            ours,
            optimizers=optimizer,
            schedulers=LinearScheduler(t_max="20ba"),
            max_duration="12ba",
        )
        return ours, made.state.timestamp, weights(model)

    (first, *_, shared), _, (late, time, other) = in_threads(3, replica)
    assert all(torch.equal(shared[name], other[name]) for name in shared)
    assert len(used[0]) == 12 and len(late.rounds) == 3 and not late.rounds[1].included
    # It took 4 steps, 2 that were lost, and 4 more at the rates of the fleet's steps 8 to 11.
    assert used[2] == used[0][:6] + used[0][8:]
    assert (time.batch.value, time.batch_in_epoch.value) == (12, 10)
    assert late.final is not None and late.final.intervals_lost == 1
