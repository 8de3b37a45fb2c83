"""The end of a launch: what came out, in words, in summary.json, and as a picture.

Invariant: a fleet whose replicas ended with different weights is never called a success.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer_replication.autoloco.schedule import fixed_intervals, run_schedule
from composer_replication.cli.view import ClosedRound
from composer_replication.diloco.serverless.handle import ReplicaResult
from composer_replication.readable import amount, byte_count, duration
from composer_replication.recipe import Recipe, policy_of
from composer_replication.recipe.settings import controller_config

__all__ = ["draw", "summarise"]

PICTURE = "training.png"
SUMMARY = "summary.json"


def summarise(
    recipe: Recipe, folder: Path, rounds: Sequence[ClosedRound], results: Sequence[ReplicaResult], *, seconds: float
) -> bool:
    """Print the summary and write it and the picture into `folder`; False unless all is well."""
    completed = [result for result in results if result.status == "completed"]
    values = _values(recipe, rounds, results, seconds)
    picture = draw(recipe, rounds, folder / PICTURE) if rounds else None
    if picture is not None:
        values["picture"] = str(picture)
    (folder / SUMMARY).write_text(json.dumps(values, indent=1), encoding="utf-8")
    print()
    states = ", ".join(
        f"{len([r for r in results if r.status == s])} {s}" for s in dict.fromkeys(r.status for r in results)
    )
    print(f"replicas       {states}")
    print(f"took           {duration(seconds)}, from the launch to the last replica's end")
    if rounds:
        _print_training(recipe, values)
    digests = values["digests"]
    if len(digests) == 1 and completed:
        print(f"final weights  the same on all replicas (digest {digests[0][:12]})")
    elif len(digests) > 1:
        print(f"final weights  DIFFER between replicas ({', '.join(d[:12] for d in digests)}): please report this")
    if picture is not None:
        print(f"picture        {picture}")
    elif rounds:
        print("picture        none: it needs matplotlib (pip install 'composer-replication[report]')")
    return len(completed) == len(results) and len(digests) <= 1


def _values(
    recipe: Recipe, rounds: Sequence[ClosedRound], results: Sequence[ReplicaResult], seconds: float
) -> dict[str, Any]:
    def total(name: str) -> float:
        return sum(result.metrics.get(name) or 0 for result in results)

    validation = [r.metrics["validation_loss"] for r in results if "validation_loss" in r.metrics]
    tokens = [closed.tokens for closed in rounds]
    return {
        "name": recipe.name,
        "policy": recipe.autoloco.policy,
        "codec": recipe.codec,
        "replicas": {str(r.replica_id): {"status": r.status, **r.metrics} for r in results},
        "rounds": len(rounds),
        "fixed_rounds": fixed_intervals(recipe.training.steps, recipe.autoloco.base_horizon),
        "steps": rounds[-1].position if rounds else 0,
        "tokens": sum(t for t in tokens if t is not None) if None not in tokens else None,
        "loss_first": rounds[0].loss if rounds else None,
        "loss_last": rounds[-1].loss if rounds else None,
        "validation_loss": validation[0] if validation else None,
        "bytes_sent": total("bytes_sent"),
        "bytes_received": total("bytes_received"),
        "wait_seconds_mean": total("wait_seconds") / len(results) if results else 0.0,
        "seconds": seconds,
        "digests": sorted({r.metrics["digest"] for r in results if r.metrics.get("digest")}),
        "horizons": [closed.steps for closed in rounds],
    }


def _print_training(recipe: Recipe, values: dict[str, Any]) -> None:
    tokens = f", {amount(values['tokens'])} tokens" if values["tokens"] else ""
    print(f"steps          {values['steps']} on each replica{tokens}")
    if values["loss_last"] is not None:
        text = f"{values['loss_first']:.3f} in the first round, {values['loss_last']:.3f} in the last"
        if values["validation_loss"] is not None:
            text += f", {values['validation_loss']:.3f} on validation data"
        print(f"loss           {text}")
    shown = f"{values['rounds']} rounds"
    if recipe.autoloco.policy != "fixed":
        share = 100 * values["rounds"] / values["fixed_rounds"]
        base = recipe.autoloco.base_horizon
        shown += f"; a fixed interval of {base} takes {values['fixed_rounds']} (this is {share:.0f} % of them)"
    print(f"synchronised   {shown}")
    first = _adapts_after(recipe)
    usual = all(steps == recipe.autoloco.base_horizon for steps in values["horizons"][:-1])  # the last may be cut
    if first is not None and values["steps"] <= first and usual:
        print(f"               (the interval starts to adapt after step {first}; this run was too short to show it)")
    sent, received = byte_count(values["bytes_sent"]), byte_count(values["bytes_received"])
    print(
        f"exchanged      {sent} sent, {received} received by all replicas together, as {recipe.codec} "
        "(each reads the others' parts)"
    )
    print(f"waited         {duration(values['wait_seconds_mean'])} of that for other replicas, on average")


def _adapts_after(recipe: Recipe) -> int | None:
    """The step before which the controller keeps the base horizon, whatever it measures: asked of the policy itself.

    None if the policy doesn't go by what it measures, or can't change the interval.
    """
    if recipe.autoloco.policy not in ("autoloco", "staircase"):
        return None
    config = controller_config(recipe)
    steps = config.warmup_steps + 20 * config.base_horizon  # warm-up, and more than calibration and decision take
    ends = 0
    for plan in run_schedule(policy_of(recipe), lambda _: 1.0, steps).plans:
        if plan.horizon != config.base_horizon:
            return ends
        ends += plan.steps
    return None


def draw(recipe: Recipe, rounds: Sequence[ClosedRound], path: Path) -> Path | None:
    """Loss and interval over steps, as a PNG; None if matplotlib isn't there."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(8.0, 6.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    ends = [closed.position for closed in rounds]
    replicas = sorted({replica for closed in rounds for replica in closed.metrics})
    for replica in replicas:
        points = [(c.position, c.metrics[replica]["loss"]) for c in rounds if "loss" in c.metrics.get(replica, {})]
        if points:
            above.plot(*zip(*points, strict=True), linewidth=0.8, alpha=0.6, label=f"replica {replica}")
    means = [(c.position, c.loss) for c in rounds if c.loss is not None]
    if means:
        above.plot(*zip(*means, strict=True), color="black", linewidth=1.5, label="mean")
        if len(replicas) <= 8:
            above.legend(fontsize="small")
    above.set_ylabel("training loss of the interval")
    above.set_title(f"{recipe.name}: {len(rounds)} rounds, policy {recipe.autoloco.policy}")
    below.stairs([closed.steps for closed in rounds], [0, *ends], baseline=None, color="tab:blue")
    below.axhline(recipe.autoloco.base_horizon, color="gray", linestyle="--", linewidth=0.8)
    below.text(0, recipe.autoloco.base_horizon, "base horizon", va="bottom", fontsize="small", color="gray")
    below.set_ylim(bottom=0)
    below.set_ylabel("interval (steps)")
    below.set_xlabel("inner steps")
    for axes in (above, below):
        axes.grid(alpha=0.25)
    figure.savefig(path)
    return path
