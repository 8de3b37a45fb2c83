"""What a round's transfers take when replicas come at different moments, over links that differ or break.

Invariant: bytes and requests are `costs.round_shares`'s; if all come at once over equal links, it takes what
`costs.round_seconds` says, to the rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

from composer_replication.collective.layout import DEFAULT_CHUNK_ELEMENTS, Layout, Slot
from composer_replication.collective.object_store.costs import (
    Link,
    Share,
    encoded_sizes,
    mean_sizes,
    round_seconds,
    round_shares,
)
from composer_replication.simulation.machines import Machines

__all__ = ["Exchange"]


class Exchange:
    """Of a model of so many elements, with a codec.

    `payload` is the size of a contribution, and of the mean, in bytes. All moments are seconds from one beginning.
    """

    def __init__(
        self, machines: Machines, elements: int, codec: str, *, chunk_elements: int = DEFAULT_CHUNK_ELEMENTS
    ) -> None:
        layout = Layout((Slot("model", (elements,), "torch.float32"),), chunk_elements)
        self._machines = machines
        self._inputs, self._outputs = encoded_sizes(codec, layout), mean_sizes(codec, layout)
        self._shares: dict[tuple[int, int], list[Share]] = {}
        self.payload = sum(self._inputs)

    def shares(self, members: int, round: int) -> list[Share]:
        """Each member's share, in their order."""
        key = (members, round % members)
        if key not in self._shares:
            self._shares[key] = round_shares(members, self._inputs, self._outputs, round=key[1])
        return self._shares[key]

    def up(self, replica: int, start: float) -> float:
        """When a contribution that is ready at `start` is in the store."""
        return self._machines.carried(replica, start, self.payload / self._link(replica).up)

    def fetched(self, replica: int, start: float, members: int, round: int) -> float:
        """When a replica that isn't averaged has the result: it reads all of it."""
        share, link = self.shares(members, round)[0], self._link(replica)
        size = members * self.payload if share.direct else self.payload
        reads = share.gets / link.parallel
        return self._machines.carried(replica, start, size / link.down) + link.request_seconds * (2 + reads)

    def alone(self, replica: int, place: int, members: int, round: int) -> float:
        """What its own transfers in a round take a member, the `place`-th, that never has to wait."""
        return round_seconds(self.shares(members, round)[place], self._link(replica), self.payload)

    def ends(self, trained: Mapping[int, float], decided: float, round: int) -> tuple[dict[int, float], float]:
        """When each member is through, and when the mean was in the store. `trained`: when each had trained;
        `decided`: when it was settled who the members are.

        As each contribution goes up, those who average it read along. After the roster the means go up and come down.
        """
        members = sorted(trained)
        shares = dict(zip(members, self.shares(len(members), round), strict=True))
        order = sorted(trained.values())
        averaged: dict[int, float] = {}
        for replica, share in shares.items():
            rest = 0 if share.direct else self.payload - (share.up_bytes - self.payload)
            reads = share.down_bytes - rest
            others = order if share.direct else [when for other, when in trained.items() if other != replica]
            averaged[replica] = max(decided, self._gathered(replica, trained[replica], sorted(others), reads))
        return self._handed_out(shares, averaged, decided)

    def _gathered(self, replica: int, start: float, others: list[float], reads: int) -> float:
        """When it has read its part of the others' contributions, which began to appear at these moments."""
        each = reads / len(others) / self._link(replica).down if others else 0.0
        now = start
        for begins in others:
            now = self._machines.carried(replica, max(now, begins), each)
        return now

    def _handed_out(
        self, shares: Mapping[int, Share], averaged: Mapping[int, float], decided: float
    ) -> tuple[dict[int, float], float]:
        carried, last = self._machines.carried, max(averaged.values())
        links = {replica: self._link(replica) for replica in shares}
        late = {r: links[r].request_seconds * _requests(share, links[r]) for r, share in shares.items()}
        if next(iter(shares.values())).direct:
            return {replica: averaged[replica] + late[replica] for replica in shares}, decided
        means = {replica: share.up_bytes - self.payload for replica, share in shares.items()}
        written = max(carried(r, averaged[r], mean / links[r].up) for r, mean in means.items())
        ends = {
            replica: max(written, carried(replica, last, (self.payload - mean) / links[replica].down)) + late[replica]
            for replica, mean in means.items()
        }
        return ends, written

    def _link(self, replica: int) -> Link:
        return self._machines.link_of(replica)


def _requests(share: Share, link: Link) -> float:
    """Small requests one after another, as `costs.round_seconds` counts them."""
    return 8 + (share.puts + share.gets) / link.parallel
