"""What every collective must do. A test module hands in `run`: it builds a fleet and plays one script on each replica.

    run(replicas, codec, script, guards=Guards()) -> [script(collective of replica 0), ...]

Scripts are picklable and give plain values, so that they can be played in threads, in processes or over a store.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from composer_replication.collective.base import Collective, Contribution, Report, RoundOutcome, Snapshot
from composer_replication.collective.codec import CODECS, decode_chunk, encode_chunk, payload_bytes
from composer_replication.collective.guards import Guards
from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.membership import treat
from composer_replication.collective.norms import square_norm
from composer_replication.collective.reduce import parameter_parts, part_sizes, reduce_chunk
from composer_replication.diloco.outer_step import nesterov_step_
from composer_replication.errors import FleetMismatch

Script = Callable[[Collective], Any]


class Run(Protocol):
    def __call__(self, replicas: int, codec: str, script: Script, /, *, guards: Guards = ...) -> list[Any]: ...


SCALAR = Layout((Slot("theta", (), "torch.float32"),))
# Tensors that straddle a chunk of 4,096 elements, that fill one exactly, and that exceed one; a buffer among them.
MIXED = Layout(
    (
        Slot("conv", (3, 3), "torch.float32"),
        Slot("wide", (5000,), "torch.float32"),
        Slot("running_mean", (10,), "torch.float32", "buffer"),
        Slot("exact", (4096,), "torch.float32"),
        Slot("scalar", (), "torch.float32"),
        Slot("long", (2, 4600), "torch.bfloat16"),
    ),
    chunk_elements=4096,
)


@dataclass(frozen=True)
class Seen:
    """A round as one replica saw it."""

    members: tuple[int, ...]
    others: tuple[int, ...]
    absent: dict[int, str]
    expected_next: tuple[int, ...]
    norm: float
    mean: list[float]  # all chunks, one after another
    bytes_sent: int
    outliers: dict[int, str] = field(default_factory=dict)
    drift: float | None = None


def digest(round: int) -> str:
    return f"state-{round}"


def snapshot(layout: Layout, round: int, anchor: Tensor | None = None) -> Snapshot:
    flat = torch.zeros(layout.elements) if anchor is None else anchor
    return Snapshot(
        round=round,
        layout=layout,
        anchor=list(flat.split([slot.elements for slot in layout.slots])),
        momentum=[torch.zeros(slot.elements) for slot in layout.slots] if round else [],
        state={"round": round},
        digest=digest(round),
    )


def begin(collective: Collective, layout: Layout, *, settings: dict[str, Any] | None = None) -> Snapshot:
    return collective.start(snapshot(layout, 0), settings=settings or {"outer_lr": 1.0}, resumed=False)


def contribution(
    replica: int,
    round: int,
    layout: Layout,
    values: Tensor,
    *,
    finite: bool = True,
    leaving: bool = False,
    weight: float = 1.0,
    asked: list[int] | None = None,
) -> Contribution:
    """The flat pseudo-gradient `values` of all slots, handed out chunk by chunk in a buffer that is used again."""
    offsets = [0]
    for chunk in layout.chunks:
        offsets.append(offsets[-1] + chunk.elements)
    buffer = torch.empty(max((c.elements for c in layout.chunks), default=0))

    def chunk(index: int) -> Tensor:
        if asked is not None:
            asked.append(index)
        part = values[offsets[index] : offsets[index + 1]]
        return buffer[: part.numel()].copy_(part)

    report = Report(
        replica=replica,
        steps=3,
        tokens=100,
        mass=0.5,
        square_norm=square_norm(values) if finite else math.nan,
        finite=finite,
        leaving=leaving,
        next_lr=0.1,
        preview=(0.5, 1.0),
        remaining=None,
        base=digest(round),
        layout=layout.fingerprint,
        weight=weight,
    )
    return Contribution(round, report, layout, chunk)


def mean_of(outcome: RoundOutcome, layout: Layout) -> Tensor:
    means = []
    for index, chunk in enumerate(layout.chunks):
        out = torch.full((chunk.elements,), math.nan)
        outcome.mean(index, out)
        means.append(out)
    return torch.cat(means)


def seen(outcome: RoundOutcome, layout: Layout) -> Seen:
    return Seen(
        members=tuple(r.replica for r in outcome.members),
        others=tuple(r.replica for r in outcome.others),
        absent=dict(outcome.absent),
        expected_next=outcome.expected_next,
        norm=outcome.mean_square_norm,
        mean=mean_of(outcome, layout).tolist() if outcome.members else [],
        bytes_sent=outcome.bytes_sent,
        outliers=dict(outcome.outliers),
        drift=outcome.drift,
    )


def agreed(results: Sequence[Seen]) -> Seen:
    """The one outcome that all replicas saw."""
    first = results[0]
    for other in results[1:]:
        assert (other.members, other.others, other.absent) == (first.members, first.others, first.absent)
        assert (other.expected_next, other.norm) == (first.expected_next, first.norm)
        assert (other.outliers, other.drift) == (first.outliers, first.drift)
        assert other.mean == first.mean
    return first


def play(
    collective: Collective,
    *,
    layout: Layout,
    values: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    not_finite: Sequence[int] = (),
) -> Seen:
    """One round."""
    me = collective.replica
    begin(collective, layout)
    asked: list[int] = []
    outcome = collective.average(
        contribution(
            me,
            0,
            layout,
            values[me],
            finite=me not in not_finite,
            weight=weights[me] if weights else 1.0,
            asked=asked,
        )
    )
    result = seen(outcome, layout)
    # Each chunk is computed once, in any order; a replica that isn't finite is asked for none. (One that is left out
    # for another reason may have been asked before anybody knew.)
    every = [] if me in not_finite else list(range(len(layout.chunks)))
    assert sorted(asked) == every or (me not in result.members and asked == [])
    assert outcome.round == 0 and not collective.overtaken
    assert seen(outcome, layout).mean == result.mean, "the mean can be asked for again"
    collective.applied(lambda: snapshot(layout, 1))
    return result


def expected_mean(
    codec: str,
    layout: Layout,
    values: Sequence[Tensor],
    weights: Sequence[float],
    *,
    scales: Sequence[float] | None = None,
    trim: int | None = None,
) -> tuple[Tensor, float]:
    """The bits that every collective must give."""
    means, norm, begin = [], 0.0, 0
    for chunk in layout.chunks:
        sizes, end = part_sizes(chunk), begin + chunk.elements
        payloads = [encode_chunk(codec, sizes, v[begin:end].contiguous()) for v in values]
        reduced = reduce_chunk(
            codec, sizes, payloads, weights, scales=scales, trim=trim, parameters=parameter_parts(layout, chunk)
        )
        means.append(decode_chunk(codec, sizes, reduced.payload))
        norm += reduced.square_norm
        begin = end
    return torch.cat(means), norm


# -- checks -----------------------------------------------------------------------------------------------------------


def _outer_rounds(collective: Collective, *, moves: Sequence[float], momentum_factor: float, rounds: int) -> float:
    """theta starts at 0; in each round replica i moves it by moves[i]; outer lr 1. Gives the theta at the end."""
    theta, momentum = begin(collective, SCALAR).anchor[0].clone(), torch.zeros(1)
    for round in range(rounds):
        local = theta + moves[collective.replica]
        outcome = collective.average(contribution(collective.replica, round, SCALAR, theta - local))
        mean = mean_of(outcome, SCALAR)
        nesterov_step_(theta, momentum, mean, lr=1.0, momentum_factor=momentum_factor)
        collective.applied(partial(snapshot, SCALAR, round + 1, theta.clone()))
    return theta.item()


def check_hand_computed(run: Run) -> None:
    """Two replicas move theta from 0 to +1 and +3: the mean is 2. With momentum, two rounds of the same moves."""
    for codec in CODECS:
        without = run(2, codec, partial(_outer_rounds, moves=(1.0, 3.0), momentum_factor=0.0, rounds=1))
        # round 1: m = -2, theta = 0 + 2 + 0.9 * 2 = 3.8; round 2: m = -3.8, theta = 3.8 + 2 + 0.9 * 3.8 = 9.22
        with_momentum = run(2, codec, partial(_outer_rounds, moves=(1.0, 3.0), momentum_factor=0.9, rounds=2))
        # int8 holds a lone value to half a unit in its last place and theta is below 10: 4 float32 units of 2**-20.
        for got, right in ((without, 2.0), (with_momentum, 9.22)):
            assert got[0] == got[1]
            assert abs(got[0] - right) <= 4 * 2.0**-20, (codec, got)


def check_every_element_is_the_mean(run: Run) -> None:
    """Chunks that tensors straddle or exceed: each element is the mean, exactly, and the norm leaves buffers out."""
    ramp = torch.arange(MIXED.elements, dtype=torch.float32)
    got = agreed(run(2, "float32", partial(play, layout=MIXED, values=[ramp, 3 * ramp])))
    assert got.members == (0, 1) and got.absent == {} and got.expected_next == (0, 1)
    assert got.mean == (2 * ramp).tolist()
    kept = torch.cat([2 * ramp[:5009], 2 * ramp[5019:]]).double()
    assert math.isclose(got.norm, float((kept * kept).sum()), rel_tol=1e-12)  # float64, in another order


def check_same_bits_everywhere(run: Run) -> None:
    """The mean is bit for bit that of encode, add in replica order, encode, decode; for each codec, weighted or not."""
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(MIXED.elements, generator=generator) for _ in range(3)]
    for codec in CODECS:
        for weights in ((1.0, 1.0, 1.0), (3.0, 1.0, 0.5)):
            got = agreed(run(3, codec, partial(play, layout=MIXED, values=values, weights=weights)))
            mean, norm = expected_mean(codec, MIXED, values, weights)
            assert got.mean == mean.tolist()
            assert math.isclose(got.norm, norm, rel_tol=1e-12)  # chunks may be added up in another order


def check_payload_is_sent(run: Run) -> None:
    """Each replica sends its encoded payload, at least."""
    payload = sum(payload_bytes("int8", part_sizes(chunk)) for chunk in MIXED.chunks)
    values = [torch.ones(MIXED.elements)] * 2
    for result in run(2, "int8", partial(play, layout=MIXED, values=values)):
        assert result.bytes_sent >= payload


def check_zero_is_a_contribution(run: Run) -> None:
    """A live replica whose weights did not move counts in the mean."""
    values = [torch.tensor([3.0]), torch.tensor([0.0]), torch.tensor([6.0])]
    got = agreed(run(3, "float32", partial(play, layout=SCALAR, values=values)))
    assert got.members == (0, 1, 2) and got.mean == [3.0]


def check_not_finite(run: Run) -> None:
    """One of three isn't finite: the others are averaged, it gets their mean, and is waited for again."""
    values = [torch.tensor([3.0]), torch.tensor([math.nan]), torch.tensor([5.0])]
    got = agreed(run(3, "float32", partial(play, layout=SCALAR, values=values, not_finite=(1,))))
    assert got.members == (0, 2) and got.others == (1,) and got.mean == [4.0]
    assert got.absent == {1: "not finite"} and got.expected_next == (0, 1, 2)


