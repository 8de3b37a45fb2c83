"""The three facts a reader looks for first: how much communication was saved, at what loss, where time was lost.

Invariant: every number is that of `measures.py`; here are only the words, and what is compared with what.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from composer_replication.readable import byte_count, duration
from composer_replication.report.apart import also_apart
from composer_replication.report.groups import Group, baseline_of, comparable
from composer_replication.report.measures import (
    bytes_of,
    diverged,
    end_loss,
    fixed_rounds,
    last_loss,
    since,
    times_of,
    validation,
)
from composer_replication.report.runs import Run

__all__ = ["facts_of", "percent", "spread"]

Fact = dict[str, Any]
_MOST_BARS = 5


def facts_of(group: Group, groups: Sequence[Group]) -> list[Fact]:
    """Three of {"question", "answer", "unit", "lines", "bars"}; answers are "–" where nothing is known."""
    base = baseline_of(groups, group)
    return [_communication(group, base), _loss(group, groups, base), _time(group)]


def spread(values: Sequence[float], form: str = "{:.4f}") -> str:
    """Mean, and ± the standard deviation over several."""
    text = form.format(fmean(values))
    return f"{text} ± {form.format(stdev(values))}" if len(values) > 1 else text


def percent(share: float) -> str:
    """0.173 -> '17 %'; one decimal below ten."""
    value = 100 * share
    return f"{value:.0f} %" if abs(value) >= 9.95 or abs(value) < 0.05 else f"{value:.1f} %"


def _saving(share: float, what: str) -> tuple[str, str]:
    if abs(share) < 0.0005:
        return "0 %", f"saved in {what}"
    return (percent(share), f"fewer {what}") if share > 0 else (percent(-share), f"more {what}")


def _range(values: Sequence[int], each: bool = True) -> str:
    distinct = sorted(set(values))
    if len(distinct) == 1:
        return str(distinct[0])
    if each and len(values) <= 5:
        return f"{', '.join(map(str, values[:-1]))} and {values[-1]}"
    return f"{distinct[0]} to {distinct[-1]}"


# -- communication ---------------------------------------------------------------------------------------------------


_NOT_COMPARED = "What a fixed interval would have taken isn't known: its base horizon isn't, or rounds are missing."


def _communication(group: Group, base: Group | None) -> Fact:
    fact: Fact = {"question": "How much communication was saved?", "answer": "–", "unit": "", "lines": [], "bars": []}
    runs = [run for run in group.runs if run.rounds]
    horizon = (base or group).first.base_horizon
    fixed = [fixed_rounds(run, horizon) for run in runs]
    if not runs or horizon is None or None in fixed:
        fact["lines"] = ["No round is closed yet." if not runs else _NOT_COMPARED]
        if runs:
            fact["answer"], fact["unit"] = _range([run.exchanges for run in runs]), "rounds"
        return fact
    taken, wanted = [run.exchanges for run in runs], [one for one in fixed if one is not None]
    saved = 1 - sum(taken) / sum(wanted)
    fact["answer"], fact["unit"] = _saving(saved, "rounds")
    fact["lines"].append(f"{_range(taken)} rounds; a fixed interval of {horizon} steps takes {_range(wanted, False)}.")
    fact["bars"] = [
        {"label": "this run" if len(runs) == 1 else "these runs", "value": fmean(taken), "colour": group.colour},
        {"label": f"every {horizon} steps", "value": fmean(wanted), "colour": None},
    ]
    for bar in fact["bars"]:
        bar["text"] = f"{bar['value']:,.0f} rounds"
    spent = [bytes_of(run) for run in runs]
    known = [one for one in spent if one is not None]
    if len(known) < len(runs):
        fact["lines"].append("Bytes were not recorded.")
        return fact
    sent = fmean(one.sent for one in known)
    how = "" if all(one.measured for one in known) else ", worked out from the model's size"
    if how and group.first.policy == "ddp":
        how += f" as one {group.first.codec} gradient of each replica in each step"
    per_run = " a run" if len(runs) > 1 else ""
    at_fixed = fmean(one.sent / t * w for one, t, w in zip(known, taken, wanted, strict=True))
    fact["lines"].append(
        f"{byte_count(sent)} sent{per_run} by all replicas together{how}, "
        f"instead of {byte_count(at_fixed)} at the fixed interval."
    )
    plain = [one.as_float32 for one in known]
    if group.first.codec not in ("", "float32") and None not in plain:
        pairs = zip(plain, taken, wanted, strict=True)
        whole = fmean(one / t * w for one, t, w in pairs if one is not None)
        fact["lines"].append(
            f"With the {group.first.codec} codec too: {percent(1 - sent / whole)} fewer bytes than float32 at the "
            f"fixed interval ({byte_count(whole)})."
        )
    return fact


# -- loss ------------------------------------------------------------------------------------------------------------


def _loss(group: Group, groups: Sequence[Group], base: Group | None) -> Fact:
    fact: Fact = {"question": "At what loss?", "answer": "–", "unit": "", "lines": [], "bars": []}
    trained = [loss for run in group.runs if (loss := last_loss(run)) is not None]
    validated = [loss for run in group.runs if (loss := validation(run)) is not None]
    if not trained and not validated:
        lost = any(diverged(run) is not None for run in group.runs)
        fact["lines"] = ["No loss is finite." if lost else "No loss was recorded."]
        return fact
    fact["answer"] = f"{fmean(validated or trained):.4f}"
    lost = [one for run in group.runs if (one := diverged(run)) is not None]
    what = "last finite training loss" if lost else "training loss, last round"
    fact["unit"] = "validation loss" if validated else what
    if len(validated or trained) > 1:
        fact["unit"] += f", ± {stdev(validated or trained):.4f} over {len(validated or trained)} runs"
    if lost:
        who = "" if len(group.runs) == 1 else f" of {len(lost)} of {len(group.runs)} runs"
        fact["lines"].append(f"Losses{who} are not finite from {since(min(lost, key=lambda one: one.position))} on.")
    elif validated and trained:
        began = f", of the first {first}" if (first := _first(group)) else ""
        fact["lines"].append(f"Training loss of the last round {spread(trained)}{began}.")
    if not validated and not lost:
        fact["lines"].append(f"Training loss of the first round {first}." if (first := _first(group)) else "")
        done = any(run.ended for run in group.runs)
        fact["lines"].append("No validation loss was recorded." if done else "Validation comes at the end.")
    others = [base] if base else comparable(groups, group)[:1]
    for other in others:
        line = _difference(group, other, validation, "validation loss") or _difference(
            group, other, end_loss, "training loss of the last round"
        )
        if line:
            fact["lines"] += [line, also_apart(group, other)]
    fact["bars"], left_out = _loss_bars(group, comparable(groups, group))
    fact["lines"] = [line for line in (*fact["lines"], left_out) if line]
    return fact


def _first(group: Group) -> str:
    """Of the first round, '5.2369'; "" if it isn't known."""
    known = [run.rounds[0].loss for run in group.runs if run.rounds and run.rounds[0].loss is not None]
    return f"{fmean(loss for loss in known if loss is not None):.4f}" if known else ""


