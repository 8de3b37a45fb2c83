"""`simulate`: the options about machines, links and failures, read.

Invariant: what can't be is a ValueError that names the option and shows how it is written.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

from composer_replication.collective.object_store.costs import Link
from composer_replication.simulation.machines import LinkDown, Machines, Outage

__all__ = ["read_machines"]

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}

_Read = TypeVar("_Read")


def read_machines(args: argparse.Namespace) -> Machines | None:
    """None: nobody asked for times. Raises ValueError for what isn't written as it should, or out of all proportion."""
    if args.step_seconds is None:
        given = next((name for name in _EVENTS if getattr(args, name.replace("-", "_"))), None)
        if given is not None:
            raise ValueError(f"--{given} needs --step-seconds: how long does an inner step take?")
        return None
    for option in _RANGES:
        value = getattr(args, option.replace("-", "_"))
        if not isinstance(value, list):  # of --slower and --link each is looked at as it is read
            _within(option, value)
    latency = args.latency / 1000

    def link(megabits: float) -> Link:
        return Link(up=megabits * 1e6 / 8, down=megabits * 1e6 / 8, request_seconds=latency)

    restart = args.restart_seconds
    outages = [
        Outage(replica=replica, at=at, seconds=restart if seconds is None else seconds, warned=warned)
        for option, warned in (("fail", False), ("preempt", True))
        for replica, at, seconds in _each(
            option, getattr(args, option), _event, "2@600+120, replica 2 after 600 s, for 120 s"
        )
    ]
    downs: list[LinkDown] = []
    for replica, at, seconds in _each("link-down", args.link_down, _event, "2@600+120, for 120 s after 600"):
        if seconds is None:
            raise ValueError(f"--link-down {replica}@{at:g}: for how long? Write it like {replica}@{at:g}+120")
        downs.append(LinkDown(replica=replica, at=at, seconds=seconds))
    links = dict(_each("link", args.link, _pair, "3=25, replica 3's link carries 25 Mbit/s"))
    slower = dict(_each("slower", args.slower, _pair, "3=1.5, replica 3 takes 1.5 times as long"))
    for option, given in (("link", links), ("slower", slower)):
        for replica, value in given.items():
            _within(option, value, replica)
    return Machines(
        step_seconds=args.step_seconds,
        link=link(args.bandwidth),
        links={replica: link(megabits) for replica, megabits in links.items()},
        slower=slower,
        jitter=args.jitter,
        outages=tuple(outages),
        links_down=tuple(downs),
        failures_per_hour=args.failures_per_hour,
        preemptions_per_hour=args.preemptions_per_hour,
        restart_seconds=restart,
        startup_seconds=args.startup_seconds,
        peer_seconds=args.peer_latency / 1000,
        seed=args.time_seed,
    )


# (least, most, of what): wide enough for any machine there is, and narrow enough for sums to stay numbers.
_RANGES = {
    "step-seconds": (1e-6, 1e6, "seconds"),
    "bandwidth": (1e-3, 1e9, "Mbit/s"),
    "link": (1e-3, 1e9, "Mbit/s"),
    "slower": (1e-3, 1e3, "times as long"),
    "latency": (0.0, 1e6, "milliseconds"),
    "peer-latency": (0.0, 1e6, "milliseconds"),
    "jitter": (0.0, 3.0, "of a step's time: 0.1 is 10 %"),
    "failures-per-hour": (0.0, 3600.0, "an hour"),
    "preemptions-per-hour": (0.0, 3600.0, "an hour"),
    "restart-seconds": (1e-3, 1e7, "seconds"),
    "startup-seconds": (0.0, 1e7, "seconds"),
}
_MOST_SECONDS = 1e9  # of a moment, and of what isn't for good
_EVENTS = ("slower", "link", "jitter", "fail", "preempt", "link-down", "failures-per-hour", "preemptions-per-hour")


def _within(option: str, value: float, replica: int | None = None) -> None:
    least, most, what = _RANGES[option]
    if not least <= value <= most:
        given = f"{value:g}" if replica is None else f"{replica}={value:g}"
        raise ValueError(f"--{option} {given}: it must be from {least:g} to {most:g} {what}")


def _each(option: str, words: list[str], read: Callable[[str], _Read], example: str) -> list[_Read]:
    found: list[_Read] = []
    for word in words:
        try:
            found.append(read(word))
        except (ValueError, IndexError) as error:
            raise ValueError(f"--{option} {word}: write it like {example}") from error
    return found


def _pair(word: str) -> tuple[int, float]:
    replica, _, value = word.partition("=")
    return int(replica), float(value)


def _event(word: str) -> tuple[int, float, float | None]:
    """'2@10m+90' -> (2, 600.0, 90.0)."""
    replica, _, rest = word.partition("@")
    at, plus, seconds = rest.partition("+")
    return int(replica), _seconds(at), _seconds(seconds) if plus else None


def _seconds(text: str) -> float:
    """'90', '90s', '1.5h' or 'inf'."""
    value = float(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else float(text)
    if math.isnan(value) or _MOST_SECONDS < value < math.inf:
        raise ValueError(text)
    return value
