"""Which tensors are exchanged, and how they are cut into chunks.

Invariant: a layout is a pure function of the slots, so that equal models give equal chunks everywhere. A chunk
is a run of the flat index space (all slots' elements, one after another). Codec blocks never cross a slot.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

__all__ = ["DEFAULT_CHUNK_ELEMENTS", "Chunk", "Layout", "Part", "Slot"]

DEFAULT_CHUNK_ELEMENTS = 4 * 1024 * 1024  # 16 MB of float32, 4 MB of int8
_MOST_CHUNKS = 1 << 20  # of a layout that somebody else wrote: 4 trillion elements in chunks of the usual size


@dataclass(frozen=True, slots=True)
class Slot:
    """One exchanged tensor. Tied tensors are one slot."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # of the model's tensor, e.g. "torch.bfloat16"; what is exchanged is always float32 before the codec
    kind: Literal["parameter", "buffer"] = "parameter"

    @property
    def elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, stop) of a slot."""

    slot: int  # index into Layout.slots
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    parts: tuple[Part, ...]

    @property
    def elements(self) -> int:
        return sum(part.elements for part in self.parts)


@dataclass(frozen=True)
class Layout:
    """The slots of one exchange, in order, and their chunks of at most `chunk_elements` elements."""

    slots: tuple[Slot, ...]
    chunk_elements: int = DEFAULT_CHUNK_ELEMENTS

    def __post_init__(self) -> None:
        # Cuts fall on multiples of this, so that a codec's blocks (4,096 elements) are never cut short.
        if self.chunk_elements < 4096 or self.chunk_elements % 4096:
            raise ValueError(f"chunk_elements must be a positive multiple of 4096, got {self.chunk_elements}")
        names = [slot.name for slot in self.slots]
        if len(set(names)) != len(names):
            raise ValueError(f"slot names must differ, got {sorted(n for n in names if names.count(n) > 1)}")

    @property
    def elements(self) -> int:
        return sum(slot.elements for slot in self.slots)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        chunks: list[Chunk] = []
        parts: list[Part] = []
        room = self.chunk_elements
        for index, slot in enumerate(self.slots):
            start = 0
            while start < slot.elements:
                take = min(room, slot.elements - start)
                if start + take < slot.elements:
                    take -= take % 4096
                if take > 0:
                    parts.append(Part(index, start, start + take))
                    start += take
                    room -= take
                if room < 4096 or take == 0:
                    chunks.append(Chunk(tuple(parts)))
                    parts, room = [], self.chunk_elements
        if parts:
            chunks.append(Chunk(tuple(parts)))
        return tuple(chunks)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the names, shapes, dtypes, kinds and the chunk size."""
        text = json.dumps(self.to_json(), separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def to_json(self) -> dict[str, Any]:
        return {
            "chunk_elements": self.chunk_elements,
            "slots": [[s.name, list(s.shape), s.dtype, s.kind] for s in self.slots],
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Layout:
        slots = tuple(Slot(n, tuple(shape), dtype, kind) for n, shape, dtype, kind in data["slots"])
        layout = Layout(slots, data["chunk_elements"])
        extents = [extent for slot in slots for extent in slot.shape]
        if not all(type(extent) is int and extent >= 0 for extent in extents):
            raise ValueError("a slot's shape holds something that is not a whole number >= 0")
        if layout.elements > _MOST_CHUNKS * layout.chunk_elements:  # before anything is made that long
            raise ValueError(f"{layout.elements} elements are more than any model has")
        return layout

    def differences(self, other: Layout) -> list[str]:
        """What tells `other` apart, one line a tensor; empty when they are the same."""
        mine = {s.name: s for s in self.slots}
        theirs = {s.name: s for s in other.slots}
        lines = [f"{name}: only here" for name in mine if name not in theirs]
        lines += [f"{name}: only there" for name in theirs if name not in mine]
        for name in mine.keys() & theirs.keys():
            a, b = mine[name], theirs[name]
            if a != b:
                lines.append(f"{name}: {a.dtype}{list(a.shape)} here, {b.dtype}{list(b.shape)} there")
        if not lines and [s.name for s in self.slots] != [s.name for s in other.slots]:
            lines.append("the tensors come in another order")
        if self.chunk_elements != other.chunk_elements:
            lines.append(f"chunk size: {self.chunk_elements} here, {other.chunk_elements} there")
        return sorted(lines)
