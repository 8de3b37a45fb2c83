"""What a run comes to: rounds, bytes, losses, and where its time went. Pure functions over one run.

Invariant: what wasn't recorded is None; nothing is guessed, and what is worked out instead of measured says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import TypeVar

from composer_replication.autoloco.schedule import fixed_intervals
from composer_replication.report.rounds import Round, number
from composer_replication.report.runs import Run

_T = TypeVar("_T")

__all__ = [
    "Bytes",
    "Times",
    "away",
    "bytes_of",
    "diverged",
    "end_loss",
    "fixed_rounds",
    "last_loss",
    "late",
    "since",
    "times_of",
    "validation",
]


def _remembered(work: Callable[[Run], _T]) -> Callable[[Run], _T]:
    """Worked out once for each run."""

    @wraps(work)
    def remembering(run: Run) -> _T:
        if work.__name__ not in run.memo:
            run.memo[work.__name__] = work(run)
        return run.memo[work.__name__]

    return remembering


def fixed_rounds(run: Run, base: int | None = None) -> int | None:
    """Rounds that a fixed interval of the base horizon takes for the steps that were trained.

    None where that isn't known, or where rounds of the run are missing: a hole in its record is no saving.
    """
    base = base or run.base_horizon
    whole = all(one.round == index for index, one in enumerate(run.rounds))
    return fixed_intervals(run.position, base) if base and run.position and whole else None


def last_loss(run: Run) -> float | None:
    """Training loss of the last round that has one: mean over the replicas averaged, and over the interval."""
    return next((one.loss for one in reversed(run.rounds) if one.loss is not None), None)


def diverged(run: Run) -> Round | None:
    """The first round from which on no loss is finite; None if there is none such.

    A record leaves out what isn't finite. A loss that nobody told is therefore one only where losses were told before.
    """
    told = max((index for index, one in enumerate(run.rounds) if one.loss is not None), default=-1)
    after = run.rounds[told + 1 :]
    return next((one for one in after if one.not_finite or (told >= 0 and one.members)), None)


def since(one: Round) -> str:
    """In words; data parallelism has no rounds, only steps."""
    return f"round {one.round} (step {one.position:,})" if one.horizon > 1 or one.members else f"step {one.position:,}"


def end_loss(run: Run) -> float | None:
    """The last round's training loss, to compare: of a run that diverged there is none."""
    return None if diverged(run) is not None else last_loss(run)


def validation(run: Run) -> float | None:
    """Loss of the final shared weights on validation data."""
    return number(run.result, "validation_loss")


# -- bytes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Sent by all replicas together."""

    sent: float
    received: float | None
    measured: bool  # else worked out from the model's size and the codec
    as_float32: float | None  # the same rounds without a codec
    by_replica: dict[int, tuple[float, float | None]]  # sent, received


@_remembered
def bytes_of(run: Run) -> Bytes | None:
    """None if neither the bytes nor the model's size are known.

    A round whose replicas haven't told yet (the last one of a running fleet) is taken to be like the others.
    """
    if not run.rounds:
        return None
    ratio = _float32_ratio(run.codec, run.elements or 0)
    told = {i: (_scaled(run, i, "bytes_sent"), _scaled(run, i, "bytes_received")) for i in run.ids}
    known = {i: (sent, received) for i, (sent, received) in told.items() if sent is not None}
    if known and len(known) == len(run.ids):
        sent = sum(sent for sent, _ in known.values())
        got = [received for _, received in known.values()]
        received = sum(one for one in got if one is not None) if None not in got else None
        whole = sent * ratio if ratio else None
        return Bytes(sent=sent, received=received, measured=True, as_float32=whole, by_replica=known)
    if not ratio or not run.elements:
        return None
    contributions = sum(len(one.members) for one in run.rounds)
    if run.policy == "ddp":  # a gradient of each replica in each step, at least
        contributions = run.replicas * run.exchanges
    plain = 4.0 * run.elements * contributions
    return Bytes(sent=plain / ratio, received=None, measured=False, as_float32=plain, by_replica={})


def _scaled(run: Run, replica: int, name: str) -> float | None:
    """Of one replica over all its rounds, those that weren't told taken for its average one."""
    told = [value for one in run.rounds if (value := one.of(replica, name)) is not None]
    mine = sum(replica in one.replicas or replica in one.members for one in run.rounds)
    return sum(told) / len(told) * mine if told else None


_MAX_ELEMENTS = 10**13  # a number beyond is damage, not a model


