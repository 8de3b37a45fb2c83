"""Composer's own launcher over `composer_replication.run` and a user's script; nothing it starts outlives its block."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["ended", "launched"]

ROOT = Path(__file__).parent.parent.parent


@contextmanager
def launched(
    out: Path, script: str, *arguments: object, launcher: Sequence[str], runner: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """`composer LAUNCHER... -m composer_replication.run RUNNER... SCRIPT OUT ARGUMENTS...`, with its logs in `out`."""
    logs = ("--stdout", f"{out}/{{rank}}.log", "--stderr", f"{out}/{{rank}}.err")
    path = ROOT / "tests" / "composer" / script
    program = [str(Path(sys.executable).parent / "composer"), *launcher, *logs, "-m", "composer_replication.run"]
    process = subprocess.Popen(
        [*program, *runner, str(path), str(out), *map(str, arguments)],
        cwd=out,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RUN_NAME": "job7"},
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
