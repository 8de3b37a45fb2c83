"""Chunks of a layout: every element once, cuts where no codec block is cut, and a fingerprint that tells."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.collective.layout import Layout, Slot

BLOCK = 4096


def layout_of(shapes, chunk_elements: int = BLOCK) -> Layout:
    return Layout(tuple(Slot(f"t{i}", tuple(s), "torch.float32") for i, s in enumerate(shapes)), chunk_elements)


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 50), st.integers(4000, 4200), st.integers(0, 30_000)), max_size=12),
    blocks=st.integers(1, 4),
)
def test_chunks_cover_every_element_once(sizes: list[int], blocks: int) -> None:
    layout = layout_of([(size,) for size in sizes], blocks * BLOCK)
    position = {index: 0 for index in range(len(sizes))}
    order = []
    for chunk in layout.chunks:
        assert 0 < chunk.elements <= blocks * BLOCK
        for part in chunk.parts:
            assert part.elements > 0
            assert part.start == position[part.slot], "parts of a tensor follow one another"
            assert part.start % BLOCK == 0, "a part begins where a codec block does"
            assert part.stop == sizes[part.slot] or part.stop % BLOCK == 0
            position[part.slot] = part.stop
            order.append((part.slot, part.start))
    assert [position[i] for i in range(len(sizes))] == sizes
    assert order == sorted(order)
    assert sum(chunk.elements for chunk in layout.chunks) == layout.elements == sum(sizes)
    # Chunks are well filled: two neighbours never fit into one.
    for first, second in zip(layout.chunks, layout.chunks[1:], strict=False):
        assert first.elements + second.elements > (blocks - 1) * BLOCK


def test_shapes_that_straddle() -> None:
    layout = layout_of([(3, 3), (10,), (), (2, 4096), (0, 5)])
    assert [slot.elements for slot in layout.slots] == [9, 10, 1, 8192, 0]
    assert [[(p.slot, p.start, p.stop) for p in chunk.parts] for chunk in layout.chunks] == [
        [(0, 0, 9)],  # less than a block of room is left: the chunk is closed
        [(1, 0, 10)],
        [(2, 0, 1)],
        [(3, 0, 4096)],
        [(3, 4096, 8192)],
    ]
    wider = layout_of([(3, 3), (10,), (), (2, 4096), (0, 5)], 2 * BLOCK)
    assert [[(p.slot, p.start, p.stop) for p in chunk.parts] for chunk in wider.chunks] == [
        [(0, 0, 9), (1, 0, 10), (2, 0, 1), (3, 0, 4096)],
        [(3, 4096, 8192)],
    ]
    assert layout_of([]).chunks == ()


def test_fingerprint_and_differences() -> None:
    one = layout_of([(3, 3), (10,)])
    assert one.fingerprint == layout_of([(3, 3), (10,)]).fingerprint
    assert Layout.from_json(one.to_json()) == one
    others = {
        "t0: torch.float32[3, 3] here, torch.float32[9] there": layout_of([(9,), (10,)]),
        "t1: only here": layout_of([(3, 3)]),
        "t2: only there": layout_of([(3, 3), (10,), (1,)]),
        "chunk size: 4096 here, 8192 there": layout_of([(3, 3), (10,)], 8192),
        "the tensors come in another order": Layout(one.slots[::-1], BLOCK),
        "t0: torch.float32[3, 3] here, torch.bfloat16[3, 3] there": Layout(
            (Slot("t0", (3, 3), "torch.bfloat16"), one.slots[1]), BLOCK
        ),
    }
    for line, other in others.items():
        assert one.differences(other) == [line]
        assert one.fingerprint != other.fingerprint
    assert one.differences(one) == []


def test_misuse() -> None:
    for size in (0, 4095, 4097, -4096):
        with pytest.raises(ValueError, match=f"chunk_elements .* got {size}"):
            layout_of([(3,)], size)
    with pytest.raises(ValueError, match="slot names must differ"):
        Layout((Slot("a", (1,), "torch.float32"), Slot("a", (2,), "torch.float32")))
