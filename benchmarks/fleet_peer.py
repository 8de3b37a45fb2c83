"""One replica of the small fleet of `simulated_against_real.py`: it sleeps for each step, and exchanges for real.

Each of its events is a line of JSON with the moment on the clock that all processes of this machine share.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_replication.autoloco.config import AutoLoCoConfig
from composer_replication.autoloco.policies import make_policy
from composer_replication.autoloco.values import Preview
from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.diloco.loop import OuterLoop
from composer_replication.drafts import written_whole

RATE = 1e-3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--interval", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--elements", type=int, required=True)
    parser.add_argument("--failure-policy", required=True)
    parser.add_argument("--heartbeat-seconds", type=float, required=True)
    parser.add_argument("--deadline-floor-seconds", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    own = options.folder / f"replica-{options.replica}"

    def tell(event: str, **values: Any) -> None:
        with own.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, "at": time.monotonic(), **values}) + "\n")

    torch.manual_seed(1)
    model = nn.Linear(options.elements // 16, 16, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # changes nothing; the first one loads much of torch, which belongs to the start
    collective = ObjectStoreCollective(
        (options.folder / "store").as_uri(),
        replica=options.replica,
        replicas=options.replicas,
        codec="int8",
        failure_policy=options.failure_policy,
        heartbeat_seconds=options.heartbeat_seconds,
        deadline_floor_seconds=options.deadline_floor_seconds,
    )
    policy = make_policy("fixed", AutoLoCoConfig(base_horizon=options.interval))
    loop = OuterLoop(model, collective, policy=policy)

    def preview() -> Preview:
        remaining = max(options.steps - loop.position - loop.steps, 0)
        sums = tuple(RATE * min(steps, remaining) for steps in loop.grid)
        return Preview(steps=loop.grid, sums=sums, next_lr=RATE if remaining else 0.0, remaining=remaining)

    kept = own.with_suffix(".pt")
    if kept.exists():
        loop.load_state_dict(torch.load(kept, weights_only=True))
    loop.start(preview())
    if not kept.exists():
        _meet(options.folder, options.replica, options.replicas)
    tell("begins")
    while not loop.ended and not loop.left and loop.position + loop.steps < options.steps:
        time.sleep(options.step_seconds)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3 * (1 + options.replica))
        loop.before_step()
        optimizer.step()
        loop.step_done(RATE)
        if loop.due or loop.overtaken:
            trained = time.monotonic()
            closed = loop.close_interval(preview())
            with written_whole(kept) as draft:
                torch.save(loop.state_dict(), draft)
            tell(
                "round",
                trained=trained,
                round=closed.round,
                members=list(closed.members),
                included=options.replica in closed.members,
                waited=closed.wait_seconds,
            )
    final = loop.finish(preview())
    tell("ends", rounds=final.rounds, digest=final.digest)
    loop.close()


def _meet(folder: Path, replica: int, count: int) -> None:
    (folder / f"here-{replica}").touch()
    while len(list(folder.glob("here-*"))) < count:
        time.sleep(0.02)


if __name__ == "__main__":
    main()
