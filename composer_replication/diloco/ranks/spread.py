"""Tensors of a model that is spread over the ranks of a replica: whole on each of them (DDP), or in rows (FSDP2).

Invariant: rank 0 reads and writes a tensor as if it held it whole. Layouts, digests, checkpoints and what travels
between replicas are therefore those of the plain model, however each replica spreads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from composer_replication.diloco.held import Held, named_tensors, reshard
from composer_replication.diloco.ranks.channel import Handler, Ranks
from composer_replication.errors import FleetMismatch

__all__ = ["Follower", "Rows", "holder", "read_rows"]


@dataclass(frozen=True)
class Rows:
    """Where the pieces of one tensor are: for each rank its first element and their number, and who is read from."""

    pieces: tuple[tuple[int, int], ...]
    sources: tuple[int, ...]

    def overlap(self, rank: int, start: int, stop: int) -> tuple[int, int]:
        """The part of [start, stop) that `rank` holds; empty if the first isn't less than the second."""
        first, count = self.pieces[rank]
        return max(start, first), min(stop, first + count)


def local_of(tensor: Tensor) -> Tensor:
    """What this process holds of it."""
    whole: Any = tensor.detach()
    return whole.to_local() if _is_sharded(tensor) else whole


def _is_sharded(tensor: Tensor) -> bool:
    return type(tensor).__name__ == "DTensor"


def read_rows(model: nn.Module | Mapping[str, Tensor], buffers: bool, ranks: Ranks) -> dict[str, Rows]:
    """Where the sharded tensors' pieces are. All ranks call it, and raise alike what can't be: ValueError, or
    FleetMismatch for ranks whose models differ."""
    reshard(model)
    said = ranks.collect([(name, _place(name, tensor)) for name, tensor, _ in named_tensors(model, buffers)])
    for rank, theirs in enumerate(said):
        for mine, other in zip(said[0], theirs, strict=False):
            problem = mine[1].get("problem") or other[1].get("problem")
            if problem:
                raise ValueError(problem)
        first = [(name, place["shape"], place["dtype"], place["sharded"]) for name, place in said[0]]
        found = [(name, place["shape"], place["dtype"], place["sharded"]) for name, place in theirs]
        if first != found:
            names = sorted({str(entry[0]) for entry in set(first) ^ set(found)})
            raise FleetMismatch(f"rank {rank} of this replica holds another model than rank 0: {', '.join(names[:8])}")
    rows: dict[str, Rows] = {}
    for index, (name, place) in enumerate(said[0]):
        if place["sharded"]:
            rows[name] = _rows_of([theirs[index][1] for theirs in said])
    return rows


def _place(name: str, tensor: Tensor) -> dict[str, Any]:
    """How this rank holds one tensor, in plain values."""
    place: dict[str, Any] = {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype), "sharded": _is_sharded(tensor)}
    if not place["sharded"]:
        return place
    sharded: Any = tensor
    kinds = [(type(one).__name__, getattr(one, "dim", None)) for one in sharded.placements]
    by_rows = [axis for axis, kind in enumerate(kinds) if kind == ("Shard", 0)]
    if len(by_rows) > 1 or any(kind != ("Shard", 0) and kind[0] != "Replicate" for kind in kinds):
        place["problem"] = (
            f"{name} is placed as {list(sharded.placements)}: replicas may be sharded by rows (fully_shard's Shard(0)) "
            "and replicated, on one axis each; leave tensor parallelism and other placements out"
        )
        return place
    where = list(sharded.device_mesh.get_coordinate() or [])
    place["order"] = where[by_rows[0]] if by_rows else 0
    place["count"] = sharded.to_local().numel()
    place["source"] = all(at == 0 for axis, at in enumerate(where) if axis not in by_rows)
    return place


def _rows_of(places: list[dict[str, Any]]) -> Rows:
    counts = {place["order"]: place["count"] for place in places}
    first = {order: sum(count for other, count in counts.items() if other < order) for order in counts}
    return Rows(
        pieces=tuple((first[place["order"]], place["count"]) for place in places),
        sources=tuple(rank for rank, place in enumerate(places) if place["source"]),
    )


# -- rank 0 ----------------------------------------------------------------------------------------------------------


def holder(ranks: Ranks, rows: Mapping[str, Rows]) -> Callable[[str, Tensor], Held]:
    """How rank 0 holds a tensor: `SharedTensors`' argument."""

    def hold(name: str, tensor: Tensor) -> Held:
        return _Sharded(name, tensor, ranks, rows[name]) if name in rows else _Everywhere(name, tensor, ranks)

    return hold


class _Everywhere(Held):
    """Whole here and on every other rank, which gets what is written here."""

    def __init__(self, name: str, tensor: Tensor, ranks: Ranks) -> None:
        super().__init__(name, tensor)
        self._ranks = ranks

    def written(self, anchor: Tensor, start: int, stop: int) -> None:
        self._ranks.command("take", self.name, start, stop)
        self._ranks.spread(anchor[start:stop].to(self.dtype).cpu().contiguous())

    def write(self, anchor: Tensor, start: int, stop: int) -> None:
        super().write(anchor, start, stop)
        self.written(anchor, start, stop)

    def keep(self) -> Tensor:
        self._ranks.command("keep", self.name)
        return super().keep()

    def put_back(self, kept: Tensor) -> None:
        self._ranks.command("put_back", self.name)
        super().put_back(kept)


