"""One page about one or several runs: what was saved, at what loss, where time went, and what was decided when.

`rounds.py`, `runs.py`, `files.py` read; `groups.py`, `measures.py`, `series.py` reckon; `facts.py`, `compare.py`,
`detail.py`, `tables.py` say and draw; `page.py` puts it on a page, `live.py` serves that while a fleet trains.
"""

from __future__ import annotations

from composer_replication.report.files import read_file
from composer_replication.report.page import MissingPlotly, page, payload
from composer_replication.report.runs import Run, run_from_json, run_to_json

__all__ = ["MissingPlotly", "Run", "page", "payload", "read_file", "run_from_json", "run_to_json"]
