"""A user's script under Composer's own launcher and `composer_replication.run`; nothing started outlives its block."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["RUN", "all_hold", "ended", "launched", "results", "states", "stopped"]

ROOT = Path(__file__).parent.parent.parent
RUN = {"RUN_NAME": "job7"}


@contextmanager
def launched(
    out: Path, batches: int, *, launcher: Sequence[str], runner: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """`composer LAUNCHER... -m composer_replication.run RUNNER... user_script.py OUT BATCHES`, with logs in `out`."""
    logs = ("--stdout", f"{out}/{{rank}}.log", "--stderr", f"{out}/{{rank}}.err")
    program = [str(Path(sys.executable).parent / "composer"), *launcher, *logs, "-m", "composer_replication.run"]
    process = subprocess.Popen(
        [*program, *runner, str(ROOT / "tests" / "composer" / "user_script.py"), str(out), str(batches)],
        cwd=out,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **RUN},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def ended(process: subprocess.Popen[str]) -> None:
    """Waits for the launcher, and with it all of its processes; they must have ended well."""
    text = process.communicate(timeout=500)[0]
    assert process.returncode == 0, text


def stopped(process: subprocess.Popen[str]) -> None:
    """SIGTERM to the launcher, which passes it on, and kills whoever is there after 30 seconds.

    That is no failure: on a machine that is very busy, taking all of Composer's modules apart lasts longer. What the
    replicas told the fleet came first.
    """
    process.terminate()
    text = process.communicate(timeout=200)[0]
    assert process.returncode != 0, text


def all_hold(out: Path, count: int, run: Callable[[], bool]) -> None:
    """Waits until `count` scripts stand still before batch 5, as OUT/hold has them do; `run`: whether they still do."""
    deadline = time.monotonic() + 500
    while len(list(out.glob("holding-*"))) < count:
        assert run() and time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def states(out: Path, replicas: int) -> list[str]:
    """What each replica last told the fleet that it does."""
    members = [json.loads((out / "store" / "members" / f"{index}.json").read_text()) for index in range(replicas)]
    return [one["status"]["state"] for one in members]


def results(out: Path, replicas: int, ranks: int = 1) -> list[dict[str, Any]]:
    """Of each process, in the launcher's order."""
    names = [f"replica-{index}-rank-{rank}.json" for index in range(replicas) for rank in range(ranks)]
    return [json.loads((out / name).read_text()) for name in names]