def check_runaway(run: Run) -> None:
    """A finite pseudo-gradient that is longer than the others' beyond reason isn't averaged."""
    values = [torch.tensor([3.0]), torch.tensor([5.0]), torch.tensor([1e30])]
    got = agreed(run(3, "float32", partial(play, layout=SCALAR, values=values)))
    assert got.members == (0, 1) and got.mean == [4.0]
    assert got.absent[2].startswith("outlier") and got.expected_next == (0, 1, 2)


def long_last(count: int) -> list[Tensor]:
    """Pseudo-gradients of about equal length, and a last one that is twenty times as long."""
    generator = torch.Generator().manual_seed(17)
    values = [torch.randn(MIXED.elements, generator=generator) for _ in range(count)]
    values[-1] *= 20.0
    return values


def check_outliers(run: Run) -> None:
    """A norm that sticks out is told, or scaled down by one multiplication, or left out: alike on every replica."""
    values, equal = long_last(4), [1.0] * 4
    play_it = partial(play, layout=MIXED, values=values)
    plain, _ = expected_mean("int8", MIXED, values, equal)
    for policy in ("warn", "off"):
        got = agreed(run(4, "int8", play_it, guards=Guards(outliers=policy)))  # type: ignore[arg-type]
        assert got.members == (0, 1, 2, 3) and got.mean == plain.tolist() and got.drift is None
        assert set(got.outliers) == ({3} if policy == "warn" else set())
    got = agreed(run(4, "int8", play_it, guards=Guards(outliers="exclude")))
    assert got.members == (0, 1, 2) and got.others == (3,) and got.outliers == {}
    assert got.absent[3].startswith("outlier: ") and "robust z" in got.absent[3]
    assert got.mean == expected_mean("int8", MIXED, values[:3], equal[:3])[0].tolist()
    clip = Guards(outliers="clip")
    treated = treat([contribution(i, 0, MIXED, value).report for i, value in enumerate(values)], clip)
    assert treated.scales is not None and treated.scales[:3] == (1.0,) * 3 and 0.05 < treated.scales[3] < 0.2
    for codec, weights in (("float32", equal), ("int8", equal), ("bfloat16", [3.0, 1.0, 0.5, 2.0])):
        got = agreed(run(4, codec, partial(play_it, weights=weights), guards=clip))
        clipped, norm = expected_mean(codec, MIXED, values, weights, scales=treated.scales)
        assert got.members == (0, 1, 2, 3) and got.mean == clipped.tolist() and got.drift == treated.drift
        assert math.isclose(got.norm, norm, rel_tol=1e-12)
        assert "scaled by" in got.outliers[3]


