"""What the simulator's times are worth: against rounds on throttled links, and against small fleets of real processes.

    python benchmarks/simulated_against_real.py measure [--only killed-strict]
    python benchmarks/simulated_against_real.py tables

`measure` runs fleets of four processes on this machine that exchange through a folder, and whose steps are sleeps of a
known length: one is slow, or killed with signal 9 and started again. What they took goes to docs/results/fleets.json.
`tables` computes what the simulator says for the settings in docs/results/{fleets,throttled}.json, and prints the
tables of docs/performance.md. docs/results/throttled.json is what `throttled_round.py -o` wrote, a list.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from composer_replication.collective.object_store.costs import Link
from composer_replication.simulation.lockstep import lockstep
from composer_replication.simulation.machines import Machines, Outage
from composer_replication.simulation.timing import Rules, Timeline, timeline

RESULTS = Path(__file__).parents[1] / "docs" / "results"
STEP, INTERVAL, ROUNDS, REPLICAS, ELEMENTS = 0.2, 50, 8, 4, 160_000
HEARTBEAT, FLOOR = 1.0, 1.0
SCENARIOS: dict[str, dict[str, Any]] = {
    "even": {"policy": "strict"},
    "slow": {"policy": "strict", "slower": {"3": 1.5}},
    "killed-strict": {"policy": "strict", "kill": {"replica": 1, "after": 46.0, "pause": 4.0}},
    "killed-skip": {"policy": "skip", "kill": {"replica": 1, "after": 46.0, "pause": 4.0}},
    "slow-killed-skip": {
        "policy": "skip", "slower": {"3": 1.5}, "kill": {"replica": 1, "after": 50.0, "pause": 8.0}
    },
}  # fmt: skip


# -- measuring


def measure(scenario: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = {replica: _start(folder, replica, scenario) for replica in range(REPLICAS)}
        try:
            began = _first_begins(folder)
            kill = scenario.get("kill")
            killed_at = 0.0
            if kill is not None:
                time.sleep(max(began + kill["after"] - time.monotonic(), 0.0))
                processes[kill["replica"]].send_signal(signal.SIGKILL)
                killed_at = time.monotonic()
                processes[kill["replica"]].wait(timeout=30)
                time.sleep(kill["pause"])
                processes[kill["replica"]] = _start(folder, kill["replica"], scenario)
            codes = [process.wait(timeout=600) for process in processes.values()]
        finally:
            for process in processes.values():
                process.kill()
        if any(codes):
            raise SystemExit(f"processes ended with {codes}")
        events = {replica: _events(folder, replica) for replica in range(REPLICAS)}
    if len({each[-1]["digest"] for each in events.values()}) != 1:
        raise SystemExit("the replicas ended with different weights")
    measured = _measured(events, began)
    if kill is not None:
        back = next(e["at"] for e in events[kill["replica"]] if e["event"] == "begins" and e["at"] > killed_at)
        measured["outage"] = {
            "replica": kill["replica"],
            "at": round(killed_at - began, 3),
            "seconds": round(back - killed_at, 3),
        }
    return measured


def _start(folder: Path, replica: int, scenario: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    step = STEP * scenario.get("slower", {}).get(str(replica), 1.0)
    words = [
        *(sys.executable, str(Path(__file__).parent / "fleet_peer.py")),
        *("--folder", str(folder), "--replica", str(replica), "--replicas", str(REPLICAS)),
        *("--step-seconds", str(step), "--interval", str(INTERVAL), "--steps", str(INTERVAL * ROUNDS)),
        *("--elements", str(ELEMENTS), "--failure-policy", scenario["policy"]),
        *("--heartbeat-seconds", str(HEARTBEAT), "--deadline-floor-seconds", str(FLOOR)),
    ]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(words, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path})


def _events(folder: Path, replica: int) -> list[dict[str, Any]]:
    path = folder / f"replica-{replica}.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def _first_begins(folder: Path) -> float:
    while True:
        found = [events[0]["at"] for replica in range(REPLICAS) if (events := _events(folder, replica))]
        if len(found) == REPLICAS:
            return max(found)
        time.sleep(0.05)


def _measured(events: Mapping[int, list[dict[str, Any]]], began: float) -> dict[str, Any]:
    rounds = {replica: [e for e in each if e["event"] == "round"] for replica, each in events.items()}
    end = max(each[-1]["at"] for each in events.values())
    stood = [
        sum(e["at"] - e["trained"] for e in rounds[replica] if e["included"]) + end - events[replica][-1]["at"]
        for replica in range(REPLICAS)
    ]
    members = [e["members"] for e in rounds[0]]  # replica 0 is never killed
    return {
        "seconds": round(end - began, 3),
        "still_seconds": [round(one, 3) for one in stood],
        "rounds_absent": [sum(replica not in those for those in members) for replica in range(REPLICAS)],
    }


# -- comparing


def predicted_fleet(name: str, measured: Mapping[str, Any]) -> Timeline:
    """What the simulator says; of what was measured it takes only when a process was killed, and for how long it was
    gone until it trained again."""
    scenario = SCENARIOS[name]
    outage = measured.get("outage")
    machines = Machines(
        step_seconds=STEP,
        link=Link(up=1e9, down=1e9, request_seconds=0.002),  # a folder: about what a file takes
        slower={int(replica): factor for replica, factor in scenario.get("slower", {}).items()},
        outages=(Outage(**outage),) if outage else (),
    )
    rules = Rules(failure_policy=scenario["policy"], heartbeat_seconds=HEARTBEAT, deadline_floor_seconds=FLOOR)
    return timeline([INTERVAL] * ROUNDS, machines, replicas=REPLICAS, elements=ELEMENTS, codec="int8", rules=rules)


def fleets_table(results: Mapping[str, Any]) -> list[str]:
    lines = [
        "| fleet of four | seconds | simulated | simulated / measured | stood still, measured | simulated | absences |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, measured in results["fleets"].items():
        run = predicted_fleet(name, measured)
        stood = [parts.wait + parts.exchange for parts in run.totals]
        absent = [run.absences(replica) for replica in range(REPLICAS)]
        same = "as simulated" if absent == measured["rounds_absent"] else f"{measured['rounds_absent']}, not {absent}"
        lines.append(
            f"| {name} | {measured['seconds']:.1f} | {run.seconds:.1f} | **{run.seconds / measured['seconds']:.2f}** | "
            f"{_list(measured['still_seconds'])} | {_list(stood)} | {sum(absent)}, {same} |"
        )
    return lines


def predicted_round(one: Mapping[str, Any]) -> float:
    """Seconds of one such round; of gloo, of one all-reduce. The link is what a plain TCP stream got of it."""
    rate = one["megabits"] * 1e6 / 8 * one["goodput"]
    link = Link(up=rate, down=rate, request_seconds=0.01)
    machines = Machines(step_seconds=1e-9, link=link, peer_seconds=0.001)
    size = {"replicas": one["replicas"], "elements": one["elements"]}
    if one["scheme"] == "gloo":
        return lockstep(1, machines, bytes_per_element=2, **size).all_reduce_seconds
    run = timeline([1], machines, codec=one["codec"], chunk_elements=one["chunk_elements"], **size)
    return run.seconds


def throttled_table(results: Mapping[str, Any]) -> list[str]:
    lines = [
        "| replicas | Mbit/s | what | seconds | simulated | simulated / measured | processors busy |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in results["rounds"]:
        size = 2e-6 * one["elements"]
        what = f"all-reduce by gloo, {size:.0f} MB" if one["scheme"] == "gloo" else f"round, {one['codec']}"
        if one["scheme"] != "gloo":
            what += f", {size / (2 if one['codec'] == 'int8' else 1):.0f} MB"
        seconds, guess = min(one["seconds"]), predicted_round(one)
        busy = sum(one["cpu_seconds"].values()) / (results["cores"] * seconds)
        lines.append(
            f"| {one['replicas']} | {one['megabits']:g} | {what} | {seconds:.1f} | {guess:.1f} | "
            f"**{guess / seconds:.2f}** | {busy:.0%} |"
        )
    return lines


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "tables"))
    parser.add_argument("--only", choices=SCENARIOS, help="measure this one")
    options = parser.parse_args()
    if options.what == "measure":
        path = RESULTS / "fleets.json"
        kept = _read("fleets.json") if path.exists() else {"load": {}, "fleets": {}}
        for name in [options.only] if options.only else list(SCENARIOS):
            kept["fleets"][name] = measure(SCENARIOS[name])
            kept["load"][name] = round(os.getloadavg()[0], 1)
            print(name, kept["fleets"][name], flush=True)
            path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        return
    for line in (*throttled_table(_read("throttled.json")), "", *fleets_table(_read("fleets.json"))):
        print(line)


if __name__ == "__main__":
    main()
