"""Runs the tests of the registry and writes what came of them into docs/reliability.md.

    python -m tests.faults.report                # all of them (minutes)
    python -m tests.faults.report -k flipped -x  # a part, with what pytest knows

Invariant: each number on the page was measured by this command; of a test that ran several times the last one counts.
What came of each is kept in runs/reliability.jsonl, so that they can be run in parts; the page says how many ran.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch

from tests.faults.registry import FAULTS, Row, rows

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
RESULTS = Path(__file__).parents[2] / "runs" / "reliability.jsonl"
PLACES = ["tests/faults", "tests/collective"]  # where such tests are
BEGIN, END = "<!-- from here: written by `make reliability` -->\n", "<!-- until here -->\n"
STORES = {"files": "files", "s3": "S3", "memory": "memory", "gcs": "GCS", "azure": "Azure"}


@dataclass
class Result:
    outcome: str  # passed, failed or skipped
    day: str
    seconds: float
    reason: str = ""  # why it was skipped


class Recorder:
    """A pytest plugin that keeps what became of each test of the registry."""

    def __init__(self) -> None:
        self.row_of: dict[str, Row] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            mark = item.get_closest_marker("fault")
            if mark is not None:
                self.row_of[item.nodeid] = row_of(item, mark)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self.row_of or (report.passed and report.when != "call"):
            return
        reason = ""
        if report.skipped:
            reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        result = Result(report.outcome, time.strftime("%Y-%m-%d"), report.duration, reason.removeprefix("Skipped: "))
        with RESULTS.open("a") as file:  # at once, so that a run that is broken off has counted
            file.write(json.dumps({"test": report.nodeid, **asdict(result)}) + "\n")


def row_of(item: pytest.Item, mark: pytest.Mark) -> Row:
    fault, policy, store = mark.args
    params = getattr(getattr(item, "callspec", None), "params", {})
    row = Row(fault, policy or str(params["policy"]), store)
    if row not in rows():
        raise pytest.UsageError(f"{item.nodeid} counts as {row}, which isn't in the registry")
    return row


def cells(row: Row) -> list[str]:
    """What the registry says of a row."""
    fault = FAULTS[row.fault]
    return [fault.what, fault.where, row.policy, STORES[row.store]]


def table(row_of: dict[str, Row], results: dict[str, Result]) -> str:
    lines = ["| fault | where | policy | store | runs | losses |", "|---|---|---|---|---|---|"]
    for row in rows():
        tests = [node for node, its in row_of.items() if its == row]
        mine = [results[node] for node in tests if node in results]
        count = Counter(result.outcome for result in mine)
        runs = str(count["passed"] + count["failed"])
        if len(mine) < len(tests):
            runs += f" of {len(tests)}"
        for reason in sorted({result.reason for result in mine if result.outcome == "skipped"}):
            runs += f" (not here: {reason})"
        lines.append("| " + " | ".join([*cells(row), runs, str(count["failed"])]) + " |")
    return "\n".join(lines) + "\n"


def expectations() -> str:
    lines = ["| fault | what must come of it |", "|---|---|"]
    lines += [f"| {fault.what} | {fault.outcome} |" for fault in FAULTS.values()]
    return "\n".join(lines) + "\n"


def write(row_of: dict[str, Row], results: dict[str, Result]) -> None:
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    ran = [result for result in results.values() if result.outcome != "skipped"]
    losses = sum(result.outcome == "failed" for result in ran)
    days = sorted({result.day for result in ran})
    said = (
        f"**{len(ran):,} runs, {losses} losses**, measured on {' to '.join(dict.fromkeys((days[0], days[-1])))} in "
        f"{sum(result.seconds for result in results.values()) / 60:.0f} minutes with Python "
        f"{platform.python_version()} and PyTorch {torch.__version__.partition('+')[0]}.\n\n"
    )
    PAGE.write_text(f"{before}{BEGIN}\n{said}{table(row_of, results)}\n{expectations()}\n{END}{after}")


def measured() -> dict[str, Result]:
    """The last result of each test."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {line.pop("test"): Result(**line) for line in lines}


def main(arguments: list[str]) -> int:
    everything, recorder = Recorder(), Recorder()
    # Once to learn what there is: tests that run side by side are collected where they run.
    if code := pytest.main([*PLACES, "-m", "fault", "--collect-only", "-qq", "--no-summary"], plugins=[everything]):
        return int(code)
    recorder.row_of = everything.row_of
    RESULTS.parent.mkdir(exist_ok=True)
    if "-k" not in arguments:
        RESULTS.write_text("")
    RESULTS.touch()
    code = pytest.main([*PLACES, "-m", "fault", "-q", *arguments], plugins=[recorder])
    results = {node: result for node, result in measured().items() if node in everything.row_of}
    write(everything.row_of, results)
    print(f"{PAGE} is written")
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
