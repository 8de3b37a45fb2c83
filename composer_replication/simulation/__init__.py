"""A fleet of a recipe in one process, with the very loop, controller and codecs of a real one.

`fleet.py` trains it, `data_parallel.py` the same without replicas; `timing.py` says how long it would have taken on
given machines and links, `lockstep.py` how long if they averaged their gradients in every step.
"""

from __future__ import annotations

from composer_replication.simulation.data_parallel import DataParallelRun, simulate_data_parallel
from composer_replication.simulation.fleet import Disturbance, SimulatedRun, simulate
from composer_replication.simulation.lockstep import Lockstep, lockstep
from composer_replication.simulation.machines import LinkDown, Machines, Outage
from composer_replication.simulation.record import record_of_simulation
from composer_replication.simulation.timing import RoundTime, Rules, Timeline, timeline

__all__ = [
    "DataParallelRun",
    "Disturbance",
    "LinkDown",
    "Lockstep",
    "Machines",
    "Outage",
    "RoundTime",
    "Rules",
    "SimulatedRun",
    "Timeline",
    "lockstep",
    "record_of_simulation",
    "simulate",
    "simulate_data_parallel",
    "timeline",
]