def _difference(group: Group, other: Group, measure: Any, what: str) -> str:
    """With a minus sign where `group` is lower; seed by seed where both have the same."""
    mine, theirs = ([loss for run in one.runs if (loss := measure(run)) is not None] for one in (group, other))
    if not mine or not theirs:
        return ""
    here, there = group.by_seed, other.by_seed
    pairs = [(measure(run), measure(there[seed])) for seed, run in here.items() if seed in there]
    apart = [one - two for one, two in pairs if one is not None and two is not None]
    if len(apart) > 1:
        low = sum(one < 0 for one in apart)
        sign = f"{'lower' if fmean(apart) < 0 else 'higher'} than {other.label}"
        count = low if fmean(apart) < 0 else len(apart) - low
        return (
            f"{what[0].upper()}{what[1:]} {abs(fmean(apart)):.4f} ± {stdev(apart):.4f} {sign}, "
            f"in {count} of {len(apart)} seeds."
        )
    whole = fmean(mine) - fmean(theirs)
    word = "lower" if whole < 0 else "higher"
    return f"{what[0].upper()}{what[1:]} {abs(whole):.4f} {word} than {other.label} ({fmean(theirs):.4f})."


def _loss_bars(group: Group, others: Sequence[Group]) -> tuple[list[dict[str, Any]], str]:
    """(the group itself and the lowest of the others, what is left out)."""
    found: list[dict[str, Any]] = []
    for measure in (validation, end_loss):
        found = [
            {"label": one.label, "values": losses, "colour": one.colour}
            for one in (group, *others)
            if (losses := [loss for run in one.runs if (loss := measure(run)) is not None])
        ]
        if len(found) > 1:
            break
    if len(found) < 2:
        return [], ""
    lowest = sorted(found, key=lambda one: fmean(one["values"]))
    shown = [one for one in lowest if one["label"] == group.label]
    shown += [one for one in lowest if one["label"] != group.label][: _MOST_BARS - len(shown)]
    bars = [
        {"label": one["label"], "text": spread(one["values"]), "colour": one["colour"], "value": None}
        for one in lowest
        if one in shown
    ]
    left = len(found) - len(bars)
    return bars, f"Listed: this one and the lowest others; {left} more in the table below." if left else ""


