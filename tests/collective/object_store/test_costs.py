"""What a round costs is worked out beforehand: exactly what small rounds then take."""

from __future__ import annotations

import math

import pytest

from benchmarks.round_costs import NAMES, Prices, dollars, measure, sums
from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.object_store.costs import (
    Link,
    encoded_sizes,
    plain_layout,
    round_seconds,
    round_shares,
)
from composer_replication.store import MemoryStore

LAYOUT = Layout((Slot("a", (40, 1000), "torch.float32"), Slot("b", (30_000,), "torch.float32")), 4096)


@pytest.mark.parametrize("codec", ["int8", "float32"])
@pytest.mark.parametrize(("replicas", "mode"), [(2, "direct"), (3, "direct"), (2, "sharded"), (4, "sharded")])
def test_bytes_and_requests_of_measured_rounds(replicas, mode, codec):
    found = measure(MemoryStore(), LAYOUT, replicas=replicas, codec=codec, rounds=2, mode=mode)
    assert len(found) == 2 * replicas
    for name, (measured, expected) in sums(found, codec, LAYOUT, replicas, mode).items():
        if name == "creates":
            # Who comes second finds the roster there, and doesn't try; all else is created by its only author.
            assert expected - replicas * 2 <= measured <= expected
        else:
            assert measured == expected, name
    assert set(NAMES) == {"up_bytes", "down_bytes", "writes", "reads", "creates"}


@pytest.mark.parametrize("replicas", [2, 4, 8, 64, 1024])
def test_the_shares_add_up(replicas):
    sizes = encoded_sizes("int8", plain_layout(300_000_000))
    shares, payload = round_shares(replicas, sizes), sum(sizes)
    assert not shares[0].direct
    # Every chunk of the mean is averaged once, its owner's own contribution at hand, and read by the others.
    assert sum(share.up_bytes for share in shares) == replicas * payload + payload
    assert sum(share.down_bytes for share in shares) == 2 * (replicas - 1) * payload
    assert sum(share.writes for share in shares) == (replicas + 1) * len(sizes)
    assert sum(share.reads for share in shares) == 2 * (replicas - 1) * len(sizes)


def test_a_small_payload_is_read_by_everyone():
    sizes = encoded_sizes("int8", plain_layout(1_000_000))
    (share, *others) = round_shares(8, sizes)
    assert share.direct and share.down_bytes == 8 * sum(sizes) and all(other == share for other in others)


def test_seconds_are_never_below_the_links_floor_and_fall_with_speed():
    sizes = encoded_sizes("int8", plain_layout(100_000_000))
    for replicas in (2, 4, 8, 16):
        last = math.inf
        for speed in (1e6, 1e7, 1e8):
            link = Link(up=speed, down=speed)
            worst = max(
                (round_seconds(share, link, sum(sizes)), share.up_bytes, share.down_bytes)
                for share in round_shares(replicas, sizes)
            )
            assert worst[0] > max(worst[1:]) / speed and worst[0] < last
            last = worst[0]


def test_dollars_by_ones_own_prices():
    sizes = encoded_sizes("int8", plain_layout(1_000_000))
    shares = round_shares(2, sizes)
    requests, egress = dollars(shares, Prices(put=1.0, get=0.0, egress_gb=0.0))
    assert requests == sum(share.puts for share in shares) and egress == 0.0
