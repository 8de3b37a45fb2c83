"""What the controller itself costs: seconds and bytes of a round, against the training between two rounds.

    python benchmarks/control_cost.py [--recipe recipes/c4-215m/autoloco.yaml] [--elements 104857600] [--rounds 73]
        [-o docs/results/control.json]

A fleet of threads over a store in memory runs the recipe's whole schedule, with its policy, its previews and its
protocol, but for the training: replicas add a drift that grows with the learning rate, to a model of a few elements.
Timed are the previews of the learning rate (`preview`) and the policy's decisions (`advance`), in every replica; the
squared norms are timed apart, on a model of `--elements` (`norms`: of the own pseudo-gradient, and of the mean, which
replicas share out). Bytes are those of all objects but blobs that replicas wrote and read, signs of life left out. It
prints the table of docs/performance.md, which says what docs/results/control.json keeps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from composer_replication.autoloco.values import Preview
from composer_replication.collective.layout import DEFAULT_CHUNK_ELEMENTS
from composer_replication.collective.norms import difference_square_norm, square_norm
from composer_replication.collective.object_store import ObjectStoreCollective, keys
from composer_replication.diloco.loop import OuterLoop
from composer_replication.preview import LoopPosition, Previewer, Scheduled, mean_rate
from composer_replication.recipe import Recipe, load_recipe, outer_config, policy_of
from composer_replication.store import MemoryStore
from composer_replication.store.base import Buffer
from composer_replication.tasks.optim import build_optimizer, build_scheduler

ELEMENTS = 8192  # of the model whose rounds are run


class Counting(MemoryStore):
    """One replica's view of a shared store, which counts the bytes of what isn't a blob."""

    def __init__(self, shared: MemoryStore) -> None:
        super().__init__("control")
        self._objects, self._lock = shared._objects, shared._lock
        self.bytes: Counter[str] = Counter()

    def _count(self, key: str, what: str, size: int) -> None:
        if not keys.is_blob(key) and "members/" not in key:
            self.bytes[what] += size

    def put(self, key: str, data: Buffer) -> None:
        self._count(key, "written", len(data))
        super().put(key, data)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self._count(key, "written", len(data))
        super().put_if_absent(key, data)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        data = super().get(key, max_bytes=max_bytes)
        self._count(key, "read", len(data))
        return data


class Timed:
    """The recipe's policy, with its decisions timed in processor seconds of the thread."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def advance(self, *arguments: Any) -> Any:
        began = time.thread_time()
        try:
            return self._policy.advance(*arguments)
        finally:
            self.seconds.append(time.thread_time() - began)


class Replica:
    def __init__(self, recipe: Recipe, index: int, shared: MemoryStore, rounds: int) -> None:
        self.recipe, self.index, self.rounds = recipe, index, rounds
        self.store, self.policy = Counting(shared), Timed(policy_of(recipe))
        self.weights = {"w": torch.zeros(ELEMENTS)}
        parameter = torch.nn.Parameter(torch.zeros(1, 1))
        self.optimizer = build_optimizer([parameter], name="adamw", lr=recipe.optimizer.lr)
        section = recipe.scheduler
        self.scheduler = build_scheduler(
            self.optimizer,
            name=section.name,
            steps=recipe.training.steps,
            warmup_steps=section.warmup_steps,
            final_fraction=section.final_fraction,
        )
        self.previewer = Previewer(self.optimizer, [Scheduled(scheduler=self.scheduler)])
        self.preview_seconds: list[float] = []
        self.steps: list[int] = []
        self.before: Counter[str] = Counter()

    def preview(self, done: int) -> Preview:
        began = time.thread_time()
        remaining = self.recipe.training.steps - done
        taken = self.previewer.take(LoopPosition(batch=done), grid=self.loop.grid, remaining=remaining)
        self.preview_seconds.append(time.thread_time() - began)
        return taken.preview

    def run(self, gate: threading.Barrier) -> None:
        collective = ObjectStoreCollective(
            self.store,
            replica=self.index,
            replicas=self.recipe.fleet.replicas,
            codec=self.recipe.codec,
            mode="sharded",
            heartbeat_seconds=3600.0,
        )
        policy: Any = self.policy
        self.loop = OuterLoop(self.weights, collective, policy=policy, outer=outer_config(self.recipe))
        own = torch.Generator().manual_seed(self.index)
        way = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(99))
        done, steps = 0, self.recipe.training.steps
        self.optimizer.step()
        self.loop.start(self.preview(0))
        gate.wait()
        self.before = Counter(self.store.bytes)
        for _ in range(self.rounds):
            mass = 0.0
            while done < steps and not self.loop.due:
                rate = mean_rate(self.optimizer.param_groups, (1,))
                self.loop.step_done(rate, tokens=1000)
                mass += rate
                self.scheduler.step()
                done += 1
            self.weights["w"] -= mass * (way + 0.5 * torch.randn(ELEMENTS, generator=own))
            self.steps.append(self.loop.steps)
            self.loop.close_interval(self.preview(done), leaving=len(self.steps) == self.rounds)
        self.after = Counter(self.store.bytes)
        self.loop.finish(self.preview(done))
        self.loop.close()


