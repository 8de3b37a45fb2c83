"""`schedule`: the intervals that a policy would run over a learning-rate schedule, or over a recipe's."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence

from composer_replication.autoloco.config import AutoLoCoConfig
from composer_replication.autoloco.policies import make_policy
from composer_replication.autoloco.schedule import fixed_intervals, run_lengths, run_schedule, schedule_rates
from composer_replication.cli.schedule_options import DEFAULT_BANDWIDTH, DEFAULTS, OVERRIDES

__all__ = ["interval_lines", "plot", "schedule"]

# The options that aren't called like the setting behind them, for messages.
_OPTIONS = {"base_horizon": "--base", "min_horizon": "--min", "max_horizon": "--max", "horizon_step": "--step"}


def schedule(args: argparse.Namespace) -> int:
    _check_use(args)
    if args.recipe is not None:
        from composer_replication.cli.recipe_schedule import recipe_schedule  # loads torch

        return recipe_schedule(args)
    try:
        steps = _intervals(args)
    except ValueError as error:
        first, _, rest = str(error).partition(" ")
        raise ValueError(f"{_OPTIONS[first]} {rest}" if first in _OPTIONS else str(error)) from error
    if args.json:
        print(json.dumps({"rounds": len(steps), "horizons": list(steps)}))
        return 0
    fixed = fixed_intervals(args.steps, args.base)
    share = 100 * len(steps) / fixed
    print(f"{len(steps)} rounds for {args.steps} steps; a fixed interval of {args.base} takes {fixed} ({share:.0f} %)")
    for line in interval_lines(steps):
        print(line)
    sys.stdout.flush()
    return 0


def _check_use(args: argparse.Namespace) -> None:
    recipe_only = {"--bandwidth": args.bandwidth, "--parameters": args.parameters, "--step-seconds": args.step_seconds}
    if args.recipe is None:
        if args.steps is None or args.base is None:
            raise ValueError("give a recipe, or --steps and --base")
        given = [name for name, value in recipe_only.items() if value not in (None, DEFAULT_BANDWIDTH)]
        if given:
            raise ValueError(f"{given[0]} needs a recipe: how many replicas exchange what?")
        for name, value in DEFAULTS.items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        return
    given = {name: getattr(args, name) for name in OVERRIDES if getattr(args, name) is not None}
    if given:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        instead = " ".join(f"{OVERRIDES[name]}={value}" for name, value in given.items())
        raise ValueError(
            f"{options}: a recipe says that itself. To put something else over it: schedule {args.recipe} {instead}"
        )


def interval_lines(intervals: Sequence[int]) -> Iterator[str]:
    """How often which interval, and a plot."""
    lengths = run_lengths(intervals)
    shown = [f"{steps}×{times}" for steps, times in lengths]
    yield ", ".join(shown if len(shown) <= 40 else [*shown[:8], "...", *shown[-8:]])
    yield ""
    yield from plot(intervals)


def _intervals(args: argparse.Namespace) -> tuple[int, ...]:
    settings = {"min_horizon": args.min, "max_horizon": args.max, "horizon_step": args.step}
    if args.growth_cap is not None:
        settings["growth_cap"] = args.growth_cap
    config = AutoLoCoConfig(base_horizon=args.base, warmup_steps=args.warmup, **settings)
    options = {"alpha": args.alpha, "increment": args.increment}
    options = {name: value for name, value in options.items() if value is not None}
    if args.policy == "qsr" and args.alpha is None:
        options["peak_lr"] = args.peak_lr
    policy = make_policy(args.policy, config, **options)
    rates = schedule_rates(args.decay, args.steps, args.warmup, args.final_fraction, args.peak_lr)
    return run_schedule(policy, rates, args.steps).steps


def plot(intervals: Sequence[int], width: int = 64, height: int = 8) -> list[str]:
    """Interval length over steps, as lines of text."""
    total, top = sum(intervals), max(intervals)
    ends: list[int] = []
    for length in intervals:
        ends.append((ends[-1] if ends else 0) + length)
    columns: list[int] = []
    index = 0
    for column in range(width):
        middle = (column + 0.5) * total / width
        while ends[index] <= middle:
            index += 1
        columns.append(intervals[index])
    blocks = " ▁▂▃▄▅▆▇█"
    label = len(str(top))
    lines: list[str] = []
    for row in range(height, 0, -1):
        filled = [min(8, max(0, round((value / top * height - (row - 1)) * 8))) for value in columns]
        mark = str(top) if row == height else "0" if row == 1 else ""
        lines.append(f"{mark:>{label}} ┤{''.join(blocks[eighths] for eighths in filled)}")
    lines.append(f"{'':>{label}} └{'─' * width}")
    lines.append(f"{'':>{label}}  0{f'{total} steps':>{width - 1}}")
    return lines
