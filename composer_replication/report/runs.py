"""A run as the report sees it: plain JSON values that are looked at with care, because files can be damaged.

Invariant: reading never raises over what a run holds. What can't be used is left out, and a notice says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from composer_replication.diloco.round_record import RECORD_VERSION

__all__ = ["Round", "Run", "number", "run_from_json", "run_to_json", "tidy_rounds"]

_FLEET = ("drift", "coherence", "rho", "momentum", "outer_lr", "mean_square_norm")
_WORDS = ("phase", "assessment", "action")
_MAX_REPLICAS = 100_000  # numbers beyond these are damage, not a fleet
_MAX_NUMBER = 1e100


def number(values: Mapping[str, Any], name: str) -> float | None:
    """A number of that name, or None: also where it is so great that sums of it would overflow."""
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MAX_NUMBER < value < _MAX_NUMBER:
        return None
    return float(value)


def _whole(values: Mapping[str, Any], name: str) -> int | None:
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


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, or as much of it as could be read."""

    name: str
    source: str  # where it was read, for people
    rounds: tuple[Round, ...]
    replicas: int
    seed: int | None = None
    steps: int | None = None  # budget of each replica
    codec: str = ""
    elements: int | None = None  # of the shared tensors
    policy: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # all that tells runs apart, but seed and versions
    versions: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    ended: bool | None = None  # None: nobody knows
    notices: tuple[str, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict)  # as it was read

    @property
    def position(self) -> int:
        """Inner steps that each replica has behind it."""
        return self.rounds[-1].position if self.rounds else 0

    @property
    def exchanges(self) -> int:
        """How often the replicas exchanged: in every round or, with data parallelism, in every step."""
        return self.position if self.policy == "ddp" else len(self.rounds)

    @property
    def base_horizon(self) -> int | None:
        """The interval that the policy starts from, in inner steps."""
        told = _whole(self.settings, "base_horizon")
        if told is not None and told > 0:
            return told
        policy = self.settings.get("policy")
        inner = policy.get("settings", policy) if isinstance(policy, Mapping) else {}
        for name in ("base_horizon", "horizon"):
            found = _whole(inner, name) if isinstance(inner, Mapping) else None
            if found is not None and found > 0:
                return found
        if self.policy == "linear":
            return None  # it has no base: what it is compared with must be said by others
        return self.rounds[0].horizon if self.rounds and self.rounds[0].horizon > 0 else None

    @property
    def ids(self) -> tuple[int, ...]:
        """Every replica that took part, or told anything."""
        return tuple(sorted({i for one in self.rounds for i in (*one.members, *one.replicas)}))


def run_to_json(run: Run) -> dict[str, Any]:
    """As it was read, with the notices."""
    return {**run.raw, "notices": list(run.notices)}


def run_from_json(
    values: Mapping[str, Any], *, source: str, notices: Iterable[str] = (), default: str = "", live: bool = False
) -> Run:
    """The run that a JSON object describes. `default` names one that has no name; of a `live` one it isn't said that it
    hasn't ended."""
    said = list(notices)
    version = values.get("version")
    if version != RECORD_VERSION:
        known = "has no version" if version is None else f"is of version {_short(version)}"
        said.append(
            f"it {known}, and this package reads version {RECORD_VERSION}: shown as far as its fields are known"
        )
    rounds, problems = tidy_rounds(_items(values.get("rounds")))
    said += [*problems, *(_text(one) for one in _items(values.get("notices")))]
    policy = values.get("policy")
    name = policy.get("name") if isinstance(policy, Mapping) else policy
    replicas = _whole(values, "replicas") or len({i for one in rounds for i in one.members})
    rounds = rounds or _stretches(_items(values.get("losses")))
    run = Run(
        name=_text(values.get("name")) or default or source,
        source=source,
        rounds=rounds,
        replicas=replicas if 0 < replicas < _MAX_REPLICAS else 0,
        seed=_whole(values, "seed"),
        steps=_whole(values, "steps"),
        codec=_text(values.get("codec")),
        elements=_whole(values, "elements"),
        policy=_text(name) or "unknown policy",
        settings=_settings(values),
        versions=_object(values.get("versions")),
        result=_object(values.get("result")) or _old_result(values),
        ended=values["ended"] if isinstance(values.get("ended"), bool) else None,
        raw=values,
    )
    return _with_state(run, said, live)