def check_robust_means(run: Run) -> None:
    """Median and trimmed mean, bit for bit, for odd and even rosters; and together with clipping."""
    for codec, replicas, guards in (
        ("float32", 3, Guards(aggregation="median")),
        ("bfloat16", 4, Guards(aggregation="median")),
        ("int8", 4, Guards(aggregation="trimmed_mean", outliers="clip")),
        ("float32", 4, Guards(aggregation="trimmed_mean", outliers="exclude")),
    ):
        values = long_last(replicas)
        got = agreed(run(replicas, codec, partial(play, layout=MIXED, values=values), guards=guards))
        said = [contribution(i, 0, MIXED, values[i]).report for i in got.members]
        treated, count = treat(said, guards), len(said)
        assert count == (replicas - 1 if guards.outliers == "exclude" else replicas)
        trim, equal = guards.trim(count), [1.0] * count
        mean, norm = expected_mean(codec, MIXED, values[:count], equal, scales=treated.scales, trim=trim)
        assert got.mean == mean.tolist() and got.drift == treated.drift
        assert math.isclose(got.norm, norm, rel_tol=1e-12)


def _empty_then_full(collective: Collective) -> tuple[Seen, Seen]:
    me, value = collective.replica, torch.tensor([2.0])
    begin(collective, SCALAR)
    first = collective.average(contribution(me, 0, SCALAR, torch.tensor([math.inf]), finite=False))
    empty = seen(first, SCALAR)
    collective.applied(lambda: snapshot(SCALAR, 1))
    second = seen(collective.average(contribution(me, 1, SCALAR, value * (me + 1))), SCALAR)
    collective.applied(lambda: snapshot(SCALAR, 2))
    return empty, second


