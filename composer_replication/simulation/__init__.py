"""A fleet of a recipe in one process, with the very loop, controller and codecs of a real one.

`fleet.py` trains it; `timing.py` says how long it would have taken on given machines and links.
"""

from __future__ import annotations

from composer_replication.simulation.fleet import SimulatedRun, simulate
from composer_replication.simulation.timing import Machines, RoundTime, timeline

__all__ = ["Machines", "RoundTime", "SimulatedRun", "simulate", "timeline"]