def _with_state(run: Run, said: list[str], live: bool) -> Run:
    ended = run.ended
    if ended is None and (run.result or (run.steps and run.position >= run.steps)):
        ended = True
    if not run.rounds:
        said.append("no round is closed yet" if ended is False else "it holds no round")
    elif run.steps and run.position < run.steps and not live:
        state = " (it still runs, or was interrupted)" if ended is False else ""
        said.append(f"it isn't finished{state}: {run.position} of {run.steps} steps")
    return replace(run, ended=ended, notices=tuple(said))


def _stretches(losses: Iterable[Any]) -> tuple[Round, ...]:
    """A run without rounds (data parallelism): what it trained between two of its [step, loss] pairs."""
    found: list[Round] = []
    before = 0
    for pair in losses:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            continue
        step, loss = _whole({"step": pair[0]}, "step"), number({"loss": pair[1]}, "loss")
        if step is not None and step > before:
            found.append(Round(round=len(found), steps=step - before, position=step, horizon=1, members=(), loss=loss))
            before = step
    return tuple(found)


def _settings(values: Mapping[str, Any]) -> dict[str, Any]:
    own = (
        "version",
        "kind",
        "name",
        "source",
        "seed",
        "rounds",
        "result",
        "versions",
        "ended",
        "notices",
        "losses",
        "time",
    )
    gone = (*own, "recipe", "validation_loss", "digest", "bytes_sent", "seconds", "created")
    return {name: value for name, value in values.items() if name not in gone}


def _old_result(values: Mapping[str, Any]) -> dict[str, Any]:
    """Runs of version 1 hold their result beside the settings."""
    return {name: values[name] for name in ("validation_loss", "digest", "seconds") if name in values}


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
    index, steps = _whole(item, "round"), _whole(item, "steps")
    if index is None or index < 0 or steps is None or steps < 0:
        return None
    last = before.get(index - 1)
    position = _whole(item, "position")
    if position is None:
        position = (last.position if last else 0) + steps
    replicas = {
        replica: {name: value for name in told if (value := number(told, name)) is not None}
        for replica, told in _by_replica(item.get("replicas")).items()
        if isinstance(told, Mapping)
    }
    members = tuple(sorted({m for m in _items(item.get("members")) if isinstance(m, int) and not isinstance(m, bool)}))
    members = members or tuple(sorted(replicas))
    sent = number(item, "bytes_sent")  # of each of them, in a simulation
    if sent is not None and not any("bytes_sent" in told for told in replicas.values()):
        replicas = {m: {**replicas.get(m, {}), "bytes_sent": sent} for m in {*members, *replicas}}
    losses = [replicas[m]["loss"] for m in members if "loss" in replicas.get(m, {})]
    return Round(
        round=index,
        steps=steps,
        position=position,
        horizon=_whole(item, "horizon") or steps,
        members=members,
        tokens=_whole(item, "tokens"),
        loss=sum(losses) / len(losses) if losses else number(item, "loss"),
        numbers={name: value for name in _FLEET if (value := number(item, name)) is not None},
        # Of a round that nobody went on from the policy wasn't asked: the record repeats what it said before.
        **{name: _text(item.get(name)) if item.get("observation", ...) is not None else "" for name in _WORDS},
        next_horizon=_whole(item, "next_horizon"),
        absent={replica: _text(why) for replica, why in _by_replica(item.get("absent")).items()},
        outliers={replica: _text(why) for replica, why in _by_replica(item.get("outliers")).items()},
        replicas=replicas,
    )


def _by_replica(values: Any) -> dict[int, Any]:
    pairs = _object(values).items()
    return {int(name): value for name, value in pairs if str(name).isascii() and str(name).isdigit() and len(name) < 7}


def _items(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else []


def _object(values: Any) -> Mapping[str, Any]:
    return values if isinstance(values, Mapping) else {}


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)


def _short(value: Any) -> str:
    return _text(value)[:40]
