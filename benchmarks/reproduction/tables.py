"""Every table and figure of docs/results.md that the reproduction gives, from the kept runs alone.

Invariant: equal runs give equal text. Between `<!-- begin NAME -->` and `<!-- end NAME -->` of the page nothing is
written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from benchmarks.quickstart_seeds import table as quickstart_table
from benchmarks.reproduction.alarms import FLOORS, alarms, noise, statistics_of
from benchmarks.reproduction.measures import Run, Spread, last_loss, losses_between, rounds, sent, spread
from benchmarks.reproduction.run import jobs, read
from benchmarks.reproduction.study import GROUPS, ROOT
from composer_replication.autoloco.schedule import fixed_intervals

__all__ = ["PAGE", "blocks", "kept", "write_results"]

PAGE = ROOT / "docs" / "results.md"
QUICKSTART = ROOT / "docs" / "results" / "quickstart.json"
_PAPER = {"diloco-0.7": 2.8251, "intervals": 2.8310, "momentum": 2.8484, "autoloco": 2.8116}  # paper, table 7
_NONE = "(none of these runs is kept yet)"
Runs = Mapping[str, Mapping[int, Run]]  # variant -> seed -> run


def kept(group: str) -> dict[str, dict[int, Run]]:
    """The group's runs that are there."""
    found: dict[str, dict[int, Run]] = {}
    for job in jobs([group]):
        if (run := read(job)) is not None:
            found.setdefault(job.variant, {})[job.seed] = run
    return {variant: found[variant] for variant in GROUPS[group].variants if variant in found}


def blocks() -> dict[str, str]:
    """The page's blocks by name."""
    main = kept("main")
    return {
        "main": _comparison("main", main, "diloco", "diloco-0.7"),
        "eight": _comparison("eight", kept("eight"), "diloco", "diloco-0.7"),
        "prose": _comparison("prose", kept("prose"), "diloco", "diloco-0.7"),
        "ablation": _ablation(main),
        "assessments": _assessments({**_prefixed("", main), **_prefixed("8 replicas: ", kept("eight"))}),
        "alarms": _alarms(main),
        "spike": _disturbed("spike"),
        "shift": _disturbed("shift"),
        "codecs": _beside("codecs", _some(main, "autoloco", "diloco")),
        "sensitivity": _beside("sensitivity", _some(main, "autoloco")),
        "cost": _cost(),
        "quickstart": quickstart_table(json.loads(QUICKSTART.read_text(encoding="utf-8"))),
    }


def write_results(*, check: bool) -> int:
    """Put the blocks into the page and draw the figures; with `check` only say what would change."""
    old = PAGE.read_text(encoding="utf-8")
    new = old
    for name, text in blocks().items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if begin not in new:
            raise ValueError(f"{PAGE} has no place for {name!r}: it needs {begin} and {end}")
        new = re.sub(f"{begin}.*?{end}", lambda _, b=begin, t=text, e=end: f"{b}\n\n{t}\n\n{e}", new, flags=re.DOTALL)
    from benchmarks.reproduction.figures import draw_all, outdated

    if check:
        wrong = [] if new == old else ["the page's tables"]
        wrong += [f"docs/results/{name}" for name in outdated()]
        print(f"not of the kept runs: {', '.join(wrong)}" if wrong else "nothing would change")
        return int(bool(wrong))
    PAGE.write_text(new, encoding="utf-8")
    for path in draw_all():
        print(path.relative_to(ROOT))
    return 0


def _some(runs: Runs, *names: str) -> dict[str, Mapping[int, Run]]:
    return {name: runs[name] for name in names if name in runs}


def _prefixed(words: str, runs: Runs) -> dict[str, Mapping[int, Run]]:
    return {words + name: by_seed for name, by_seed in runs.items()}


def _title(group: str, variant: str) -> str:
    for one in (group, "main"):
        if variant in GROUPS[one].variants:
            return GROUPS[one].variants[variant].title
    raise KeyError(variant)


def _over(by_seed: Mapping[int, Run], measure: Callable[[Run], float]) -> Spread:
    return spread([measure(run) for run in by_seed.values()])


def _against(by_seed: Mapping[int, Run], other: Mapping[int, Run], measure: Callable[[Run], float]) -> str:
    """Seed by seed, so that what seeds have in common falls away."""
    both = sorted(set(by_seed) & set(other))
    if not both or by_seed is other:
        return "—"
    return spread([measure(by_seed[seed]) - measure(other[seed]) for seed in both]).text(sign=True)