@lru_cache(maxsize=256)
def _float32_ratio(codec: str, elements: int) -> float | None:
    """How many times as many bytes float32 takes; None if that can't be said."""
    if codec == "float32":
        return 1.0
    if not codec or not 1 <= elements <= _MAX_ELEMENTS:
        return None
    from composer_replication.collective.object_store.costs import encoded_sizes, plain_layout

    try:
        layout = plain_layout(elements)
        return sum(encoded_sizes("float32", layout)) / sum(encoded_sizes(codec, layout))
    except (ValueError, OverflowError):  # another package's codec, or damage
        return None


# -- time ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds, summed over the rounds that have been told of; `by_replica` in the order train, wait, exchange."""

    by_replica: dict[int, tuple[float, float, float]]
    rounds: int  # that have been told of
    waited_for: dict[int, tuple[int, float]]  # replica -> (rounds in which it came last, seconds that others waited)
    measured: bool = True  # else worked out by `simulate` for machines that it was given

    @property
    def train(self) -> float:
        return self._sum(0)

    @property
    def wait(self) -> float:
        return self._sum(1)

    @property
    def exchange(self) -> float:
        return self._sum(2)

    @property
    def whole(self) -> float:
        return self.train + self.wait + self.exchange

    def utilisation(self, replica: int) -> float | None:
        """The share of its time in which a replica trains."""
        own = self.by_replica[replica]
        return own[0] / sum(own) if sum(own) > 0 else None

    def _sum(self, index: int) -> float:
        return sum(one[index] for one in self.by_replica.values())


@_remembered
def times_of(run: Run) -> Times | None:
    """None if neither the rounds nor a simulation of machines say how long replicas trained."""
    sums: dict[int, tuple[float, float, float]] = {}
    told = 0
    for one in run.rounds:
        told += bool(one.spent)
        for i, found in one.spent.items():
            before = sums.get(i, (0.0, 0.0, 0.0))
            sums[i] = (before[0] + found[0], before[1] + found[1], before[2] + found[2])
    if not sums or not any(sum(one) > 0 for one in sums.values()):
        return _simulated_times(run)
    return Times(by_replica=dict(sorted(sums.items())), rounds=told, waited_for=_waited_for(run))


def _simulated_times(run: Run) -> Times | None:
    """What was trained in vain, and when a machine was gone, counts as waiting here: nobody trained then."""
    told = run.raw.get("time")
    replicas = told.get("replicas") if isinstance(told, Mapping) else None
    found: dict[int, tuple[float, float, float]] = {}
    for replica, parts in enumerate(replicas if isinstance(replicas, list) else ()):
        if not isinstance(parts, Mapping):
            return None
        names = ("train", "exchange", "wait", "lost", "down")
        train, exchange, *idle = (max(number(parts, f"{name}_seconds") or 0.0, 0.0) for name in names)
        found[replica] = (train, sum(idle), exchange)
    if not any(sum(one) > 0 for one in found.values()):
        return None
    return Times(by_replica=found, rounds=run.exchanges, waited_for={}, measured=False)


def late(one: Round) -> tuple[int, float] | None:
    """(who came last in a round, seconds that the one who waited longest waited for it); None if it isn't known."""
    told = [
        (values["straggler_seconds"], int(values["straggler"]))
        for values in one.replicas.values()
        if "straggler" in values and "straggler_seconds" in values
    ]
    if told:
        seconds, who = max(told)
        return who, seconds
    trained = {i: seconds for i in one.members if (seconds := one.of(i, "train_seconds")) is not None}
    if len(trained) < 2 or len(trained) < len(one.members):
        return None
    last = max(trained, key=lambda i: (trained[i], -i))
    return last, trained[last] - min(trained.values())


def away(run: Run) -> dict[int, dict[int, str]]:
    """By round: replicas that took part once and weren't expected then, and why.

    A round's record names whom it expected in vain. One that left was averaged up to its end; one that is taken off has
    been expected in vain before.
    """
    found: dict[int, dict[int, str]] = {}
    last: dict[int, str] = {}
    for one in run.rounds:
        here = {*one.members, *one.replicas}
        found[one.round] = {i: why for i, why in last.items() if i not in here and i not in one.absent}
        last |= dict.fromkeys(one.absent, "no longer expected") | dict.fromkeys(one.members, "left")
    return found


def _waited_for(run: Run) -> dict[int, tuple[int, float]]:
    sums: dict[int, tuple[int, float]] = {}
    for one in run.rounds:
        came = late(one)
        if came is not None and came[1] > 0:
            rounds, seconds = sums.get(came[0], (0, 0.0))
            sums[came[0]] = (rounds + 1, seconds + came[1])
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))
