"""Runs made by hand, as JSON: every number in them is there on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ADAPTIVE = (10, 10, 12, 12, 14, 14, 14, 14)  # 100 steps; a fixed interval of 10 takes 10 rounds
FIXED = (10,) * 10
# Seconds of a round, by replica: replica 1 trains longer, replica 0 waits for it. The exchange, waiting included.
TIMES = {0: (6.0, 3.0, 4.0), 1: (9.0, 0.0, 1.0)}


def round_json(index: int, steps: int, position: int, loss: float, **more: Any) -> dict[str, Any]:
    replicas = {
        str(replica): {
            "loss": loss + 0.1 * (replica - 0.5),
            "train_seconds": train,
            "wait_seconds": wait,
            "exchange_seconds": exchange,
            "bytes_sent": 1000.0,
            "bytes_received": 2000.0,
        }
        for replica, (train, wait, exchange) in TIMES.items()
    }
    return {
        "version": 2,
        "round": index,
        "steps": steps,
        "position": position,
        "horizon": steps,
        "members": [0, 1],
        "absent": {},
        "outliers": {},
        "tokens": 100 * steps,
        "loss": loss,
        "rho": steps / 10,
        "momentum": 0.7,
        "outer_lr": 0.7,
        "drift": 4.0 / (index + 1),
        "mean_square_norm": 3.0 / (index + 1),
        "coherence": 1.5,
        "phase": "monitor",
        "assessment": "supporting" if steps > 10 else "",
        "action": "grow" if steps > 10 else "keep",
        "next_horizon": steps,
        "next_steps": steps,
        "replicas": replicas,
        **more,
    }


def run_json(
    policy: str = "autoloco",
    *,
    seed: int = 1,
    intervals: Sequence[int] | None = None,
    validation: float | None = 2.0,
    last_loss: float = 1.0,
    **more: Any,
) -> dict[str, Any]:
    lengths = intervals or (FIXED if policy == "fixed" else ADAPTIVE)
    ends = [sum(lengths[: index + 1]) for index in range(len(lengths))]
    rounds = [
        round_json(index, steps, end, last_loss + 0.5 * (len(lengths) - 1 - index))
        for index, (steps, end) in enumerate(zip(lengths, ends, strict=True))
    ]
    settings: Mapping[str, Any] = {"horizon": 10} if policy == "fixed" else {"base_horizon": 10, "growth_cap": 1.15}
    return {
        "version": 2,
        "kind": "run",
        "name": "made by hand",
        "source": "tests",
        "replicas": 2,
        "seed": seed,
        "steps": 100,
        "codec": "int8",
        "elements": 1_000_000,
        "policy": {"name": policy, "settings": settings},
        "outer": {"kind": "nesterov", "lr": 0.7},
        "versions": {"composer-replication": "0.1.0"},
        "rounds": rounds,
        "result": None if validation is None else {"validation_loss": validation, "digest": "d", "seconds": 80.0},
        **more,
    }
