"""The program that runs first inside a job, as a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from composer_replication.diloco.serverless.jobs.marks import Marks
from composer_replication.store import open_store

pytestmark = pytest.mark.processes


def container(store: Path, *words: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    identity = ["--job=run-r1-0", "--replica-id=1", "--num-replicas=2", f"--rendezvous-uri={store.as_uri()}"]
    module = "composer_replication.diloco.serverless.jobs.container"
    command = [sys.executable, "-m", module, *identity, *options, "--", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def marks(store: Path) -> Marks:
    return Marks(open_store(store.as_uri()))


def test_a_worker_that_outlives_the_replica_does_not_hold_up_its_end(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys; print('said')\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])\nsys.exit(3)"
    )
    done = container(tmp_path, "python", "-u", "-c", script)
    assert done.returncode == 3 and "said" in done.stdout
    mark = marks(tmp_path).read(1, "run-r1-0")
    assert mark is not None and (mark.state, mark.exit_code, mark.starts) == ("failed", 3, 1)


def test_every_start_is_counted_and_a_result_is_told(tmp_path: Path) -> None:
    write = "import pathlib, sys; pathlib.Path(sys.argv[1], 'result.json').write_text('{\"loss\": 2.5}'); sys.exit(7)"
    for _ in range(2):
        done = container(tmp_path, "python", "-c", write, str(tmp_path), options=(f"--output={tmp_path}",))
        assert done.returncode == 7
    mark = marks(tmp_path).read(1, "run-r1-0")
    assert mark is not None and (mark.starts, mark.state, mark.result) == (2, "preempted", {"loss": 2.5})


def test_it_gives_signs_of_life_as_long_as_the_replica_runs(tmp_path: Path) -> None:
    script = (  # the replica itself waits for one
        "import json, pathlib, sys, time\nmark, until = pathlib.Path(sys.argv[1]), time.monotonic() + 30\n"
        "while time.monotonic() < until:\n"
        "    words = json.loads(mark.read_text())\n"
        "    if words['seen'] > words['began'] and words['state'] == 'running': sys.exit(0)\n"
        "    time.sleep(0.01)\nsys.exit(1)"
    )
    quicker = (
        "import sys\nfrom composer_replication.diloco.serverless.jobs import container\n"
        "container.BEAT_SECONDS = 0.05\nsys.exit(container.main(sys.argv[1:]))"
    )
    identity = ["--job=run-r1-0", "--replica-id=1", "--num-replicas=2", f"--rendezvous-uri={tmp_path.as_uri()}"]
    mark = tmp_path / "launch" / "replicas" / "1" / "run-r1-0.json"
    command = [sys.executable, "-c", quicker, *identity, "--", "python", "-c", script, str(mark)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_command_that_is_not_there_ends_in_one_line(tmp_path: Path) -> None:
    done = container(tmp_path, "no-such-program")
    assert done.returncode == 3 and "no-such-program" in done.stdout and "Traceback" not in done.stdout + done.stderr


def test_a_store_that_cannot_be_opened_ends_in_one_line() -> None:
    module = "composer_replication.diloco.serverless.jobs.container"
    command = [sys.executable, "-m", module, "--job=a", "--replica-id=0", "--num-replicas=1"]
    done = subprocess.run([*command, "--rendezvous-uri=nowhere://x", "--", "true"], capture_output=True, text=True)
    assert done.returncode == 3 and "nowhere" in done.stderr and "Traceback" not in done.stderr
