"""Codecs against the bandwidth of `Tensor.copy_`: encode, decode, and decode-and-add.

    python benchmarks/codec.py [--elements 67108864] [--threads 1] [--repeats 7]

Every codec's operation is alternated with a copy of the same float32 values, so that whatever else the machine does
falls on both alike. Printed is the median of the paired ratios: time of the operation / time of the copy.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from composer_replication.collective.codec import CODECS, add_chunk_, decode_chunk, encode_chunk
from composer_replication.collective.layout import DEFAULT_CHUNK_ELEMENTS


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def paired(action: Callable[[], object], copy: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median of the ratios, and the median seconds of the copy."""
    action()
    copy()
    pairs = [(seconds(action), seconds(copy)) for _ in range(repeats)]
    return statistics.median(a / c for a, c in pairs), statistics.median(c for _, c in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=16 * DEFAULT_CHUNK_ELEMENTS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sizes = [DEFAULT_CHUNK_ELEMENTS] * max(1, arguments.elements // DEFAULT_CHUNK_ELEMENTS)
    values = torch.randn(sum(sizes)) * 1e-3
    other = torch.zeros_like(values)
    pieces, sums = values.split(sizes), other.split(sizes)

    def copy() -> None:
        for piece, target in zip(pieces, sums, strict=True):
            target.copy_(piece)

    print(f"{len(values):,} float32, {arguments.threads} thread(s), torch {torch.__version__}, "
          f"{torch.backends.cpu.get_cpu_capability()}; times as multiples of copy_")  # fmt: skip
    print(f"{'codec':<10} {'encode':>8} {'decode':>8} {'add':>8} {'encode+decode':>14} {'copy_ GB/s':>11}")
    for codec in CODECS:
        held = [encode_chunk(codec, [piece.numel()], piece) for piece in pieces]

        def encode(codec: str = codec, held: list[bytearray] = held) -> None:
            for piece, out in zip(pieces, held, strict=True):
                encode_chunk(codec, [piece.numel()], piece, out=out)

        def decode(codec: str = codec, held: list[bytearray] = held) -> None:
            for payload, target in zip(held, sums, strict=True):
                decode_chunk(codec, [target.numel()], payload, out=target)

        def add(codec: str = codec, held: list[bytearray] = held) -> None:
            for payload, target in zip(held, sums, strict=True):
                add_chunk_(codec, [target.numel()], payload, target)

        ratios, copies = zip(
            *(paired(action, copy, arguments.repeats) for action in (encode, decode, add)), strict=True
        )
        bandwidth = 8 * len(values) / statistics.median(copies) / 1e9
        both = ratios[0] + ratios[1]
        print(f"{codec:<10} {ratios[0]:>8.2f} {ratios[1]:>8.2f} {ratios[2]:>8.2f} {both:>14.2f} {bandwidth:>11.1f}")


if __name__ == "__main__":
    main()
