"""A round's time on throttled links, against what the links allow and against other schemes, in one run.

    python benchmarks/throttled_round.py [--replicas 4] [--megabytes 128] [--megabits 100] [--schemes store,leader]

The floor is 2 (N-1)/N of the payload, each way, divided by the link's rate. Each replica is a process behind its own
link (see throttled_links.py); the server isn't throttled. A scheme's time is from the moment at which all begin to the
last replica's end; of several rounds, all are shown. `store-int8` is this project's round with the int8 codec, for the
same number of values. `-o` adds a line of JSON for each scheme to a file. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from throttled_links import BUCKET, KEYS, Links, cpu_seconds, goodput, links, s3_server

HERE = Path(__file__).parent


def play(
    lines: Links, scheme: str, codec: str, endpoint: str, options: argparse.Namespace, seconds: float
) -> list[list[dict[str, Any]]]:
    """All replicas' results, by round."""
    count = len(lines.names)
    environment = {
        **os.environ,
        **KEYS,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [
                    *(*lines.enter(replica), sys.executable, str(HERE / "throttled_peers.py"), scheme),
                    *("--replica", str(replica), "--replicas", str(count), "--codec", codec),
                    *("--elements", str(options.elements), "--chunk-elements", str(options.chunk_elements)),
                    *("--rounds", str(options.rounds), "--endpoint", endpoint, "--bucket", BUCKET),
                    *("--address", lines.addresses[replica], "--first", lines.addresses[0], "--folder", folder),
                ],
                stdout=subprocess.PIPE,
                stderr=None if options.verbose else subprocess.DEVNULL,
                env=environment,
                text=True,
            )
            for replica in range(count)
        ]
        try:
            give_up = time.monotonic() + seconds
            while any(process.poll() is None for process in processes) and time.monotonic() < give_up:
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
        outputs = [process.communicate()[0] for process in processes]
    by_replica = [[json.loads(line) for line in output.splitlines() if line.startswith("{")] for output in outputs]
    if any(len(rounds) != options.rounds for rounds in by_replica):
        print(f"{scheme}: after {seconds:g} s the replicas had {[len(rounds) for rounds in by_replica]} rounds")
    return [list(results) for results in zip(*by_replica, strict=True)]


def seconds_of(results: list[dict[str, Any]]) -> float:
    return max(result["ended"] for result in results) - min(result["began"] for result in results)


def lighthouse(lines: Links) -> tuple[subprocess.Popen[bytes], str]:
    program = shutil.which("torchft_lighthouse") or str(Path(sys.executable).parent / "torchft_lighthouse")
    bind = f"{lines.gateway}:29510"
    words = [program, "--bind", bind, "--min_replicas", str(len(lines.names)), "--join_timeout_ms", "10000"]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), f"http://{bind}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=128.0, help="of the payload, in bfloat16")
    parser.add_argument("--megabits", type=float, default=100.0, help="per second and direction, of each replica")
    parser.add_argument("--queue-milliseconds", type=int, default=50)
    parser.add_argument("--chunk-elements", type=int, default=1024 * 1024)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--schemes", default="store,store-int8,leader,gloo,torchft")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--timeout-seconds", type=float, default=300.0)
    parser.add_argument("--verbose", action="store_true", help="show what the replicas say")
    parser.add_argument("-o", "--output", type=Path, help="add what was measured to this file, a line of JSON a scheme")
    options = parser.parse_args()
    options.elements = int(options.megabytes * 1e6) // 2 // 4096 * 4096
    payload, rate = 2 * options.elements, options.megabits * 1e6 / 8
    floor = 2 * (options.replicas - 1) / options.replicas * payload / rate
    times: dict[str, float] = {}
    with links(options.replicas, options.megabits, options.queue_milliseconds, options.mtu) as lines:
        carried = goodput(lines, max(4, int(rate / 1e6 * 2)))
        print(
            f"{options.replicas} replicas, {payload / 1e6:.0f} MB in bfloat16, {options.megabits:g} Mbit/s each way: "
            f"floor {floor:.2f} s; a plain TCP stream carries {carried / rate:.3f} of the rate, so that it is"
            f" {floor * rate / carried:.2f} s (in brackets below)"
        )
        with s3_server(lines.gateway) as (endpoint, server):
            for name in options.schemes.split(","):
                scheme, _, codec = name.partition("-")
                light = None
                if scheme == "torchft":
                    light, where = lighthouse(lines)
                used = cpu_seconds(server)
                try:
                    rounds = play(
                        lines,
                        scheme,
                        codec or "bfloat16",
                        where if light is not None else endpoint,
                        options,
                        options.timeout_seconds,
                    )
                finally:
                    if light is not None:
                        light.kill()
                        light.wait()
                used = cpu_seconds(server) - used
                if not rounds:
                    continue
                for results in rounds:
                    if len({result.get("digest") for result in results}) != 1:
                        raise SystemExit(f"{name}: the replicas' means differ")
                best = min(rounds, key=seconds_of)
                times[name] = seconds_of(best)
                half = 0.5 if codec == "int8" else 1.0
                clients = sum(result["cpu_seconds"] for results in rounds for result in results) / len(rounds)
                ratio = times[name] / (floor * half)
                print(
                    f"{name:12} {' '.join(f'{seconds_of(results):.2f}' for results in rounds)} s"
                    f"  = {ratio:.3f} x its floor ({ratio * carried / rate:.3f})"
                    f"  |  sent {max(r['sent'] for r in best) / 1e6:.1f} MB, received"
                    f" {max(r['received'] for r in best) / 1e6:.1f} MB"
                    f"  |  CPU s a round: replicas {clients:.1f}, server {used / len(rounds):.1f}",
                    flush=True,
                )
                if options.output is not None:
                    measured = {
                        "scheme": scheme,
                        "codec": codec or "bfloat16",
                        "replicas": options.replicas,
                        "elements": options.elements,
                        "chunk_elements": options.chunk_elements,
                        "megabits": options.megabits,
                        "goodput": carried / rate,
                        "seconds": [round(seconds_of(results), 3) for results in rounds],
                        "sent": [result["sent"] for result in best],
                        "received": [result["received"] for result in best],
                        "cpu_seconds": {"replicas": round(clients, 2), "server": round(used / len(rounds), 2)},
                    }
                    with options.output.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(measured) + "\n")
                if options.verbose and "phases" in best[0]:
                    for result in best:
                        print({k: result[k] for k in ("phases", "waited", "requests", "peak_bytes")})
    if "store" in times:
        for name, seconds in times.items():
            if name != "store":
                print(f"{name} / store: {seconds / times['store']:.2f}")


if __name__ == "__main__":
    main()
