"""What a round costs, worked out beforehand: bytes and requests of each replica, and seconds on a link. Pure functions.

Invariant: who averages what is asked of the very functions that the rounds use; nothing of it is said a second time
here. Counts are those of a round that everyone comes to and in which nothing fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from composer_replication.collective.layout import Layout, Slot
from composer_replication.collective.object_store.roster import Mode, divide, shard_range
from composer_replication.collective.object_store.shards import input_sizes, output_sizes

__all__ = [
    "Link",
    "Share",
    "busiest_share",
    "encoded_sizes",
    "mean_sizes",
    "plain_layout",
    "round_seconds",
    "round_shares",
]

_RUN = "0" * 16  # as long as the name that a run gives itself


@dataclass(frozen=True, slots=True)
class Share:
    """One replica's part of a round. Blobs only, but for `creates` and `looks`."""

    direct: bool
    shards: int
    up_bytes: int
    down_bytes: int
    writes: int
    reads: int
    creates: int  # pointers that it tries to create, at most
    looks: int  # pointers that it reads, if it needn't wait

    @property
    def puts(self) -> int:
        return self.writes + self.creates

    @property
    def gets(self) -> int:
        return self.reads + self.looks


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A replica's way to the store: bytes per second each way, seconds of a small request, how many at once."""

    up: float
    down: float
    request_seconds: float = 0.05
    parallel: int = 8


def plain_layout(elements: int) -> Layout:
    """The layout of a model of one tensor: real ones differ by a few chunks' ends."""
    return Layout((Slot("model", (elements,), "torch.float32"),))


def encoded_sizes(codec: str, layout: Layout, *, round: int = 0, replica: int = 0) -> list[int]:
    """Bytes of each encoded chunk of a contribution."""
    return input_sizes(codec, _RUN, round, layout, replica)


def mean_sizes(codec: str, layout: Layout, *, round: int = 0) -> list[int]:
    """Bytes of each encoded chunk of the mean."""
    return output_sizes(codec, _RUN, round, layout)


def round_shares(
    replicas: int, inputs: Sequence[int], outputs: Sequence[int] | None = None, *, mode: Mode = "auto", round: int = 0
) -> list[Share]:
    """Each replica's share of a round. `inputs` are the encoded sizes of a contribution's chunks, `outputs` those of
    the mean's (the same, unless given)."""
    means = inputs if outputs is None else outputs
    count, payload = len(inputs), sum(inputs)
    direct, owners = divide(mode, tuple(range(replicas)), round, chunks=count, payload_bytes=payload)
    looks = replicas + len(owners) + 6
    if direct:
        share = Share(True, len(owners), payload, replicas * payload, count, replicas * count, 3, looks)
        return [share] * replicas
    own: list[list[int]] = [[] for _ in range(replicas)]
    shards = [0] * replicas
    for shard, owner in enumerate(owners):
        own[owner] += shard_range(len(owners), shard, count)
        shards[owner] += 1
    total = sum(means)
    found: list[Share] = []
    for chunks, owned in zip(own, shards, strict=True):
        mine, mean = sum(inputs[index] for index in chunks), sum(means[index] for index in chunks)
        found.append(
            Share(
                direct=False,
                shards=len(owners),
                up_bytes=payload + mean,
                down_bytes=(replicas - 1) * mine + total - mean,
                writes=count + len(chunks),
                reads=(replicas - 1) * len(chunks) + count - len(chunks),
                creates=2 + owned,
                looks=looks,
            )
        )
    return found


def round_seconds(share: Share, link: Link, payload_bytes: int) -> float:
    """How long a round takes on such a link, everyone ready at once, and arithmetic for nothing.

    Writing the contribution comes first, and reading the others' goes on beside it as they appear. After the roster the
    means go up and come down. Small requests are made some at once, and about eight of them one after another.
    """
    latency = link.request_seconds * (8 + (share.puts + share.gets) / link.parallel)
    if share.direct:
        return max(payload_bytes / link.up, share.down_bytes / link.down) + latency
    mean = share.up_bytes - payload_bytes
    rest = payload_bytes - mean  # of the mean, which others have averaged
    before = max(payload_bytes / link.up, (share.down_bytes - rest) / link.down)
    return before + max(mean / link.up, rest / link.down) + latency


def busiest_share(replicas: int, elements: int, codec: str, link: Link) -> tuple[Share, float]:
    """(the share that takes longest, its seconds) in a round of a model of so many elements, all on such links."""
    layout = plain_layout(elements)
    inputs = encoded_sizes(codec, layout)
    shares = round_shares(replicas, inputs, mean_sizes(codec, layout))
    seconds = [round_seconds(share, link, sum(inputs)) for share in shares]
    slowest = seconds.index(max(seconds))
    return shares[slowest], seconds[slowest]