# -- time ------------------------------------------------------------------------------------------------------------


def _time(group: Group) -> Fact:
    fact: Fact = {"question": "Where was time lost?", "answer": "–", "unit": "", "lines": [], "bars": []}
    known = [(run, times) for run in group.runs if (times := times_of(run)) is not None]
    if not known:
        seconds = [value for run in group.runs if isinstance(value := run.result.get("seconds"), (int, float))]
        fact["lines"] = ["How long replicas trained and waited was not recorded."]
        if seconds:
            simulated = all(run.simulated for run in group.runs)
            what = "Simulating it took" if simulated else "From the launch to the last replica's end it took"
            fact["lines"].append(f"{what} {duration(fmean(seconds))}{' on average' if len(seconds) > 1 else ''}.")
        return fact
    whole = sum(times.whole for _, times in known)
    shares = {
        "training": sum(times.train for _, times in known) / whole,
        "waiting": sum(times.wait for _, times in known) / whole,
        "exchange": sum(times.exchange for _, times in known) / whole,
    }
    lost = shares["waiting"] + shares["exchange"]
    fact["answer"], fact["unit"] = percent(lost), "of the replicas' time not spent training"
    fact["shares"] = [{"label": name, "value": share, "text": percent(share)} for name, share in shares.items()]
    fact["lines"].append(_utilisation(known))
    fact["lines"].append(_who(known))
    fact["lines"] = [line for line in fact["lines"] if line]
    return fact


def _utilisation(known: Sequence[tuple[Run, Any]]) -> str:
    each: dict[int, list[float]] = {}
    for _, times in known:
        for replica in times.by_replica:
            share = times.utilisation(replica)
            if share is not None:
                each.setdefault(replica, []).append(share)
    means = {replica: fmean(shares) for replica, shares in each.items()}
    if not means:
        return ""
    if len(means) <= 6:
        words = ", ".join(f"{replica}: {percent(share)}" for replica, share in sorted(means.items()))
        return f"Time spent training, by replica: {words}."
    low = min(means, key=lambda replica: means[replica])
    least, most = percent(min(means.values())), percent(max(means.values()))
    return f"A replica trains {least} (replica {low}) to {most} of its time."


def _who(known: Sequence[tuple[Run, Any]]) -> str:
    sums: dict[int, tuple[int, float]] = {}
    for _, times in known:
        for replica, (rounds, seconds) in times.waited_for.items():
            before = sums.get(replica, (0, 0.0))
            sums[replica] = (before[0] + rounds, before[1] + seconds)
    if not sums and not all(times.measured for _, times in known):
        return "Worked out for machines that were described to it, not measured."
    if not sums:
        return "Nobody had to be waited for."
    who, (rounds, seconds) = max(sums.items(), key=lambda item: item[1][1])
    all_rounds = sum(run.exchanges for run, _ in known)
    return f"Most waited for: replica {who}, the last in {rounds} of {all_rounds} rounds ({duration(seconds)} in all)."
