"""A run as the report sees it: plain JSON values that are looked at with care, because files can be damaged.

Invariant: reading never raises over what a run holds. What can't be used is left out, and a notice says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from composer_replication.diloco.round_record import RECORD_VERSION
from composer_replication.report.rounds import Round, items_of, number, object_of, text_of, tidy_rounds, whole

__all__ = ["Run", "run_from_json", "run_to_json"]

_MAX_REPLICAS = 100_000  # a number beyond is damage, not a fleet


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
    memo: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # of what was worked out of it

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
        told = whole(self.settings, "base_horizon")
        if told is not None and told > 0:
            return told
        policy = self.settings.get("policy")
        inner = policy.get("settings", policy) if isinstance(policy, Mapping) else {}
        for name in ("base_horizon", "horizon"):
            found = whole(inner, name) if isinstance(inner, Mapping) else None
            if found is not None and found > 0:
                return found
        if self.policy == "linear":
            return None  # it has no base: what it is compared with must be said by others
        return self.rounds[0].horizon if self.rounds and self.rounds[0].horizon > 0 else None

    @property
    def simulated(self) -> bool:
        return self.raw.get("source") == "simulation"

    @property
    def task(self) -> Mapping[str, Any] | None:
        """What was trained: model, data, optimizer and its schedule, and whether something disturbed it. None where
        that isn't recorded."""
        told = self.settings.get("task")
        return told if isinstance(told, Mapping) and told else None

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """Every replica that took part, or told anything."""
        return tuple(sorted({i for one in self.rounds for i in (*one.members, *one.replicas)}))


def run_to_json(run: Run) -> dict[str, Any]:
    """As it was read, with the notices."""
    return {**run.raw, "notices": list(run.notices)}


def run_from_json(
    values: Mapping[str, Any],
    *,
    source: str,
    notices: Iterable[str] = (),
    default: str = "",
    live: bool = False,
    running: bool | None = None,
) -> Run:
    """The run that a JSON object describes. `default` names one that has no name; of a `live` one it isn't said that it
    hasn't ended. `running`: whether its replicas show life; None if that isn't known, as from a file.
    """
    said = list(notices)
    version = values.get("version")
    if version != RECORD_VERSION:
        known = "has no version" if version is None else f"is of version {_short(version)}"
        said.append(
            f"it {known}, and this package reads version {RECORD_VERSION}: shown as far as its fields are known"
        )
    rounds, problems = tidy_rounds(items_of(values.get("rounds")))
    said += [*problems, *(text_of(one) for one in items_of(values.get("notices")))]
    policy = values.get("policy")
    name = policy.get("name") if isinstance(policy, Mapping) else policy
    replicas = whole(values, "replicas") or len({i for one in rounds for i in one.members})
    rounds = rounds or _stretches(items_of(values.get("losses")))
    run = Run(
        name=text_of(values.get("name")) or default or source,
        source=source,
        rounds=rounds,
        replicas=replicas if 0 < replicas < _MAX_REPLICAS else 0,
        seed=whole(values, "seed"),
        steps=whole(values, "steps"),
        codec=text_of(values.get("codec")),
        elements=whole(values, "elements"),
        policy=text_of(name) or "unknown policy",
        settings=_settings(values),
        versions=object_of(values.get("versions")),
        result=object_of(values.get("result")) or _old_result(values),
        ended=values["ended"] if isinstance(values.get("ended"), bool) else None,
        raw=values,
    )
    return _with_state(run, said, live, running)


def _with_state(run: Run, said: list[str], live: bool, running: bool | None) -> Run:
    ended = run.ended
    if ended is None and (run.result or (run.steps and run.position >= run.steps)):
        ended = True
    if not run.rounds:
        said.append("no round is closed yet" if ended is False else "it holds no round")
    elif not live and (ended is False or (run.steps and run.position < run.steps)):
        unknown = "it isn't finished" if ended is None else "it had not ended when this was recorded"
        gone = "it has not ended, and no replica shows life: interrupted"
        state = unknown if running is None else "it still runs" if running else gone
        said.append(f"{state}: {run.position}{f' of {run.steps}' if run.steps else ''} steps")
    elif not live and ended is None and running is None and not _is_last(run.raw.get("rounds")):
        said.append(f"whether it went on after step {run.position} isn't known: it has no end, and no number of steps")
    return replace(run, ended=ended, notices=tuple(said), memo={})


def _is_last(rounds: Any) -> bool:
    """Whether the last record says that nobody went on from it: then it has no observation."""
    last = items_of(rounds)[-1:]
    return any(isinstance(one, Mapping) and one.get("observation", ...) is None for one in last)


def _stretches(losses: Iterable[Any]) -> tuple[Round, ...]:
    """A run without rounds (data parallelism): what it trained between two of its [step, loss] pairs."""
    found: list[Round] = []
    before = 0
    for pair in losses:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            continue
        step, loss = whole({"step": pair[0]}, "step"), number({"loss": pair[1]}, "loss")
        if step is not None and step > before:
            one = Round(round=len(found), steps=step - before, position=step, horizon=1, members=(), loss=loss)
            found.append(replace(one, not_finite=loss is None))
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
    found = {name: value for name, value in values.items() if name not in gone}
    task, recipe = found.get("task"), found.get("training")
    if isinstance(task, Mapping) and isinstance(recipe, Mapping):  # the recipe's words for the same
        found["training"] = {name: value for name, value in recipe.items() if name not in task}
    return found


def _old_result(values: Mapping[str, Any]) -> dict[str, Any]:
    """Runs of version 1 hold their result beside the settings."""
    return {name: values[name] for name in ("validation_loss", "digest", "seconds") if name in values}


def _short(value: Any) -> str:
    return text_of(value)[:40]
