"""The table in docs/reliability.md is that of the registry, and says that nothing was lost."""

from __future__ import annotations

import re

from tests.faults.registry import FAULTS, rows
from tests.faults.report import BEGIN, END, PAGE, cells


def test_the_page_has_the_registry_s_rows_and_no_others() -> None:
    body = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    lines = [
        [cell.strip() for cell in line.strip("| \n").split(" | ")] for line in body.splitlines() if line[:2] == "| "
    ]
    measured = [line for line in lines if len(line) == 6 and line[0] != "fault"]
    assert [line[:4] for line in measured] == [cells(row) for row in rows()], "stale: run `make reliability`"
    for line in measured:
        assert re.match(r"\d+( of \d+)?( \(not here: .*\))?$", line[4]), line
        assert line[5] == "0", f"a loss: {line}"


def test_every_fault_says_what_must_come_of_it() -> None:
    assert all(fault.what and fault.where and fault.outcome and fault.columns() for fault in FAULTS.values())
    told = [(fault.what, fault.where) for fault in FAULTS.values()]
    assert len(set(told)) == len(told)
