"""The boundary's arithmetic on the CPU, against the bandwidth of `Tensor.copy_`.

    python benchmarks/outer_step.py [--elements 104857600] [--threads 1] [--repeats 7]

Three things happen at a boundary, none of them I/O: the squared norm of the pseudo-gradient (read local and anchor),
the pseudo-gradient itself, chunk by chunk for the codec, and the outer step (read mean, momentum and anchor; write
momentum, anchor and local). The bytes that one pass can't do without are 28 an element: read local, anchor, mean and
momentum; write anchor, momentum and local. Printed for each part and for all: those bytes / time, as a fraction of
what `copy_` (8 bytes an element) reaches in the same run; medians of paired measurements.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from composer_replication.collective.layout import DEFAULT_CHUNK_ELEMENTS
from composer_replication.collective.norms import difference_square_norm
from composer_replication.diloco.outer_step import nesterov_step_, pseudo_gradient


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=100 * 1024 * 1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    elements = arguments.elements
    anchor, local, mean, momentum, target = (torch.randn(elements) for _ in range(5))
    buffer = torch.empty(DEFAULT_CHUNK_ELEMENTS)
    chunks = list(zip(*(t.split(DEFAULT_CHUNK_ELEMENTS) for t in (anchor, momentum, mean, local)), strict=True))

    def copy() -> None:
        target.copy_(mean)

    def norm() -> None:
        for a, _, _, w in chunks:
            difference_square_norm(a, w)

    def gradient() -> None:
        for a, _, _, w in chunks:
            pseudo_gradient(a, w, buffer[: len(a)])

    def step() -> None:
        for a, m, g, w in chunks:
            nesterov_step_(a, m, g, lr=0.7, momentum_factor=0.9, local=w)

    def normalised() -> None:
        for a, m, g, w in chunks:
            nesterov_step_(a, m, g, lr=0.7, momentum_factor=0.9, divisor=1.25, local=w)

    parts = {"norm": (norm, 8), "pseudo-gradient": (gradient, 8), "outer step": (step, 24)}
    parts["outer step, normalised"] = (normalised, 24)
    times: dict[str, list[float]] = {name: [] for name in parts}
    copies: list[float] = []
    for action, _ in (*parts.values(), (copy, 0)):
        action()
    for _ in range(arguments.repeats):
        for name, (action, _) in parts.items():
            copies.append(seconds(copy))
            times[name].append(seconds(action))
    copy_seconds = statistics.median(copies)
    bandwidth = 8 * elements / copy_seconds
    print(f"{elements:,} float32, {arguments.threads} thread(s), torch {torch.__version__}, "
          f"{torch.backends.cpu.get_cpu_capability()}; copy_ {bandwidth / 1e9:.1f} GB/s")  # fmt: skip
    medians = {name: statistics.median(found) for name, found in times.items()}
    medians["one pass: norm of the pseudo-gradient and outer step"] = medians["norm"] + medians["outer step"]
    medians["all: norm, pseudo-gradient and outer step"] = sum(
        medians[name] for name in ("norm", "pseudo-gradient", "outer step")
    )
    for name, spent in medians.items():
        compulsory = parts[name][1] if name in parts else 28
        share = compulsory * elements / spent / bandwidth
        print(f"{name:<54} {spent:>7.3f} s {spent / copy_seconds:>6.2f} x copy_ {share:>6.0%} of its bandwidth")


if __name__ == "__main__":
    main()
