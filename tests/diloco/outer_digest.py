"""Prints one hash over codecs, reduction, norms and outer step. Run in processes that differ in threads or CPU flags.

python tests/diloco/outer_digest.py THREADS [THREADS ...]
"""

from __future__ import annotations

import sys

import torch
import xxhash

from composer_replication.collective.codec import CODECS, decode_chunk, encode_chunk
from composer_replication.collective.norms import LANES, difference_square_norm
from composer_replication.collective.reduce import reduce_chunk
from composer_replication.diloco.outer_step import (
    OuterNesterov,
    average_step_,
    digest,
    nesterov_step_,
    pseudo_gradient,
)

ELEMENTS = LANES + 40_001  # a whole block of every kind, large enough to be shared by four threads, and a short one


def inputs(count: int) -> list[torch.Tensor]:
    """Pseudo-random float32 of all sizes, made from integers alone: the same bits in every process."""
    index = torch.arange(ELEMENTS, dtype=torch.int64)
    made = []
    for seed in range(1, count + 1):
        mixed = (index * 2654435761 + seed * 40503) % 4294967296
        mixed = (mixed ^ (mixed >> 15)) * 2246822519 % 4294967296
        mantissa = (mixed >> 9).to(torch.float32) * 2.0**-23 - 0.5  # exact: 23 bits
        exponent = torch.tensor([2.0**e for e in range(-12, 4)])[mixed % 16]
        made.append(mantissa * exponent)
    return made


def main(threads: int) -> str:
    torch.set_num_threads(threads)
    anchor, momentum, first, second, third = inputs(5)
    hasher = xxhash.xxh3_128()
    sizes = [5, 4096, 10_000, ELEMENTS - 14_101]  # of the chunk's parts
    gradients = [pseudo_gradient(anchor, local, torch.empty(ELEMENTS)) for local in (first, second, third)]
    for local in (first, second, third):
        hasher.update(difference_square_norm(anchor, local).hex().encode())
    for codec in CODECS:
        for weights in ([1.0, 1.0, 1.0], [1.0, 2.0, 4.5]):
            payloads = [encode_chunk(codec, sizes, gradient) for gradient in gradients]
            reduced = reduce_chunk(codec, sizes, payloads, weights)
            for payload in (*payloads, reduced.payload):
                hasher.update(payload)
            hasher.update(reduced.square_norm.hex().encode())
        mean = decode_chunk(codec, sizes, reduced.payload)
        for divisor in (1.0, 1.37):
            nesterov_step_(anchor, momentum, mean, lr=0.7123, momentum_factor=0.8134, divisor=divisor)
        average_step_(anchor, mean)
        parameter = torch.nn.Parameter(anchor.clone())
        optimizer = OuterNesterov([parameter], lr=0.31, momentum=0.77)
        for _ in range(2):
            parameter.grad = mean
            optimizer.step()
        hasher.update(digest([("w", anchor, momentum), ("p", parameter, mean)], codec).encode())
    return hasher.hexdigest()


if __name__ == "__main__":
    capability = torch.backends.cpu.get_cpu_capability().replace(" ", "_")
    print(capability, *(main(int(threads)) for threads in sys.argv[1:]))
