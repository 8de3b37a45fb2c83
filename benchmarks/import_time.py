"""How long `import composer_replication` takes beside `import torch`: fresh processes, in turn, ratios of medians.

python benchmarks/import_time.py [--runs 7]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "import torch": "import torch",
    "import composer_replication and its core": "import composer_replication, composer_replication.diloco.loop",
    "import composer_replication": "import composer_replication",
    "composer-replication --help": "import sys; sys.argv = ['composer-replication', '--help']\n"
    "from composer_replication.cli import main; main()",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(arguments.runs):
        for name, code in COMMANDS.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - began)
    base = statistics.median(seconds["import torch"])
    for name, values in seconds.items():
        print(f"{name:42s} {statistics.median(values):6.2f} s  {statistics.median(values) / base:5.2f} x import torch")


if __name__ == "__main__":
    main()
