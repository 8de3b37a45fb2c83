"""Run a training script so that every process of its launcher is a replica of its own.

    composer -n 4 -m composer_replication.run train.py recipe.yaml key=value
    torchrun --nproc-per-node 4 -m composer_replication.run train.py recipe.yaml
    srun -n 4 python -m composer_replication.run train.py recipe.yaml

Invariant: the environment is rewritten before the script, and with it any trainer, is imported. The script stays as
it is.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from composer_replication.isolate import isolate_world

__all__ = ["main"]

_EPILOG = """Composer's launcher shows the first process only: add --stdout 'replica{rank}.log' --stderr
'replica{rank}.err' to see the others. RUN_NAME=job becomes job-replica0, job-replica1, ...: with {run_name} in
save_folder each replica has its own checkpoints."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Isolate this process, then run the script in its place, as `python script.py ...` would."""
    parser = argparse.ArgumentParser(
        prog="python -m composer_replication.run",
        description="Make each process that a launcher starts a replica of its own, and run a script in it.",
        epilog=_EPILOG,
    )
    parser.add_argument("--ranks-per-replica", type=int, default=1, metavar="K", help="consecutive ranks (default: 1)")
    parser.add_argument("script", help="path of the training script")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the script as they are")
    rest.required = False  # which argparse's message would say otherwise
    chosen = parser.parse_args(arguments)
    if not os.path.isfile(chosen.script):
        parser.error(f"there is no script {chosen.script!r}")
    try:
        isolate_world(chosen.ranks_per_replica)
    except ValueError as error:
        parser.error(str(error))
    sys.argv = [chosen.script, *chosen.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(chosen.script))
    runpy.run_path(chosen.script, run_name="__main__")


if __name__ == "__main__":
    main()
