"""`report`: its options and help. What it does is in `report.py`.

Invariant: nothing here loads torch or plotly; that happens when the command runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

__all__ = ["add_report"]

_HELP = """\
examples:
  composer-replication report runs/quickstart
  composer-replication report s3://bucket/runs/one -o one.html
  composer-replication report runs/autoloco.jsonl runs/fixed.jsonl -o comparison.html
  composer-replication report runs/quickstart --rounds rounds.jsonl
  composer-replication report runs/quickstart --json | jq '.rounds[].horizon'

Writes one page of HTML that needs nothing else, no network either: how much communication was saved, at what loss,
where time was lost; and charts of loss, intervals and decisions, drift and coherence, bytes, and every replica's time.
docs/report.md says how to read it.

Each SOURCE is a run's store, the folder of a run on this machine, a rounds.jsonl, or a file of simulate -o (several
runs each; .gz as well). Runs that differ in nothing but their seed are shown together, with their spread. What can't
be read is named at the top of the page, and the rest is shown. A run that still trains is shown as far as it has come;
'status URI --watch --web' shows it live.

exit code: 0 written, 1 nothing could be read, 2 wrong arguments.
"""


def add_report(command: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    parser = command("report", "make a page about one or several runs", _HELP)
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="a store, a run's folder, or a file of JSON lines")
    add("-o", "--output", type=Path, metavar="FILE", help="the page (default report.html)")
    add("--rounds", type=Path, metavar="FILE", help="write every round as well, a line of JSON each")
    add("--json", action="store_true", help="print the runs, a line of JSON each; a page only with -o")
    add("--control", metavar="URI", help="the run's second store, if it has one (docs/stores.md)")
    add("--signing-key-file", metavar="FILE", help="the run's key, if it is signed (docs/security.md)")
