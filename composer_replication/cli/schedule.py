"""`schedule`: the intervals that a policy would run over a learning-rate schedule."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from composer_replication.autoloco.config import AutoLoCoConfig
from composer_replication.autoloco.policies import make_policy
from composer_replication.autoloco.schedule import run_lengths, run_schedule, schedule_rates

__all__ = ["plot", "schedule"]

# The options that aren't called like the setting behind them, for messages.
_OPTIONS = {"base_horizon": "--base", "min_horizon": "--min", "max_horizon": "--max", "horizon_step": "--step"}


def schedule(args: argparse.Namespace) -> int:
    try:
        steps = _intervals(args)
    except ValueError as error:
        first, _, rest = str(error).partition(" ")
        raise ValueError(f"{_OPTIONS[first]} {rest}" if first in _OPTIONS else str(error)) from error
    if args.json:
        print(json.dumps({"rounds": len(steps), "horizons": list(steps)}))
        return 0
    fixed = -(-args.steps // args.base)
    share = 100 * len(steps) / fixed
    print(f"{len(steps)} rounds for {args.steps} steps; a fixed interval of {args.base} takes {fixed} ({share:.0f} %)")
    lengths = run_lengths(steps)
    if len(lengths) <= 40:
        print(", ".join(f"{steps}×{times}" for steps, times in lengths))
    else:
        shown = [f"{steps}×{times}" for steps, times in (*lengths[:8], *lengths[-8:])]
        print(", ".join([*shown[:8], "...", *shown[8:]]))
    print()
    for line in plot(steps):
        print(line)
    sys.stdout.flush()
    return 0


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