def check_empty_roster(run: Run) -> None:
    """Nobody finite: a round without a mean, and the run goes on."""
    results = run(2, "float32", _empty_then_full)
    empty, full = agreed([r[0] for r in results]), agreed([r[1] for r in results])
    assert empty.members == () and empty.others == (0, 1) and empty.expected_next == (0, 1)
    assert set(empty.absent) == {0, 1} and empty.norm == 0.0
    assert full.members == (0, 1) and full.mean == [3.0]


def _leave_one_by_one(collective: Collective) -> list[Seen]:
    """Replica 2 leaves with round 0, replica 1 with round 1, replica 0 with round 2; those who left follow."""
    me = collective.replica
    begin(collective, SCALAR)
    rounds: list[Seen] = []
    for round in range(3):
        if me >= 3 - round:
            outcome = collective.follow(round, SCALAR, digest(round), wait=True)
            assert outcome is not None
        else:
            values = torch.tensor([float(me + 1)])
            outcome = collective.average(contribution(me, round, SCALAR, values, leaving=me == 2 - round))
        rounds.append(seen(outcome, SCALAR))
        collective.applied(partial(snapshot, SCALAR, round + 1))
    collective.finish(digest(3), {"rounds": 3})
    return rounds


def check_leaving(run: Run) -> None:
    """Who leaves is averaged once more and not waited for again; it can follow to the end of the run."""
    results = run(3, "float32", _leave_one_by_one)
    rounds = [agreed([r[i] for r in results]) for i in range(3)]
    assert [r.members for r in rounds] == [(0, 1, 2), (0, 1), (0,)]
    assert [r.expected_next for r in rounds] == [(0, 1), (0,), ()]
    assert [r.mean for r in rounds] == [[2.0], [1.5], [1.0]]


