"""Every replica ends with the same model, whenever each of them stops; and what others see of it meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from composer_replication.collective.in_process import InProcessFleet
from tests.trainers.harness import Core, Kind, Share, assert_same_bits, in_threads, weights

pytestmark = [  # of replicas that are given the same samples here, on purpose
    pytest.mark.filterwarnings("ignore:.*began with the same batch:UserWarning"),
    pytest.mark.filterwarnings("ignore:replicas may train on the same samples:UserWarning"),
]


def uneven(kind: Kind, counts: tuple[int, ...], **options: Any) -> list[Any]:
    """Replicas with the same samples, but not equally many."""
    shares = [Share(count) for count in counts]
    return in_threads(
        len(counts), lambda i, c: kind.fit(Core(seed=i), shares[i], kind.ours(c, replica=None, **options))
    )


@pytest.mark.filterwarnings("ignore:No batches were trained:UserWarning")
@pytest.mark.filterwarnings("ignore:Total length of `.*` across ranks is zero:UserWarning")
def test_uneven_data_end_with_one_model(kind: Kind) -> None:
    results = uneven(kind, (10, 7, 0))
    assert_same_bits(*(one.weights for one in results))
    ours = results[0].ours
    # 4 steps of both, 4 of the first with 3 of the second, which then leaves, and the first's last two.
    assert [(s.members, s.steps) for s in ours.rounds] == [((0, 1), 4), ((0, 1), 4), ((0,), 2)]
    assert ours.rounds[0].absent == {2: "no steps"}
    assert [len(one.core.seen) for one in results] == [10, 7, 0]
    assert {one.ours.final.digest for one in results} == {ours.final.digest}
    assert not torch.equal(results[0].weights["net.0.weight"], weights(Core(seed=0))["net.0.weight"])


def test_a_partial_interval_counts_for_the_part_that_was_trained(kind: Kind) -> None:
    """Outer lr 1, no momentum: the mean weighs 4 steps of one replica and 1 of the other 4 : 1."""
    first, second = uneven(kind, (4, 1), outer_lr=1.0, outer_momentum=0.0)
    assert_same_bits(first.weights, second.weights)
    apart = [kind.fit(Core(), Share(steps)).weights for steps in (4, 1)]
    for name, tensor in first.weights.items():
        expected = 0.8 * apart[0][name] + 0.2 * apart[1][name]
        # sums and differences of float32 numbers below 1
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)


def test_the_last_batch_is_validated_with_the_fleet_s_weights(kind: Kind) -> None:
    """11 steps: two rounds of 4, and a last one of 3."""
    first, second = in_threads(2, lambda i, c: kind.fit(Core(), Share(22, i, 2), kind.ours(c), validate_every=11))
    assert len(first.core.validated) == 1
    assert_same_bits(first.weights, second.weights, first.core.validated[0], second.core.validated[0])


def test_a_replica_that_stops_early_lets_the_others_go_on(kind: Kind) -> None:
    def replica(index: int, collective: Any) -> Any:
        last = 5 if index else 99
        return kind.fit(
            Core(), Share(24, index, 2), kind.ours(collective), after=lambda n, control: n == last and control.stop()
        )

    first, second = in_threads(2, replica)
    assert (len(first.core.seen), len(second.core.seen)) == (12, 6)
    assert_same_bits(first.weights, second.weights)
    assert [summary.members for summary in first.ours.rounds] == [(0, 1), (0, 1), (0,)]


def test_two_fits_in_a_row_are_two_runs(kind: Kind) -> None:
    meetings = [InProcessFleet(2, timeout_seconds=60).collectives() for _ in range(2)]

    def replica(index: int, _: Any) -> Any:
        began: list[int] = []
        ends: list[Any] = []

        def meet(fit: int) -> Any:
            began.append(fit)
            return meetings[fit][index]

        core = Core()
        ours = kind.adapter(collective=meet, replica=index, replicas=2, policy="fixed", base_horizon=4)
        kind.fits(core, Share(16, index, 2), ours, 2, lambda _: ends.append((weights(core), ours.final)))
        return began, ends

    (began, ends), (_, others) = in_threads(2, replica)
    assert began == [0, 1]
    for (mine, final), (other, _) in zip(ends, others, strict=True):
        assert_same_bits(mine, other)
        assert final.position == 8
    assert ends[0][1].digest != ends[1][1].digest


def test_a_collective_serves_one_fit(kind: Kind) -> None:
    with pytest.raises(ValueError, match="a collective serves one fit"):
        kind.fits(Core(), Share(8), kind.ours(), 2, lambda _: None)


@pytest.mark.parametrize("which", ["local", "shared"])
def test_validation_sees_the_weights_that_were_asked_for(kind: Kind, which: str) -> None:
    def replica(index: int, collective: Any) -> Any:
        trained: list[dict[str, Tensor]] = []
        core = Core()
        kind.fit(
            core,
            Share(16, index, 2),
            kind.ours(collective, validate_with=which),
            validate_every=2,
            before=lambda *_: trained.append(weights(core)),
        )
        return core.validated, trained

    (first, trained), (second, _) = in_threads(2, replica)
    # After steps 2, 4, 6, 8; a round ends with 4 and with 8.
    assert len(first) == 4
    start, middle = trained[0], trained[4]
    assert_same_bits(first[1], second[1], middle)
    assert_same_bits(first[3], second[3])
    if which == "shared":
        assert_same_bits(first[0], second[0], start)
        assert_same_bits(first[2], second[2], middle)
    else:
        assert not torch.equal(first[0]["net.0.weight"], second[0]["net.0.weight"])
        assert_same_bits(first[0], trained[2])
    # Training went on from each replica's own weights either way.
    assert not torch.equal(trained[6]["net.0.weight"], second[2]["net.0.weight"])
    assert not torch.equal(trained[6]["net.0.weight"], middle["net.0.weight"])


class Broken(Core):
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if len(self.seen) == 2:
            raise RuntimeError("no such\nlayer")
        return super().loss(batch)


def test_an_error_in_training_is_published_and_passed_on(kind: Kind) -> None:
    fleet = InProcessFleet(1)
    with pytest.raises(RuntimeError, match="no such"):
        kind.fit(Broken(), Share(8), kind.ours(fleet.collectives()[0]))
    status = fleet.status[0]
    if kind.name == "lightning":
        assert (status["state"], status["error"]) == ("failed", "RuntimeError: no such layer")
    else:
        assert status["state"] in ("preempted", "failed")  # Composer doesn't say why it closes


def test_after_an_error_the_same_run_can_be_joined_again(kind: Kind) -> None:
    runs: list[int] = []

    def meet(fit: int) -> Any:
        runs.append(fit)
        return InProcessFleet(1).collectives()[0]

    ours = kind.adapter(collective=meet, replica=0, replicas=1, policy="fixed", base_horizon=4)
    with pytest.raises(RuntimeError, match="no such"):
        kind.fit(Broken(), Share(8), ours)
    kind.fit(Core(), Share(8), ours)
    assert runs == [0, 0]


# -- what others see -------------------------------------------------------------------------------------------------


def test_the_heartbeat_says_how_a_replica_is_doing(kind: Kind) -> None:
    fleet = InProcessFleet(1)
    seen: list[dict[str, Any]] = []
    collective = fleet.collectives()[0]
    inner = collective.publish

    def publish(status: Any) -> None:
        seen.append(dict(status))
        inner(status)

    collective.publish = publish  # type: ignore[method-assign]
    core = kind.fit(Core(), Share(4), kind.ours(collective, base_horizon=2, token_fn=lambda batch: 10)).core
    assert [status["state"] for status in seen] == [
        "training",  # from the start
        "waiting",
        "training",  # round 0 closed
        "waiting",
        "training",
        "following",
        "finished",
    ]
    assert [status["step"] for status in seen] == [0, 2, 2, 4, 4, 4, 4]
    assert seen[2]["loss"] == pytest.approx(sum(core.losses[:2]) / 2)
    assert seen[2]["tokens_per_second"] > 0 and seen[2]["wait_seconds"] >= 0
    assert seen[2]["horizon"] == 2 and seen[2]["round"] == 1
    assert fleet.results[0][1]["metrics"]["loss"] == pytest.approx(sum(core.losses[2:]) / 2)


METRICS = """coherence drift exchange_seconds horizon interval_steps interval_tokens loss outer_lr
outer_momentum rates_exact replicas rho round tokens_per_second wait_seconds bytes_received bytes_sent""".split()


def test_metrics_have_the_same_names_on_whichever_replica_somebody_looks(kind: Kind) -> None:
    """Rounds of 3 in 8 steps; only replica 1 has a logger."""

    def replica(index: int, collective: Any) -> Any:
        ours = kind.ours(collective, base_horizon=3, token_fn=lambda batch: 10)
        return kind.fit(Core(seed=index), Share(16, index, 2), ours, logged=index == 1)

    other, fitted = in_threads(2, replica)
    assert other.logged == {} and other.steps == fitted.steps == [3, 3, 2]
    assert fitted.logged["autoloco/round"] == [0, 1, 2]
    assert fitted.logged["autoloco/interval_steps"] == [3, 3, 2]
    losses = fitted.core.losses
    expected = [sum(losses[:3]) / 3, sum(losses[3:6]) / 3, sum(losses[6:]) / 2]
    assert fitted.logged["autoloco/loss"] == pytest.approx(expected, rel=1e-6)
    assert {f"autoloco/{name}" for name in METRICS} <= set(fitted.logged)


def test_equal_first_batches_are_reported(kind: Kind) -> None:
    for mine, other in ((0, 1), (1, 0)):
        said = in_threads(2, lambda i, c: kind.fit(Core(), Share(8), kind.ours(c)).ours.said)[mine]
        assert sum(f"replicas [{other}] began with the same batch" in text for text in said) == 1
    assert in_threads(2, lambda i, c: kind.fit(Core(), Share(16, i, 2), kind.ours(c)).ours.said) == [[], []]
