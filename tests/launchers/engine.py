"""Containers as processes of this machine: what lies beneath every stand-in for a service.

A stand-in speaks its service's protocol, checks requests as the service would, and hands containers to an `Engine`,
which starts them, keeps their output, and can be told to take their machine away, let their time run out, or refuse
the next ones. Nothing here sleeps: waiting is on conditions.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
GRACE_SECONDS = 20.0


@dataclass
class Container:
    """One job of a service. `ended` is how: exited, stopped, preempted or expired; "" while it runs."""

    name: str
    command: tuple[str, ...]
    env: dict[str, str]
    attempts_left: int = 0  # how often the service starts it again by itself
    lines: list[str] = field(default_factory=list)
    exit_code: int | None = None
    ended: str = ""
    starts: int = 0
    begins: list[int] = field(default_factory=list)  # how many lines there were at each start
    stopping: str = ""  # what `ended` will be
    process: subprocess.Popen[str] | None = None

    @property
    def running(self) -> bool:
        return not self.ended


class Engine:
    def __init__(self) -> None:
        self.containers: list[Container] = []
        self.changed = threading.Condition()
        self.image_env: dict[str, str] = {}  # what all images have in their environment
        self._refusals: list[str] = []

    # -- for stand-ins -------------------------------------------------------------------------------------------------

    def refusal(self) -> str:
        """What the next submission is to be refused for ("quota", "outage"), or ""."""
        with self.changed:
            return self._refusals.pop(0) if self._refusals else ""

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str], *, attempts: int = 1) -> Container:
        container = Container(name, tuple(command), dict(env), attempts_left=attempts - 1)
        with self.changed:
            self.containers.append(container)
        self._spawn(container)
        threading.Thread(target=self._run, args=(container,), daemon=True).start()
        return container

    def stop(self, container: Container, ended: str = "stopped") -> None:
        """Ask it to end, kill it if it doesn't; returns at once."""
        with self.changed:
            if container.ended or container.stopping:
                return
            container.stopping = ended
            process = container.process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            threading.Timer(GRACE_SECONDS, lambda: process.poll() is None and process.kill()).start()

    def follow(self, container: Container) -> Iterator[str]:
        """The output as it comes, from the first line to the end."""
        told = 0
        while True:
            with self.changed:
                while not container.ended and len(container.lines) == told:
                    self.changed.wait()
                ended, lines = container.ended, container.lines[told:]
            told += len(lines)
            yield from lines
            if ended:
                return

    # -- for tests -----------------------------------------------------------------------------------------------------

    def refuse(self, *kinds: str) -> None:
        """Refuse the next submissions, one for each kind."""
        with self.changed:
            self._refusals.extend(kinds)

    def take_machine(self, container: Container, *, retried: bool = False) -> None:
        """The machine goes, with no time for a last word. `retried`: the service starts the job again by itself."""
        with self.changed:
            container.attempts_left += retried
            container.stopping = "preempted"
            process = container.process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)

    def let_time_run_out(self, container: Container) -> None:
        self.stop(container, "expired")

    def wait_for(self, condition, seconds: float = 60.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, timeout=seconds), "waited in vain"

    def close(self) -> None:
        for container in self.containers:
            with self.changed:
                container.attempts_left = 0
                process = container.process
            if process is not None and process.poll() is None:
                with suppress(ProcessLookupError):  # it ends at this moment
                    os.killpg(process.pid, signal.SIGKILL)
        self.wait_for(lambda: all(container.ended for container in self.containers))

    # ------------------------------------------------------------------------------------------------------------------

    def _spawn(self, container: Container) -> None:
        words = list(container.command)
        words[0] = sys.executable if words[0] == "python" else words[0]
        # A container has its image's environment and what the service was told, nothing of ours.
        image = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(ROOT)}
        image |= {name: os.environ[name] for name in ("TMPDIR", "PYTHONPYCACHEPREFIX") if name in os.environ}
        container.stopping = ""
        container.starts += 1
        container.begins.append(len(container.lines))
        container.process = subprocess.Popen(
            words,
            env={**image, "OMP_NUM_THREADS": "1", **self.image_env, **container.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def _run(self, container: Container) -> None:
        while True:
            process = container.process
            assert process is not None and process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    with self.changed:
                        container.lines.append(line.rstrip("\n"))
                        self.changed.notify_all()
            code = process.wait()
            with self.changed:
                why = container.stopping or "exited"
                again = (why == "preempted" or (why == "exited" and code != 0)) and container.attempts_left > 0
                if not again:
                    container.exit_code, container.ended = code, why
                    self.changed.notify_all()
                    return
                container.attempts_left -= 1
            self._spawn(container)
