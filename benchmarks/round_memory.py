"""Peak memory of a round beyond the model, anchor and momentum: replicas as processes over files, for payloads that
grow tenfold, sharded. It has to stay what a few chunks and the spools take.

    python benchmarks/round_memory.py [--replicas 3] [--codec int8] [--millions 25,250]

A contribution is made chunk by chunk from one chunk of values, so that whatever a process holds beyond that is the
round's own. Prints the peak resident memory of the most loaded replica, less what it held before the round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from composer_replication.collective.base import Contribution, Report, Snapshot
from composer_replication.collective.layout import DEFAULT_CHUNK_ELEMENTS, Layout, Slot
from composer_replication.collective.object_store import ObjectStoreCollective


class Peak:
    """The greatest resident memory while it runs, in bytes, looked at every few milliseconds."""

    def __init__(self) -> None:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            self.bytes = max(self.bytes, resident_bytes())

    def end(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.bytes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def replica(index: int, count: int, elements: int, codec: str, root: str, answers: Any) -> None:
    torch.set_num_threads(1)
    small = Layout((Slot("w", (1,), "torch.float32"),))
    layout = Layout((Slot("w", (elements,), "torch.float32"),))
    values = torch.randn(DEFAULT_CHUNK_ELEMENTS, generator=torch.Generator().manual_seed(index))
    mean = torch.zeros(DEFAULT_CHUNK_ELEMENTS)
    collective = ObjectStoreCollective(f"file://{root}", replica=index, replicas=count, codec=codec, mode="sharded")
    state = Snapshot(round=0, layout=small, anchor=[torch.zeros(1)], momentum=(), state={}, digest="0" * 32)
    base = collective.start(state, settings={}, resumed=False).digest
    report = Report(
        replica=index,
        steps=1,
        tokens=None,
        mass=1.0,
        square_norm=1.0,
        finite=True,
        leaving=True,
        next_lr=1.0,
        preview=(1.0,),
        remaining=None,
        base=base,
        layout=layout.fingerprint,
    )
    held, peak = resident_bytes(), Peak()
    outcome = collective.average(Contribution(0, report, layout, lambda chunk: values[: layout.chunks[chunk].elements]))
    for chunk, part in enumerate(layout.chunks):
        outcome.mean(chunk, mean[: part.elements])
    answers.put(peak.end() - held)
    collective.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--millions", default="25,250", help="of parameters")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for millions in (int(text) for text in arguments.millions.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            answers = context.Queue()
            processes = [
                context.Process(
                    target=replica,
                    args=(i, arguments.replicas, millions * 1_000_000, arguments.codec, f"{folder}/run", answers),
                )
                for i in range(arguments.replicas)
            ]
            for process in processes:
                process.start()
            peaks = [answers.get(timeout=300) for _ in processes]
            for process in processes:
                process.join()
        print(
            f"{4 * millions / 1000:.1f} GB of float32 parameters, {arguments.codec}, {arguments.replicas} replicas: "
            f"peak {max(peaks) / 1e6:.0f} MB beyond what was held before the round",
            flush=True,
        )


if __name__ == "__main__":
    main()