def _validation(run: Run) -> float:
    return float(run["result"]["validation_loss"])


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return _NONE
    rows = [header, ["---", *("---:" for _ in header[1:])], *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _comparison(group: str, runs: Runs, *against: str) -> str:
    lines: list[list[str]] = []
    for variant, by_seed in runs.items():
        counts = [rounds(run) for run in by_seed.values()]
        run = next(iter(by_seed.values()))
        fixed = fixed_intervals(run["steps"], run["base_horizon"])
        ddp = run["policy"]["name"] == "ddp"
        saved = 1 - spread(counts).mean / fixed
        lines.append(
            [
                _title(group, variant),
                f"{counts[0]} (gradients)" if ddp else ", ".join(map(str, counts)),
                "—" if ddp else f"{saved:.1%}",
                "—" if ddp else f"{_over(by_seed, sent).mean / 1e6:.1f} MB",
                _over(by_seed, last_loss).text(),
                _over(by_seed, _validation).text(),
                *(_against(by_seed, runs.get(other, {}), _validation) for other in against),
            ]
        )
    header = ["", "rounds, by seed", "fewer than fixed (mean)", "sent by one", "training loss, last tenth"]
    return _table([*header, "validation loss", *(f"it, against {_title(group, other)}" for other in against)], lines)


def _beside(group: str, main: Runs) -> str:
    """The group's runs below those of the main group, of the same seeds, that they are to be compared with."""
    runs = kept(group)
    seeds = {seed for by_seed in runs.values() for seed in by_seed}
    same = {name: {seed: run for seed, run in by_seed.items() if seed in seeds} for name, by_seed in main.items()}
    return _comparison(group, {**same, **runs}, "autoloco") if runs else _NONE


def _ablation(runs: Runs) -> str:
    names = [name for name in (*_PAPER, "normalised") if name in runs]
    base = runs.get("diloco-0.7", {})
    lines = [
        [
            _title("main", name),
            str(round(_over(runs[name], rounds).median)),
            _over(runs[name], last_loss).text(),
            _against(runs[name], base, last_loss),
            f"{_PAPER[name]:.4f}" if name in _PAPER else "—",
            f"{_PAPER[name] - _PAPER['diloco-0.7']:+.4f}" if name in _PAPER else "—",
        ]
        for name in names
    ]
    header = ["", "rounds (median)", "training loss", "against DiLoCo 0.7", "the paper's", "its difference"]
    return _table(header, lines)


def _assessments(runs: Runs) -> str:
    classes = ("supporting", "consistent", "moderate", "severe")
    actions = ("adopt", "reject", "reduce", "fallback")
    lines: list[list[str]] = []
    for name, by_seed in runs.items():
        variant = name.rpartition(": ")[2]
        if variant not in ("autoloco", "intervals", "momentum", "normalised"):
            continue
        told = [one for run in by_seed.values() for one in run["rounds"]]
        per_run = [
            sum(one[kind] == value for one in told) / len(by_seed)
            for kind, value in (
                *(("assessment", value) for value in classes),
                *(("action", value) for value in actions),
            )
        ]
        longest = spread([max(one["horizon"] for one in run["rounds"]) for run in by_seed.values()]).median
        title = name.removesuffix(variant) + _title("main", variant)
        lines.append([title, *(f"{value:.1f}" for value in per_run), f"{longest:.0f}"])
    return _table(["a run has", *classes, *(f"→ {one}" for one in actions), "longest horizon"], lines)


def _alarms(main: Runs) -> str:
    runs = [run for name in ("diloco", "diloco-0.7") for run in main.get(name, {}).values()]
    if not runs:
        return _NONE
    sequences = [statistics_of(run) for run in runs]
    drift, shared = noise(sequences)
    lines = [[f"{floor:.2f}", *(f"{share:.1%}" for share in alarms(sequences, floor).values())] for floor in FLOORS]
    words = (
        f"One interval's noise, from {len(runs)} fixed-interval runs: {drift:.3f} in ln D − 2 ln Λ, {shared:.3f} in "
        "ln C (standard deviations)."
    )
    return words + "\n\n" + _table(["`scale_floor`", "supporting", "consistent", "moderate", "severe"], lines)


def _disturbed(group: str) -> str:
    runs = kept(group)
    if not runs:
        return _NONE
    from benchmarks.reproduction.disturbances import DISTURBANCES, DataShift, RateSpike

    kind = {"spike": RateSpike, "shift": DataShift}[group]
    assert group in DISTURBANCES
    first, last = kind.first, kind.last
    undisturbed = kept("main")
    lines = [
        [
            _title(group, variant),
            ", ".join(str(rounds(run)) for run in by_seed.values()),
            ", ".join(str(_shortest_after(run, first)) for run in by_seed.values()),
            _over(by_seed, lambda run: losses_between(run, first, last)).text(3),
            _over(by_seed, lambda run: losses_between(run, last, last + 400)).text(3),
            _over(by_seed, _validation).text(),
            _against(by_seed, undisturbed.get(variant, {}), _validation),
        ]
        for variant, by_seed in runs.items()
    ]
    header = [
        "",
        "rounds, by seed",
        "shortest interval afterwards",
        f"training loss, steps {first} to {last}",
        "the next 400 steps",
        "validation loss at the end",
        "against undisturbed",
    ]
    return _table(header, lines)


def _shortest_after(run: Run, first: int) -> int:
    """Steps; the last interval of a run is cut by its budget and doesn't count."""
    return min(one["steps"] for one in run["rounds"][:-1] if one["position"] > first)


def _cost() -> str:
    found = [(group, run) for group in GROUPS for by_seed in kept(group).values() for run in by_seed.values()]
    seconds = sum(run["result"]["seconds"] for _, run in found)
    torch = sorted({run["versions"]["torch"] for _, run in found})
    python = sorted({run["versions"]["python"] for _, run in found})
    return (
        f"{len(found)} runs, {seconds / 3600:.1f} hours altogether, two at a time on two busy cores; "
        f"torch {', '.join(torch)}, "
        f"Python {', '.join(python)} (whose standard library is the text)."
    )