class _Sharded(Held):
    """In rows over the ranks."""

    def __init__(self, name: str, tensor: Tensor, ranks: Ranks, rows: Rows) -> None:
        self.name, self.tensor = name, tensor
        self._ranks, self._rows = ranks, rows

    def read(self, start: int, stop: int) -> Tensor:
        self._ranks.command("give", self.name, start, stop)
        whole = torch.empty(stop - start, dtype=self.dtype)
        for rank in self._rows.sources:
            first, last = self._rows.overlap(rank, start, stop)
            if first >= last:
                continue
            piece = whole[first - start : last - start]
            if rank == 0:
                piece.copy_(self._own(first, last))
            else:
                self._ranks.receive(piece, rank)
        return whole

    def view(self, start: int, stop: int) -> Tensor | None:
        return None

    def write(self, anchor: Tensor, start: int, stop: int) -> None:
        self._ranks.command("take", self.name, start, stop)
        for rank in range(self._ranks.size):
            first, last = self._rows.overlap(rank, start, stop)
            if first >= last:
                continue
            if rank == 0:
                self._own(first, last).copy_(anchor[first:last])
            else:
                self._ranks.send(anchor[first:last].to(self.dtype).cpu().contiguous(), rank)

    def _own(self, first: int, last: int) -> Tensor:
        offset = self._rows.pieces[0][0]
        return local_of(self.tensor).view(-1)[first - offset : last - offset]

    def keep(self) -> Tensor:
        self._ranks.command("keep", self.name)
        return local_of(self.tensor).clone()

    def put_back(self, kept: Tensor) -> None:
        self._ranks.command("put_back", self.name)
        local_of(self.tensor).copy_(kept)


# -- the others ------------------------------------------------------------------------------------------------------


class Follower:
    """What another rank does when rank 0 reads or writes a tensor."""

    def __init__(
        self, model: nn.Module | Mapping[str, Tensor], buffers: bool, ranks: Ranks, rows: Mapping[str, Rows]
    ) -> None:
        self._ranks, self._rows = ranks, rows
        self._named = {name: tensor for name, tensor, _ in named_tensors(model, buffers)}
        self._kept: dict[str, Tensor] = {}
        self._drafts: dict[str, Tensor] = {}  # of tensors that can't be written in parts
        self.handlers: dict[str, Handler] = {
            "give": self._give,
            "take": self._take,
            "keep": self._keep,
            "put_back": self._put_back,
        }

    def trainable(self) -> list[bool]:
        """As `SharedTensors.trainable`."""
        return [tensor.requires_grad for tensor in self._named.values()]

    def finite(self) -> bool:
        """Nothing that this rank holds whole is infinite or NaN. (Rows are read by rank 0 anyway.)"""
        whole = (tensor.detach() for name, tensor in self._named.items() if name not in self._rows)
        return all(bool(torch.isfinite(tensor).all()) for tensor in whole if tensor.is_floating_point())

    def _give(self, name: str, start: int, stop: int) -> Callable[[], None]:
        rows, rank = self._rows[name], self._ranks.rank
        first, last = rows.overlap(rank, start, stop)
        if rank not in rows.sources or first >= last:
            return _nothing
        offset = rows.pieces[rank][0]
        piece = local_of(self._named[name]).view(-1)[first - offset : last - offset].cpu().contiguous()
        return lambda: self._ranks.send(piece, 0)

    def _take(self, name: str, start: int, stop: int) -> Callable[[], None]:
        tensor = self._named[name]
        local = local_of(tensor)
        if name not in self._rows:
            return lambda: self._take_whole(name, local, start, stop)
        first, last = self._rows[name].overlap(self._ranks.rank, start, stop)
        if first >= last:
            return _nothing
        offset = self._rows[name].pieces[self._ranks.rank][0]
        values = torch.empty(last - first, dtype=tensor.dtype)

        def take() -> None:
            self._ranks.receive(values, 0)
            local.view(-1)[first - offset : last - offset].copy_(values)

        return take

    def _take_whole(self, name: str, local: Tensor, start: int, stop: int) -> None:
        values = torch.empty(stop - start, dtype=local.dtype)
        self._ranks.spread(values)
        if local.is_contiguous():
            local.view(-1)[start:stop].copy_(values)
            return
        draft = self._drafts.setdefault(name, torch.empty(local.numel(), dtype=local.dtype))
        draft[start:stop] = values
        if stop == local.numel():
            local.copy_(self._drafts.pop(name).view(local.shape))

    def _keep(self, name: str) -> Callable[[], None]:
        self._kept[name] = local_of(self._named[name]).clone()
        return _nothing

    def _put_back(self, name: str) -> Callable[[], None]:
        local_of(self._named[name]).copy_(self._kept.pop(name))
        return _nothing


def _nothing() -> None:
    """There is nothing left to do."""