def _start_with(collective: Collective, *, starts: Sequence[tuple[Layout, dict[str, Any]]]) -> str:
    layout, settings = starts[collective.replica]
    try:
        begin(collective, layout, settings=settings)
    except FleetMismatch as error:
        return str(error)
    return ""


def check_mismatch_at_start(run: Run) -> None:
    """Another shape, another setting: refused before the first round, naming the tensor or the setting."""
    other = Layout((Slot("theta", (2,), "torch.float32"),))
    messages = run(2, "float32", partial(_start_with, starts=[(SCALAR, {}), (other, {})]))
    assert any("theta" in message for message in messages), messages
    settings = [(SCALAR, {"outer": {"lr": 0.7, "momentum": 0.9}}), (SCALAR, {"outer": {"lr": 0.5, "momentum": 0.9}})]
    messages = run(2, "float32", partial(_start_with, starts=settings))
    assert any("outer" in m and "lr" in m and "0.5" in m for m in messages), messages


def _start_from_own(collective: Collective) -> tuple[list[float], Any, int]:
    mine = torch.arange(3, dtype=torch.float32) + 10 * collective.replica
    layout = Layout((Slot("a", (2,), "torch.float32"), Slot("b", (), "torch.float32")))
    got = collective.start(snapshot(layout, 0, mine), settings={}, resumed=False)
    result = (torch.cat(list(got.anchor)).tolist(), got.state["round"], got.round)
    for tensor in got.anchor:
        tensor.fill_(float(collective.replica))  # as training in place would: nobody else may see it
    outcome = collective.average(contribution(collective.replica, 0, layout, torch.ones(3)))
    assert outcome.members
    assert all((tensor == collective.replica).all() for tensor in got.anchor)
    return result


def check_shared_start(run: Run) -> None:
    """All begin with the lowest id's state, each with its own copy."""
    assert run(3, "float32", _start_from_own) == [([0.0, 1.0, 2.0], 0, 0)] * 3


def _overflow_then_full(collective: Collective) -> tuple[Seen, Seen]:
    me, most = collective.replica, torch.finfo(torch.float32).max
    begin(collective, MIXED)
    values = torch.ones(MIXED.elements)
    values[MIXED.elements // 2] = most
    first = collective.average(contribution(me, 0, MIXED, values))
    empty = seen(first, MIXED)
    collective.applied(lambda: snapshot(MIXED, 1))
    ones = torch.ones(MIXED.elements)
    second = seen(collective.average(contribution(me, 1, MIXED, ones * (me + 1))), MIXED)
    collective.applied(lambda: snapshot(MIXED, 2))
    return empty, second


def check_overflow(run: Run) -> None:
    """Finite contributions whose sum isn't: a round without a mean, which says why, and the run goes on."""
    results = run(2, "float32", _overflow_then_full)
    empty, full = agreed([r[0] for r in results]), agreed([r[1] for r in results])
    assert empty.members == () and empty.others == (0, 1) and empty.expected_next == (0, 1)
    assert empty.absent == {0: "the mean is not finite", 1: "the mean is not finite"} and empty.norm == 0.0
    assert full.members == (0, 1) and set(full.mean) == {1.5}


CHECKS = (
    check_hand_computed,
    check_every_element_is_the_mean,
    check_same_bits_everywhere,
    check_payload_is_sent,
    check_zero_is_a_contribution,
    check_not_finite,
    check_runaway,
    check_outliers,
    check_robust_means,
    check_empty_roster,
    check_overflow,
    check_leaving,
    check_mismatch_at_start,
    check_shared_start,
)
