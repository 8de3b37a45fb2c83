"""What counts as a step, at which learning rate, and as a token; and where rounds fall."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.trainers.harness import Core, Kind, Share, adamw, assert_same_bits, in_threads, sgd, weights


def test_accumulation_counts_optimizer_steps_not_batches(kind: Kind) -> None:
    fitted = kind.fit(Core(), Share(17), kind.ours(base_horizon=2), accumulate=4)
    # Steps come with samples 4, 8, 12, 16 and, because the epoch ends, 17.
    assert [len(batch) for batch in fitted.core.seen] == [1] * 17
    assert fitted.steps == [2, 2, 1] and fitted.ours.final.position == 5


def test_a_round_closes_with_the_batch_that_completes_it(kind: Kind) -> None:
    """Rounds of 3 in 7 batches: after batches 3 and 6, and at the end. What comes after a batch sees its round."""

    def replica(index: int, collective: Any) -> Any:
        after: list[dict[str, Tensor]] = []
        closed: list[int] = []
        core, ours = Core(seed=index), kind.ours(collective, base_horizon=3)

        def look(number: int, _: Any) -> None:
            after.append(weights(core))
            closed.append(len(ours.rounds))

        begins: list[dict[str, Tensor]] = []
        kind.fit(
            core, Share(14, index, 2), ours, before=lambda n, _: n == 0 and begins.append(weights(core)), after=look
        )
        return begins[0], after, closed, ours

    (start, after, closed, ours), (other_start, others, *_) = in_threads(2, replica)
    assert_same_bits(start, other_start)  # from seeds 0 and 1: both began with replica 0's weights
    equal = [torch.equal(a["net.0.weight"], b["net.0.weight"]) for a, b in zip(after, others, strict=True)]
    assert equal == [False, False, True, False, False, True, True]
    assert closed == [0, 0, 1, 1, 1, 2, 3]
    assert [summary.position for summary in ours.rounds] == [3, 6, 7]


def test_epochs_end_between_rounds(kind: Kind) -> None:
    """Rounds don't care where epochs end: 3 epochs of 6 steps, rounds of 4."""
    ends = in_threads(2, lambda i, c: kind.fit(Core(), Share(12, i, 2), kind.ours(c), epochs=3).steps)
    assert ends == [[4, 4, 4, 4, 2]] * 2


class Overflowing(Core):
    """Batches 1, 2 and 5 of 8 give infinite gradients."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().loss(batch)
        return loss * float("inf") if len(self.seen) - 1 in (1, 2, 5) else loss


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skipped_are_not_counted(kind: Kind, fused: bool) -> None:
    ours = kind.ours(token_fn=lambda batch: 10)
    rounds: list[int] = []
    kind.fit(
        Overflowing(),
        Share(8),
        ours,
        optimize=lambda module: (torch.optim.AdamW(module.parameters(), lr=0.01, fused=fused), None),
        scaler=True,
        after=lambda number, _: rounds.append(len(ours.rounds)),
    )
    # Four steps that changed the weights are complete with batch 7; the fifth is flushed at the end.
    assert rounds == [0, 0, 0, 0, 0, 0, 1, 2]
    assert ours.final.position == 5
    # Only the tokens behind those steps count.
    assert [summary.tokens for summary in ours.rounds] == [40, 10]


def test_the_rate_that_is_counted_is_the_one_that_was_used(kind: Kind) -> None:
    masses: list[float] = []

    def replica(_: int, collective: Any) -> None:
        inner = collective.average

        def average(contribution: Any) -> Any:
            masses.append(contribution.report.mass)
            return inner(contribution)

        collective.average = average
        kind.fit(Core(), Share(4), kind.ours(collective, base_horizon=2), optimize=adamw)

    in_threads(1, replica)
    used = [0.02 / (1.0 + 0.1 * step) for step in range(4)]
    assert masses == [used[0] + used[1], used[2] + used[3]]


def test_the_rate_of_several_groups_is_weighted_by_their_elements(kind: Kind) -> None:
    def optimize(module: Any) -> Any:
        # 35 and 12 trainable elements
        first, second = module.core.net[0].parameters(), module.core.net[2].parameters()
        return torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.4}]), None

    ours = kind.fit(Core(), Share(4), kind.ours(base_horizon=2), optimize=optimize).ours
    # On a fixed interval mass and base mass are the same; the rate itself shows in the plan.
    assert ours.rounds[0].next_plan.mass == pytest.approx(2 * (35 * 0.1 + 12 * 0.4) / 47, rel=1e-12)


# -- tokens ----------------------------------------------------------------------------------------------------------


class Words(Core):
    """Batches of token ids with padding; the loss is that of a linear map of their number."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        real = batch["attention_mask"].sum()
        x = nn.functional.pad(real.float().reshape(1, 1), (0, 5)) / 1000
        return self.net(x).square().mean()


def words(real: int, batches: int, padding: int) -> DataLoader[Any]:
    mask = torch.tensor([1] * real + [0] * padding)
    return DataLoader([{"input_ids": torch.arange(real + padding), "attention_mask": mask}] * batches)


@pytest.mark.filterwarnings("ignore:.*isn't sharded:UserWarning")
def test_weights_follow_tokens_when_asked_and_padding_never_counts(kind: Kind) -> None:
    """One replica sees 10 real tokens a batch, the other 1,000, with equal horizons."""

    def fast(module: nn.Module) -> Any:
        return sgd(module, lr=1.0)

    # What each would have become alone:
    apart = [kind.fit(Words(), words(real, 2, padding=50), optimize=fast).weights for real in (10, 1000)]
    for weighting, share in (("equal", 0.5), ("tokens", 10 / 1010)):

        def replica(index: int, collective: Any, weighting: str = weighting) -> Any:
            ours = kind.ours(collective, base_horizon=2, weighting=weighting, outer_lr=1.0, outer_momentum=0.0)
            return kind.fit(Words(), words((10, 1000)[index], 2, padding=50), ours, optimize=fast)

        first, second = in_threads(2, replica)
        assert first.ours.rounds[0].tokens == 2 * (10 + 1000)
        assert_same_bits(first.weights, second.weights)
        for name, tensor in first.weights.items():
            expected = share * apart[0][name] + (1 - share) * apart[1][name]
            # sums and differences of float32 numbers below 1
            torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-6)


def test_a_batch_without_token_information(kind: Kind) -> None:
    core = Core()
    before = weights(core)
    with pytest.raises(ValueError, match=r"weighting='tokens'.*neither attention_mask nor input_ids.*token_fn="):
        kind.fit(core, Share(4), kind.ours(base_horizon=2, weighting="tokens"))
    if kind.name == "lightning":  # Composer tells what it counted after the batch; no round has been closed
        assert_same_bits(before, weights(core))

    with pytest.warns(UserWarning, match="tokens aren't counted") as told:
        ours = kind.fit(Core(), Share(6), kind.ours(base_horizon=2, policy="autoloco")).ours
    assert len([one for one in told if "tokens aren't counted" in str(one.message)]) == 1
    assert [summary.tokens for summary in ours.rounds] == [None, None, None]
