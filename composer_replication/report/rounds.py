"""One closed round as the report sees it, and the values in a file that may be damaged.

Invariant: a number is a number that can be added up, a text is a text; whatever else a file holds is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

__all__ = ["Round", "items_of", "number", "object_of", "text_of", "tidy_rounds", "whole"]

_FLEET = ("drift", "coherence", "rho", "momentum", "outer_lr", "mean_square_norm")
_WORDS = ("phase", "assessment", "action")
_MAX_NUMBER = 1e100  # beyond this it is damage


def number(values: Mapping[str, Any], name: str) -> float | None:
    """A number of that name, or None: also where it is so great that sums of it would overflow."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MAX_NUMBER < value < _MAX_NUMBER:
        return None
    return float(value)


def whole(values: Mapping[str, Any], name: str) -> int | None:
    value = number(values, name)
    return int(value) if value is not None and value == int(value) else None


@dataclass(frozen=True, kw_only=True)
class Round:
    """One closed round. What isn't known is None, "" or absent."""

    round: int
    steps: int
    position: int
    horizon: int
    members: tuple[int, ...]
    tokens: int | None = None
    loss: float | None = None  # mean over the members
    not_finite: bool = False  # a loss, or what was averaged, was NaN or infinite
    numbers: Mapping[str, float] = field(default_factory=dict)  # drift, coherence, rho, momentum, outer_lr
    phase: str = ""
    assessment: str = ""
    action: str = ""
    next_horizon: int | None = None
    absent: Mapping[int, str] = field(default_factory=dict)
    outliers: Mapping[int, str] = field(default_factory=dict)
    replicas: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def of(self, replica: int, name: str) -> float | None:
        return self.replicas.get(replica, {}).get(name)

    @cached_property
    def spent(self) -> Mapping[int, tuple[float, float, float]]:
        """Seconds of (training, waiting, exchanging) by replica, of those that have told.

        What is recorded as the exchange is the whole boundary, waiting included; here each second is counted once.
        """
        found: dict[int, tuple[float, float, float]] = {}
        for replica, told in self.replicas.items():
            train, wait = told.get("train_seconds"), told.get("wait_seconds")
            if train is not None and wait is not None:
                whole = told.get("exchange_seconds", 0.0)
                found[replica] = max(train, 0.0), max(wait, 0.0), max(whole - wait, 0.0)
        return found

    @cached_property
    def seconds(self) -> float | None:
        """How long the round took: that of the replica that took longest."""
        return max((sum(one) for one in self.spent.values()), default=None)


def tidy_rounds(items: Iterable[Any]) -> tuple[tuple[Round, ...], list[str]]:
    """(rounds in order, each once: the last that was said of it; what was wrong)."""
    found: dict[int, Round] = {}
    bad, said = 0, list[str]()
    for item in items:
        one = _round(item, found)
        if one is None:
            bad += 1
        else:
            found[one.round] = one
    if bad:
        said.append(f"{bad} {'rounds aren' if bad > 1 else 'round isn'}'t readable, and left out")
    numbers = sorted(found)
    if found and numbers[0] != 0:
        said.append(f"the rounds before round {numbers[0]} are missing")
    gaps = [(one, after) for one, after in zip(numbers, numbers[1:], strict=False) if after > one + 1]
    if gaps:
        count = sum(after - one - 1 for one, after in gaps)
        words = f"round {gaps[0][0] + 1} is" if count == 1 else f"{count} rounds, from round {gaps[0][0] + 1} on, are"
        said.append(f"{words} missing")
    return tuple(found[one] for one in numbers), said


def _round(item: Any, before: Mapping[int, Round]) -> Round | None:
    if not isinstance(item, Mapping):
        return None
    index, steps = whole(item, "round"), whole(item, "steps")
    if index is None or index < 0 or steps is None or steps < 0:
        return None
    last = before.get(index - 1)
    position = whole(item, "position")
    if position is None:
        position = (last.position if last else 0) + steps
    replicas = {
        replica: {name: value for name in told if (value := number(told, name)) is not None}
        for replica, told in _by_replica(item.get("replicas")).items()
        if isinstance(told, Mapping)
    }
    members = tuple(
        sorted({m for m in items_of(item.get("members")) if isinstance(m, int) and not isinstance(m, bool)})
    )
    if "members" not in item:  # an empty list says that nobody was averaged
        members = tuple(sorted(replicas))
    sent = number(item, "bytes_sent")  # of each of them, in a simulation
    if sent is not None and not any("bytes_sent" in told for told in replicas.values()):
        replicas = {m: {**replicas.get(m, {}), "bytes_sent": sent} for m in {*members, *replicas}}
    losses = [replicas[m]["loss"] for m in members if "loss" in replicas.get(m, {})]
    return Round(
        round=index,
        steps=steps,
        position=position,
        horizon=whole(item, "horizon") or steps,
        members=members,
        tokens=whole(item, "tokens"),
        loss=sum(losses) / len(losses) if losses else number(item, "loss"),
        not_finite=_not_finite(item),
        numbers={name: value for name in _FLEET if (value := number(item, name)) is not None},
        # Of a round that nobody went on from the policy wasn't asked: the record repeats what it said before.
        **{name: text_of(item.get(name)) if item.get("observation", ...) is not None else "" for name in _WORDS},
        next_horizon=whole(item, "next_horizon"),
        absent={replica: text_of(why) for replica, why in _by_replica(item.get("absent")).items()},
        outliers={replica: text_of(why) for replica, why in _by_replica(item.get("outliers")).items()},
        replicas=replicas,
    )


def _not_finite(item: Mapping[str, Any]) -> bool:
    told = [item, *(one for one in _by_replica(item.get("replicas")).values() if isinstance(one, Mapping))]
    losses = [one.get("loss") for one in told]
    reasons = _by_replica(item.get("absent")).values()
    return any(isinstance(loss, float) and not math.isfinite(loss) for loss in losses) or any(
        "not finite" in text_of(why) for why in reasons
    )


def _by_replica(values: Any) -> dict[int, Any]:
    pairs = object_of(values).items()
    return {int(name): value for name, value in pairs if str(name).isascii() and str(name).isdigit() and len(name) < 7}


def items_of(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else []


def object_of(values: Any) -> Mapping[str, Any]:
    return values if isinstance(values, Mapping) else {}


def text_of(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
