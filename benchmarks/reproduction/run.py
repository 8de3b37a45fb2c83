"""Trains what isn't kept yet, some runs at a time, and keeps each as it ends.

Invariant: a kept file is whole (written beside, then renamed), and names its recipe; one of another recipe is refused.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.reproduction.study import GROUPS, KEPT, RECIPE, Group, Variant
from composer_replication.drafts import written_whole
from composer_replication.recipe import Recipe, load_recipe

__all__ = ["Job", "jobs", "read", "run_all", "run_one"]


@dataclass(frozen=True)
class Job:
    group: str
    variant: str
    seed: int

    @property
    def path(self) -> Path:
        return KEPT / self.group / f"{self.variant}-s{self.seed}.json.gz"

    @property
    def settings(self) -> tuple[Group, Variant]:
        group = GROUPS[self.group]
        return group, group.variants[self.variant]

    def recipe(self) -> Recipe:
        group, variant = self.settings
        recipe = load_recipe(RECIPE, [*group.overrides, *variant.overrides, f"training.seed={self.seed}"])
        return replace(recipe, name=f"{self.group}/{self.variant}")

    def fingerprint(self) -> str:
        """Of all that the study says of this run; new defaults of the package don't change it."""
        group, variant = self.settings
        written = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
        what = [written, group.overrides, variant.overrides, variant.disturbance, variant.data_parallel, self.seed]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def jobs(groups: Iterable[str], variants: Sequence[str] = (), seeds: Sequence[int] = ()) -> Iterator[Job]:
    """Seed by seed, so that what is there early can be compared."""
    for name in groups:
        group = GROUPS[name]
        for seed in seeds or group.seeds:
            for variant in group.variants:
                if not variants or variant in variants:
                    yield Job(name, variant, seed)


def read(job: Job) -> dict[str, Any] | None:
    """The kept run, or None. Raises ValueError where the study has changed since."""
    if not job.path.exists():
        return None
    try:
        with gzip.open(job.path, "rt", encoding="utf-8") as file:
            run = json.load(file)
    except (EOFError, OSError, ValueError) as error:
        raise ValueError(f"{job.path} can't be read ({error}): delete it, and it is trained again") from error
    if run["recipe"] != job.fingerprint():
        raise ValueError(f"{job.path} is a run of another recipe than {job.group}/{job.variant} is now: move it away")
    return run


def run_one(job: Job) -> None:
    import torch

    from benchmarks.reproduction import debian_text
    from benchmarks.reproduction.disturbances import make
    from composer_replication.diloco.serverless.components import build_data
    from composer_replication.simulation import record_of_simulation, simulate, simulate_data_parallel

    if job.group == "prose":
        debian_text.check()
    torch.set_num_threads(1)
    variant, recipe, began = job.settings[1], job.recipe(), time.monotonic()
    if variant.data_parallel:
        run: Any = simulate_data_parallel(recipe)
    else:
        run = simulate(recipe, disturbance=make(variant.disturbance, build_data(recipe)))
    record = record_of_simulation(recipe, run, name=recipe.name, seconds=time.monotonic() - began)
    _write(job.path, {"recipe": job.fingerprint(), **record})


def run_all(wanted: Sequence[Job], *, at_once: int) -> int:
    """Each run is a process of its own; the number of those that failed."""
    waiting = [job for job in wanted if read(job) is None]
    print(f"{len(wanted)} runs, {len(wanted) - len(waiting)} kept already", flush=True)
    began, done, failed = time.monotonic(), 0, 0
    with ThreadPoolExecutor(at_once) as pool:
        for job, code in pool.map(_as_process, waiting):
            done, failed = done + 1, failed + bool(code)
            spent = time.monotonic() - began
            left = spent / done * (len(waiting) - done)
            what = f" FAILED (exit code {code})" if code else ""
            print(f"{job.group}/{job.variant} seed {job.seed}{what}: {done} of {len(waiting)}, {spent:.0f} s, ", end="")
            print(f"about {left:.0f} s left", flush=True)
    return failed


def _as_process(job: Job) -> tuple[Job, int]:
    command = [sys.executable, "-m", "benchmarks.reproduction", "one", job.group, job.variant, str(job.seed)]
    return job, subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


def _write(path: Path, run: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(run, separators=(",", ":")).encode()
    with written_whole(path) as draft:
        draft.write_bytes(gzip.compress(text, 9, mtime=0))  # equal runs give equal files
