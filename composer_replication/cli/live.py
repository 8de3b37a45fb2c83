"""A fleet on the terminal: a live table, or plain lines where there is no terminal or too narrow a one.

Invariant: shows values and reads nothing but what it is given; the same for `launch` and `status`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from composer_replication.readable import amount

__all__ = ["COLUMNS", "FleetView", "Row", "Screen", "cells", "lines"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One replica. None: not known (yet)."""

    replica: int
    state: str
    round: int | None = None
    step: int | None = None
    horizon: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    wait_seconds: float | None = None
    note: str = ""
    alive: bool = False  # its heartbeat is as recent as it promised


@dataclass(frozen=True, kw_only=True)
class FleetView:
    title: str
    rows: Sequence[Row]
    round: int | None = None  # rounds that are closed
    steps: int | None = None  # of the whole run, for progress
    ended: bool = False


COLUMNS = ("replica", "round", "step", "horizon", "loss", "tokens/s", "wait", "state")
_USUAL = ("0", "1000", "1", "100", "1.000", "12.3k", "10.0 s", "completed")  # cells as wide as a run's soon get


def cells(row: Row, steps: int | None) -> tuple[str, ...]:
    def shown(value: Any, form: str = "{}") -> str:
        return "–" if value is None else form.format(value)

    step = shown(row.step) + (f"/{steps}" if steps and row.step is not None else "")
    speed = "–" if row.tokens_per_second is None else amount(row.tokens_per_second)
    state = row.state + (f" ({row.note})" if row.note else "")
    loss, wait = shown(row.loss, "{:.3f}"), shown(row.wait_seconds, "{:.1f} s")
    return (str(row.replica), shown(row.round), step, shown(row.horizon), loss, speed, wait, state)


def lines(view: FleetView) -> list[str]:
    """The table as plain text."""
    table = [COLUMNS, *(cells(row, view.steps) for row in view.rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS))]
    body = ["  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in table]
    return [view.title, *body]


def _least_width(view: FleetView) -> int:
    """Columns of a terminal in which the live table can be read; the state may wrap between words."""
    usual = (*_USUAL[:2], f"{view.steps}/{view.steps}" if view.steps else "10000", *_USUAL[3:])
    table = [COLUMNS, usual, *(cells(row, view.steps) for row in view.rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(COLUMNS) - 1)]
    words = [len(word) for line in table for word in line[-1].split()]
    return sum(widths) + max(words) + 3 * (len(COLUMNS) - 1)  # a line and two spaces between two columns


class Screen:
    """Shows views one after another: `with Screen(plain) as screen: screen.show(view)`."""

    def __init__(self, plain: bool) -> None:
        self._plain = plain or not sys.stdout.isatty()
        self._live: Any = None
        self._stack = ExitStack()
        self._last: tuple[Any, ...] = ()

    def __enter__(self) -> Screen:
        if not self._plain:
            try:
                from rich.console import Console
                from rich.live import Live
            except ImportError:
                self._plain = True
            else:
                self._live = Live(console=Console(), auto_refresh=False, transient=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._live = None

    def show(self, view: FleetView) -> None:
        if self._live is not None and self._live.console.width < _least_width(view):
            self._stack.close()  # for good: a table that comes and goes is worse than lines
            self._live = None
        if self._live is not None:
            if not self._live.is_started:
                self._stack.enter_context(self._live)
            self._live.update(_table(view), refresh=True)
            return
        # One line whenever a round is closed or a replica comes, goes or fails; waiting is part of training.
        ordinary = {"training", "waiting", "following"}
        key = (view.round, *("" if row.state in ordinary else row.state for row in view.rows))
        if key != self._last:
            self._last = key
            self.say(_line(view))

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)


def _line(view: FleetView) -> str:
    losses = [row.loss for row in view.rows if row.loss is not None]
    speeds = [row.tokens_per_second for row in view.rows if row.tokens_per_second is not None]
    steps = [row.step for row in view.rows if row.step is not None]
    horizons = [row.horizon for row in view.rows if row.horizon is not None]
    waits = [row.wait_seconds for row in view.rows if row.wait_seconds is not None]
    parts = [f"round {view.round}" if view.round is not None else "starting"]
    if steps:
        parts.append(f"step {max(steps)}" + (f"/{view.steps}" if view.steps else ""))
    if horizons:
        parts.append(f"horizon {max(horizons)}")
    if losses:
        parts.append(f"loss {sum(losses) / len(losses):.3f}")
    if speeds:
        parts.append(f"{amount(sum(speeds))} tokens/s")
    if waits:
        parts.append(f"wait up to {max(waits):.1f} s")
    states = [row.state for row in view.rows]
    counted = {state: states.count(state) for state in dict.fromkeys(states)}
    parts.append(", ".join(f"{count} {state}" for state, count in counted.items()))
    return "  ".join(parts)


def _table(view: FleetView) -> Any:
    from rich.table import Table

    colours = {
        "training": "green",
        "finished": "green",
        "completed": "green",
        "waiting": "yellow",
        "failed": "bold red",
    }
    table = Table(title=view.title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "state" else "right", no_wrap=name != "state")
    for row in view.rows:
        *numbers, state = cells(row, view.steps)
        table.add_row(*numbers, f"[{colours.get(row.state, 'default')}]{state.replace('[', chr(92) + '[')}[/]")
    return table
