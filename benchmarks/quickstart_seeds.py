"""The quickstart's task, adaptive against fixed interval, at equal steps and over several seeds.

    python benchmarks/quickstart_seeds.py [--seeds 1 2 3] [--output docs/results/quickstart.json] [key=value ...]

Launches `recipes/quickstart.yaml` and `recipes/diloco.yaml` for each seed and prints a table with mean and spread. With
`--output`, what each launch summed up is kept there; what that file holds already isn't run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECIPES = {"AutoLoCo": "recipes/quickstart.yaml", "DiLoCo (fixed interval)": "recipes/diloco.yaml"}
KEPT = ("rounds", "steps", "tokens", "loss_last", "validation_loss", "bytes_sent", "horizons", "policy", "codec")


def launch(recipe: str, seed: int, overrides: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, "-c", "import sys; from composer_replication.cli import main; sys.exit(main())"]
        command += ["launch", recipe, "--plain", f"training.seed={seed}", f"output={output}", *overrides]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads((output / "summary.json").read_text())
    return {name: summary[name] for name in KEPT}


def spread(values: Sequence[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.4f} ± {deviation:.4f}"


def table(runs: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [
        "| policy | seeds | rounds, by seed | steps | training loss, last round | validation loss "
        "| bytes sent, whole fleet |",
        "|---|---|---|---|---|---|---|",
    ]
    for policy, by_seed in runs.items():
        values = list(by_seed.values())
        rounds = [run["rounds"] for run in values]  # by seed
        sent = statistics.mean(run["bytes_sent"] for run in values)
        lines.append(
            f"| {policy} | {', '.join(by_seed)} | {', '.join(map(str, rounds))} | {values[0]['steps']} "
            f"| {spread([run['loss_last'] for run in values])} | {spread([run['validation_loss'] for run in values])} "
            f"| {sent / 1e6:.1f} MB |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    runs: dict[str, dict[str, dict[str, Any]]] = {policy: {} for policy in RECIPES}
    if arguments.output and arguments.output.exists():
        runs = json.loads(arguments.output.read_text())
    for seed in arguments.seeds:
        for policy, recipe in RECIPES.items():
            if str(seed) in runs[policy]:
                continue
            print(f"{policy}, seed {seed} ...", file=sys.stderr, flush=True)
            runs[policy][str(seed)] = launch(recipe, seed, arguments.overrides)
            if arguments.output:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps(runs, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