def norm_seconds(elements: int, replicas: int, repeats: int) -> float:
    anchor, local = torch.randn(elements), torch.randn(elements)
    chunks = list(zip(anchor.split(DEFAULT_CHUNK_ELEMENTS), local.split(DEFAULT_CHUNK_ELEMENTS), strict=True))
    found: list[float] = []
    for _ in range(repeats):
        began = time.thread_time()
        for a, b in chunks:
            difference_square_norm(a, b)
        for a, _ in chunks[: -(-len(chunks) // replicas)]:
            square_norm(a)
        found.append(time.thread_time() - began)
    return statistics.median(found)


def measure(recipe: Recipe, *, elements: int, rounds: int | None, repeats: int) -> dict[str, Any]:
    from composer_replication.cli.launch import least_intervals

    intervals = least_intervals(recipe)
    assert intervals is not None
    run = rounds or len(intervals)
    count, shared = recipe.fleet.replicas, MemoryStore("control")
    members = [Replica(recipe, index, shared, run) for index in range(count)]
    gate = threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(member.run, gate) for member in members]:
            future.result()
    totals = sum((member.after - member.before for member in members), Counter())
    return {
        "recipe": recipe.name,
        "replicas": count,
        "rounds": len(intervals),
        "rounds_run": run,
        "steps_a_round": statistics.mean(members[0].steps),
        "elements": elements,
        "seconds": {
            "preview": max(statistics.mean(member.preview_seconds[1:]) for member in members),
            "advance": max(statistics.mean(member.policy.seconds) for member in members),
            "norms": norm_seconds(elements, count, repeats),
        },
        "bytes": {"written": totals["written"] / run, "read": totals["read"] / run},
        "torch": torch.__version__,
    }


def table(kept: Mapping[str, Any]) -> list[str]:
    """What is kept, for docs/performance.md."""
    seconds, moved = kept["seconds"], kept["bytes"]
    control = sum(seconds.values())
    whole = sum(moved.values()) * kept["rounds"] / 2**20
    share = {step: control / (kept["steps_a_round"] * step) for step in (1.0, 0.1)}
    return [
        f"| {kept['recipe']}: {kept['replicas']} replicas, {kept['rounds']} rounds | |",
        "|---|---|",
        f"| previews of the learning rate, a round and replica | {seconds['preview']:.3f} s |",
        f"| the policy's decision | {seconds['advance']:.4f} s |",
        f"| squared norms, {kept['elements'] / 1e6:.0f} M float32 elements | {seconds['norms']:.3f} s |",
        f"| together | {control:.3f} s |",
        f"| steps of a round, on average | {kept['steps_a_round']:.0f} |",
        f"| of the training time, with steps of 1 s | {100 * share[1.0]:.3f} % |",
        f"| of the training time, with steps of 0.1 s | {100 * share[0.1]:.2f} % |",
        f"| steps at which it is 0.5 % | {control / (0.005 * kept['steps_a_round']):.2f} s |",
        f"| control bytes of the whole run, all replicas | {whole:.1f} MiB |",
        f"| of these read | {100 * moved['read'] / sum(moved.values()):.0f} % |",
        f"| for each replica | {whole / kept['replicas']:.1f} MiB |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="recipes/c4-215m/autoloco.yaml")
    parser.add_argument("--elements", type=int, default=100 * 1024 * 1024)
    parser.add_argument("--rounds", type=int, default=None, help="run only so many (default: the whole budget)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, help="keep what was measured there, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe(options.recipe)
    kept = measure(recipe, elements=options.elements, rounds=options.rounds, repeats=options.repeats)
    if options.output:
        options.output.write_text(json.dumps(kept, indent=1) + "\n")
    print("\n".join(table(kept)))


if __name__ == "__main__":
    main()
