"""Outliers of a round and robust means: the rules as properties, the bits by hand and in every collective's own suite
(tests/collective/conformance.py)."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.collective.base import Report
from composer_replication.collective.blocks import comparators
from composer_replication.collective.codec import CODECS, decode_chunk, encode_chunk
from composer_replication.collective.guards import Guards
from composer_replication.collective.in_process import InProcessFleet
from composer_replication.collective.membership import OUTLIER_LEAST, find_outliers, select_members, treat
from composer_replication.collective.norms import square_norm
from composer_replication.collective.reduce import factors, reduce_chunk
from tests.collective.conformance import SCALAR, begin

SIZES = [3, 5000, 40]
NORMS = st.floats(min_value=1e-6, max_value=1e6)
FLEETS = st.lists(NORMS, min_size=1, max_size=24)


def report(replica: int, norm: float) -> Report:
    return Report(
        replica=replica,
        steps=3,
        tokens=100,
        mass=0.5,
        square_norm=norm * norm,
        finite=True,
        leaving=False,
        next_lr=0.1,
        preview=(),
        remaining=None,
        base="state",
        layout="layout",
    )


def reports(*norms: float) -> list[Report]:
    return [report(replica, norm) for replica, norm in enumerate(norms)]


# -- which norms stick out


def test_by_hand() -> None:
    """Norms 8 to 12 and 100: median 10.5, deviations 0.5, 0.5, 1.5, 1.5, 2.5, 89.5, of which the median is 1.5."""
    found = find_outliers(reports(8, 9, 10, 11, 12, 100), 3.5)
    assert list(found) == [5]
    assert found[5].median == 10.5
    assert math.isclose(found[5].score, 89.5 / (1.4826 * 1.5), rel_tol=1e-12)
    assert found[5].bound == OUTLIER_LEAST * 10.5  # 10.5 + 3.5 * 1.4826 * 1.5 is below twice the median
    # A round in which norms differ much has a higher bound: median 10, deviation 6.
    assert find_outliers(reports(2, 4, 10, 16, 18), 3.5) == {}
    assert list(find_outliers(reports(2, 4, 10, 16, 18, 20, 60), 3.5)) == [6]


def test_few_or_equal_norms() -> None:
    assert find_outliers(reports(1.0), 3.5) == find_outliers(reports(1.0, 500.0), 3.5) == {}
    assert find_outliers(reports(1.0, 1.0, 2.0), 3.5) == {}  # twice the median isn't remarkable
    found = find_outliers(reports(1.0, 1.0, 2.5), 3.5)
    assert list(found) == [2] and found[2].score == math.inf  # no deviation at all among the others
    assert find_outliers(reports(0.0, 0.0, 5.0), 3.5) == {}  # one that trained among two that didn't


@given(FLEETS, st.floats(min_value=0.5, max_value=20.0))
def test_outliers_are_few_long_and_above_all_others(norms: list[float], threshold: float) -> None:
    found = find_outliers(reports(*norms), threshold)
    middle = float(np.median([math.sqrt(r.square_norm) for r in reports(*norms)]))
    assert 2 * len(found) < len(norms)
    others = [norm for replica, norm in enumerate(norms) if replica not in found]
    for replica, outlier in found.items():
        assert norms[replica] > 1.999 * middle
        assert norms[replica] >= max(others)
        assert outlier.score > threshold * (1 - 1e-9) and outlier.norm > outlier.bound


@given(FLEETS, st.integers(min_value=-20, max_value=20))
def test_only_ratios_count(norms: list[float], power: int) -> None:
    """Scaled by a power of two, which is exact, a round has the same outliers; so it has in another order."""
    scaled = find_outliers(reports(*(math.ldexp(norm, power) for norm in norms)), 3.5)
    assert list(scaled) == list(find_outliers(reports(*norms), 3.5))
    shuffled = find_outliers(list(reversed(reports(*norms))), 3.5)
    assert shuffled == find_outliers(reports(*norms), 3.5)


@given(st.lists(st.floats(min_value=0.75, max_value=1.4), min_size=4, max_size=12), st.data())
def test_a_minority_cannot_hide_itself_or_shut_out_others(honest: list[float], data: st.DataObject) -> None:
    """However long fewer than half of the contributions claim to be, honest ones (within a factor of two) stay, and
    what is far enough out is found."""
    wrong = data.draw(st.lists(st.floats(min_value=20.0, max_value=1e9), max_size=(len(honest) - 1) // 2))
    found = find_outliers(reports(*honest, *wrong), 3.5)
    assert set(found) == set(range(len(honest), len(honest) + len(wrong)))


@given(FLEETS, st.sampled_from(["warn", "clip", "exclude", "off"]))
def test_the_policies(norms: list[float], policy: str) -> None:
    guards = Guards(outliers=policy)
    everyone = reports(*norms)
    plain = select_members(everyone, guards=Guards(outliers="off"))
    found = find_outliers(plain.members, guards.outlier_threshold)
    chosen = select_members(everyone, guards=guards)
    treated = treat(chosen.members, guards)
    if policy == "exclude":
        assert {r.replica for r in plain.members} - {r.replica for r in chosen.members} == set(found)
        assert treated.scales is None and treated.outliers == {}
        return
    assert chosen == plain
    assert set(treated.outliers) == (set() if policy == "off" else set(found))
    assert (treated.scales is not None) == (policy == "clip" and bool(found))
    if treated.scales is not None:
        for member, scale in zip(chosen.members, treated.scales, strict=True):
            assert scale == float(np.float32(scale)) and (scale < 1.0) == (member.replica in found)
            if member.replica in found:
                clipped = math.sqrt(member.square_norm) * scale
                assert math.isclose(clipped, found[member.replica].bound, rel_tol=2.0**-23)
        assert treated.drift is not None
        assert treated.drift <= sum(r.square_norm for r in chosen.members) / len(chosen.members)


def test_a_runaway_is_left_out_under_every_policy() -> None:
    for policy in ("warn", "clip", "exclude", "off"):
        chosen = select_members(reports(1.0, 1.1, 1e30), guards=Guards(outliers=policy))
        assert [r.replica for r in chosen.members] == [0, 1] and chosen.absent[2].startswith("outlier: norm 1e+30")


def test_what_is_told() -> None:
    everyone = reports(1.0, 1.0, 1.0, 10.0)
    assert treat(everyone, Guards()).outliers == {
        3: "its pseudo-gradient sticks out (10 times the median, robust z inf) and is averaged all the same; "
        "outliers='clip' or 'exclude' would treat it"
    }
    assert treat(everyone, Guards(outliers="clip")).outliers == {3: "norm 10, median 1, robust z inf: scaled by 0.2"}
    excluded = select_members(everyone, guards=Guards(outliers="exclude"))
    assert excluded.absent == {3: "outlier: norm 10, median 1, robust z inf"}


# -- settings


def test_settings_that_cannot_work() -> None:
    for changes, message in (
        ({"outliers": "drop"}, "outliers must be one of 'warn', 'clip', 'exclude', 'off', got 'drop'"),
        ({"aggregation": "krum"}, "aggregation must be one of .* got 'krum'"),
        ({"outlier_threshold": 0.0}, "outlier_threshold must be a positive number, got 0.0"),
        ({"outlier_threshold": math.nan}, "outlier_threshold"),
        ({"outlier_threshold": True}, "outlier_threshold"),
        ({"trim_fraction": 0.5}, "trim_fraction must be between 0 and 0.5, got 0.5"),
        ({"trim_fraction": "0.1"}, "trim_fraction"),
    ):
        with pytest.raises(ValueError, match=message):
            Guards(**changes)
    with pytest.raises(ValueError, match="aggregation='median' needs at least 3 replicas, got 2"):
        InProcessFleet(2, guards=Guards(aggregation="median"))
    fleet = InProcessFleet(3, guards=Guards(aggregation="median"), timeout_seconds=1.0)
    with pytest.raises(ValueError, match="weighting='tokens' doesn't go with aggregation='median'"):
        begin(fleet.collectives()[0], SCALAR, settings={"weighting": "tokens"})


def test_how_many_are_cut() -> None:
    def cut(fraction: float) -> list[int | None]:
        guards = Guards(aggregation="trimmed_mean", trim_fraction=fraction)
        return [guards.trim(members) for members in range(1, 12)]

    assert cut(0.1) == [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2]
    assert cut(0.25) == [0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    assert cut(0.3)[9] == 3  # 0.3 * 10 isn't quite 3
    assert [Guards(aggregation="median").trim(n) for n in range(1, 8)] == [0, 0, 1, 1, 2, 2, 3]
    assert Guards().trim(5) is None


def test_only_what_has_an_effect_is_compared() -> None:
    assert Guards(trim_fraction=0.2).to_json() == Guards().to_json()
    assert Guards(outliers="off", outlier_threshold=2).to_json() == {"outliers": "off", "aggregation": "mean"}
    assert Guards(outlier_threshold=3).to_json() == Guards(outlier_threshold=3.0).to_json()


# -- robust means


@pytest.mark.parametrize("count", range(1, 12))
def test_comparators_sort(count: int) -> None:
    """By the 0-1 principle: a network that sorts every sequence of zeros and ones sorts everything."""
    pairs = list(comparators(count))
    for bits in itertools.product((0, 1), repeat=count):
        values = list(bits)
        for low, high in pairs:
            if values[low] > values[high]:
                values[low], values[high] = values[high], values[low]
        assert values == sorted(bits)


def encoded(codec: str, count: int, seed: int = 0) -> list[bytes]:
    generator = torch.Generator().manual_seed(seed)
    return [bytes(encode_chunk(codec, SIZES, torch.randn(sum(SIZES), generator=generator))) for _ in range(count)]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("count", "trim"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (8, 3), (9, 4)])
def test_trimmed_means(codec: str, count: int, trim: int) -> None:
    """Against a sort of the decoded values; and in whichever order the contributions come."""
    payloads = encoded(codec, count)
    reduced = reduce_chunk(codec, SIZES, payloads, [1.0] * count, trim=trim)
    ordered = torch.stack([decode_chunk(codec, SIZES, p) for p in payloads]).sort(dim=0).values
    kept = ordered[trim : count - trim]
    total = kept[0]
    for row in kept[1:]:
        total = total + row
    right = encode_chunk(codec, SIZES, total / torch.tensor([float(len(kept))]))
    assert reduced.payload == right and reduced.finite
    assert reduced.square_norm == square_norm(decode_chunk(codec, SIZES, right))
    assert reduce_chunk(codec, SIZES, payloads[::-1], [1.0] * count, trim=trim) == reduced


@settings(max_examples=60, deadline=None)
@given(
    st.integers(min_value=3, max_value=9).flatmap(
        lambda count: st.tuples(
            st.lists(st.floats(-1e3, 1e3, width=32), min_size=count, max_size=count),
            st.lists(
                st.floats(width=32, allow_nan=True, allow_infinity=True),
                max_size=(count - 1) // 2,
            ),
        )
    )
)
def test_a_minority_cannot_carry_the_median_away(values: tuple[list[float], list[float]]) -> None:
    """With fewer than half of the contributions replaced by anything at all, NaN and infinities included, the median
    lies between the least and the greatest of the others."""
    honest, wrong = values
    mixed = wrong + honest[len(wrong) :]
    payloads = [bytearray(encode_chunk("float32", [1], torch.tensor([0.0]))) for _ in mixed]
    for payload, value in zip(payloads, mixed, strict=True):
        payload[-4:] = np.float32(value).tobytes()  # as someone would who doesn't go through the encoder
    median = Guards(aggregation="median").trim(len(mixed))
    reduced = reduce_chunk("float32", [1], payloads, [1.0] * len(mixed), trim=median)
    assert reduced.finite
    got = decode_chunk("float32", [1], reduced.payload).item()
    assert min(honest[len(wrong) :]) <= got <= max(honest[len(wrong) :])


def test_a_majority_that_is_not_finite_is_told() -> None:
    payload = bytearray(encode_chunk("float32", [1], torch.tensor([1.0])))
    bad = bytearray(payload)
    bad[-4:] = np.float32(math.nan).tobytes()
    assert not reduce_chunk("float32", [1], [bad, bad, payload], [1.0] * 3, trim=1).finite


def test_zeros_of_both_signs_give_one() -> None:
    """A minimum of 0.0 and -0.0 is either one, by the machine: none of it may reach the mean."""
    signs = [0.0, -0.0, -0.0]
    for order in set(itertools.permutations(signs)):
        payloads = [encode_chunk("float32", [1], torch.tensor([zero])) for zero in order]
        mean = decode_chunk("float32", [1], reduce_chunk("float32", [1], payloads, [1.0] * 3, trim=1).payload)
        assert math.copysign(1.0, mean.item()) == 1.0


@pytest.mark.parametrize("codec", CODECS)
def test_clipped_contributions_are_scaled_once(codec: str) -> None:
    payloads = encoded(codec, 3)
    scales = (1.0, float(np.float32(0.3)), 1.0)
    first, second, third = (decode_chunk(codec, SIZES, p) for p in payloads)
    plain = (first + second * torch.tensor(scales[1]) + third) / torch.tensor([3.0])
    reduced = reduce_chunk(codec, SIZES, payloads, [1.0] * 3, scales=scales)
    assert reduced.payload == encode_chunk(codec, SIZES, plain)
    parts = factors([1.0, 2.0, 1.0], scales)
    assert parts == (0.25, float(np.float32(0.5 * scales[1])), 0.25)
    weighted = first * parts[0] + second * parts[1] + third * parts[2]
    reduced = reduce_chunk(codec, SIZES, payloads, [1.0, 2.0, 1.0], scales=scales)
    assert reduced.payload == encode_chunk(codec, SIZES, weighted)
    with pytest.raises(ValueError, match="expected 3 scales, got 2"):
        reduce_chunk(codec, SIZES, payloads, [1.0] * 3, scales=(1.0, 0.5))


def test_block_size_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks get smaller as fleets grow; what comes out doesn't depend on them."""
    payloads = encoded("int8", 5)
    whole = reduce_chunk("int8", SIZES, payloads, [1.0] * 5, trim=1)
    monkeypatch.setattr("composer_replication.collective.blocks._SORTED_ROWS", 1)
    assert reduce_chunk("int8", SIZES, payloads, [1.0] * 5, trim=1) == whole


def test_drift_is_robust_where_the_mean_is() -> None:
    everyone = reports(1.0, 2.0, 3.0, 1000.0)
    assert treat(everyone, Guards()).drift is None
    assert treat(everyone, Guards(aggregation="median")).drift == (4.0 + 9.0) / 2
    assert treat(everyone, Guards(aggregation="trimmed_mean")).drift == (4.0 + 9.0) / 2
    scaled = replace(everyone[3], square_norm=100.0)
    clipped = treat([*reports(1.0, 1.0, 1.0), scaled], Guards(outliers="clip"))
    # 2 is the bound; the factor 0.2 is rounded to float32.
    assert clipped.drift is not None and math.isclose(clipped.drift, (3.0 + 4.0) / 4, rel_tol=2.0**-22)
