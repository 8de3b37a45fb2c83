"""The process-group collective over gloo, in real processes, against the same conformance suite as the threads."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication.collective.guards import Guards
from composer_replication.collective.in_process import InProcessFleet
from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.process_group import ProcessGroupCollective
from tests.collective import conformance
from tests.support.threads import run_threads

WORLD = 4
pytestmark = pytest.mark.processes


def _serve(rank: int, path: str, pipe: Connection) -> None:
    """One rank: plays the scripts it is sent, each on a fresh collective over the first `replicas` ranks."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, WORLD + 1)}
    while (job := pipe.recv()) is not None:
        replicas, codec, exact, guards, script = job
        try:
            group = None if replicas == WORLD else groups[replicas]
            pipe.send((True, script(ProcessGroupCollective(group, codec=codec, exact=exact, guards=guards))))
        except Exception:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    def __init__(self, path: Path) -> None:
        # One clean process imports torch and is forked for each rank: much faster than importing it four times.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.collective.conformance", "torch.distributed"])
        pairs = [context.Pipe() for _ in range(WORLD)]
        self.pipes = [pair[0] for pair in pairs]
        self.processes = [
            context.Process(target=_serve, args=(rank, str(path), pairs[rank][1]), daemon=True) for rank in range(WORLD)
        ]
        for process in self.processes:
            process.start()

    def run(
        self,
        replicas: int,
        codec: str,
        script: conformance.Script,
        *,
        exact: bool = True,
        guards: Guards | None = None,
    ) -> list[Any]:
        for pipe in self.pipes[:replicas]:
            pipe.send((replicas, codec, exact, guards, script))
        answers = []
        for rank, pipe in enumerate(self.pipes[:replicas]):
            assert pipe.poll(60), f"rank {rank} hangs"
            answers.append(pipe.recv())
        for good, answer in answers:
            assert good, answer
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(30)
            assert process.exitcode == 0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    group = Ranks(tmp_path_factory.mktemp("gloo") / "rendezvous")
    yield group
    group.stop()


def in_threads(replicas: int, codec: str, script: conformance.Script) -> list[Any]:
    fleet = InProcessFleet(replicas, codec=codec, timeout_seconds=30.0)
    return run_threads([partial(script, collective) for collective in fleet.collectives()])


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_conformance(ranks: Ranks, check) -> None:
    check(ranks.run)


def _train(collective, *, targets: list[float], rounds: int) -> list[list[float]]:
    """A few rounds of gradient steps towards each replica's own target, with outer momentum; the shared weights."""
    from composer_replication.diloco.outer_step import nesterov_step_

    layout = Layout((Slot("w", (9000,), "torch.float32"),), chunk_elements=4096)
    start = torch.linspace(-1.0, 1.0, 9000) if collective.replica == 0 else torch.zeros(9000)
    got = collective.start(conformance.snapshot(layout, 0, start), settings={}, resumed=False)
    weights, momentum = got.anchor[0].clone(), torch.zeros(9000)
    history = []
    for round in range(rounds):
        local = weights.clone()
        for _ in range(3):
            local -= 0.1 * (local - targets[collective.replica] * torch.sin(local))
        outcome = collective.average(conformance.contribution(collective.replica, round, layout, weights - local))
        mean = conformance.mean_of(outcome, layout)
        nesterov_step_(weights, momentum, mean, lr=0.7, momentum_factor=0.9)
        history.append(weights.tolist())
    return history


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
def test_the_same_bits_as_threads(ranks: Ranks, codec: str) -> None:
    script = partial(_train, targets=[1.0, -2.0, 0.5, 3.0], rounds=3)
    processes, threads = ranks.run(4, codec, script), in_threads(4, codec, script)
    assert processes == [threads[0]] * 4
    assert threads == [threads[0]] * 4


def test_all_reduce_to_rounding(ranks: Ranks) -> None:
    script = partial(_train, targets=[1.0, -2.0, 0.5, 3.0], rounds=3)
    summed, exact = ranks.run(4, "float32", script, exact=False), in_threads(4, "float32", script)
    assert summed == [summed[0]] * 4
    # Sums of four values of at most 3 in another order, over three rounds of a contracting map: a few units of 2**-23.
    torch.testing.assert_close(torch.tensor(summed[0]), torch.tensor(exact[0]), rtol=0, atol=4e-6)


@pytest.mark.parametrize(
    "check",
    [
        conformance.check_not_finite,
        conformance.check_leaving,
        conformance.check_empty_roster,
        conformance.check_overflow,
    ],
)
def test_all_reduce_keeps_the_rules(ranks: Ranks, check) -> None:
    check(partial(ranks.run, exact=False))


def _clipped(collective, *, values: list[float]) -> float:
    conformance.begin(collective, conformance.SCALAR)
    own = torch.tensor([values[collective.replica]])
    outcome = collective.average(conformance.contribution(collective.replica, 0, conformance.SCALAR, own))
    assert set(outcome.outliers) == {3}
    return conformance.mean_of(outcome, conformance.SCALAR).item()


def test_all_reduce_clips_and_refuses_a_median(ranks: Ranks) -> None:
    """Norms 1, 1, 1 and 10: the bound is twice the median, so that 1, 1, 1 and 2 are averaged."""
    script = partial(_clipped, values=[1.0, 1.0, 1.0, 10.0])
    got = ranks.run(4, "float32", script, exact=False, guards=Guards(outliers="clip"))
    assert got == [got[0]] * 4 and abs(got[0] - 1.25) <= 2.0**-23  # the factor 0.2 is rounded
    with pytest.raises(AssertionError, match="aggregation must be 'mean' when exact is False, got 'median'"):
        ranks.run(4, "float32", script, exact=False, guards=Guards(aggregation="median"))


def _one_breaks(collective) -> str:
    conformance.begin(collective, conformance.MIXED)
    good = conformance.contribution(collective.replica, 0, conformance.MIXED, torch.ones(conformance.MIXED.elements))

    def breaks(index: int) -> torch.Tensor:
        if index == 1:
            raise OSError("the disk is gone")
        return good.chunk(index)

    bad = type(good)(0, good.report, good.layout, breaks)
    try:
        collective.average(bad if collective.replica == 1 else good)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "averaged"


@pytest.mark.parametrize("exact", [True, False])
def test_a_rank_that_breaks_ends_the_round_for_all(ranks: Ranks, exact: bool) -> None:
    """All ranks raise at the same chunk; none is left in a collective operation of its own."""
    messages = ranks.run(3, "float32", _one_breaks, exact=exact)
    assert all(message.startswith("RoundAborted") and "chunk 1" in message for message in messages), messages
    # ... and the group can be used again.
    conformance.check_zero_is_a_contribution(partial(ranks.run, exact=exact))


def test_another_codec_is_a_mismatch(ranks: Ranks) -> None:
    for pipe, codec in zip(ranks.pipes[:2], ("int8", "float32"), strict=True):
        pipe.send((2, codec, True, None, partial(conformance._start_with, starts=[(conformance.SCALAR, {})] * 2)))
    for pipe in ranks.pipes[:2]:
        assert pipe.poll(60)
        good, message = pipe.recv()
        assert good and "collective.codec: 'float32' here, 'int8' there" in message


def test_misuse() -> None:
    with pytest.raises(ValueError, match="not initialised"):
        ProcessGroupCollective()
