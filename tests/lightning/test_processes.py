"""Replicas as processes that somebody starts by hand, over a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.processes


def start(module: str, *arguments: object, cwd: Path, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.lightning.{module}", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str], code: int = 0) -> str:
    try:
        text = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == code, text
    return text


def test_lightning_s_own_demos_in_two_processes_with_two_edits(tmp_path: Path) -> None:
    # The demo downloads its text unless it is there: any words will do.
    words = " ".join(f"word{i % 83}" for i in range(3000))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wikitext-2.txt").write_text(words)
    store = (tmp_path / "store").as_uri()
    processes = [start("demo_program", i, store, tmp_path, cwd=tmp_path) for i in (0, 1)]
    texts = [end(process) for process in processes]
    first, second = (json.loads((tmp_path / f"replica-{i}.json").read_text()) for i in (0, 1))
    both = [0, 1]
    for name, rounds in (
        ("boring", [[0, 10, both], [1, 10, both], [2, 10, both], [3, 2, both]]),
        ("lm", [[0, 3, both], [1, 3, both], [2, 2, both]]),
    ):
        assert first[name]["rounds"] == second[name]["rounds"] == rounds
        assert first[name]["digest"] == second[name]["digest"]
        assert first[name]["weights"] == second[name]["weights"]
    assert "/replica-0/" in first["lm"]["checkpoint"] and "/replica-1/" in second["lm"]["checkpoint"]
    # Neither demo has token information, and they are told so.
    assert all("tokens aren't counted, so horizons are taken as steps" in text for text in texts)


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    seen = []
    for text in process.stdout:
        seen.append(text)
        if text.strip() == line:
            return
    raise AssertionError(f"no {line!r} in\n{''.join(seen)}")


def results(folder: Path, replicas: int = 2) -> list[dict[str, Any]]:
    return [json.loads((folder / f"replica-{i}.json").read_text()) for i in range(replicas)]


def undisturbed(folder: Path) -> str:
    """The digest of a run of threads in which nothing happens; processes over files must give the same bits."""
    from tests.lightning.helpers import Tiny, callback, in_threads, trainer
    from tests.lightning.test_resume import Rewindable

    def replica(index: int, collective: Any) -> str:
        ours = callback(collective, base_horizon=3)
        module = Tiny(optimizer="adamw", scheduler=True, lr=0.02, seed=index)
        trainer(ours, max_epochs=1, strategy="auto").fit(module, Rewindable(48, index, 2))
        return ours.final.digest

    return in_threads(2, replica)[0]


def test_sigterm_saves_and_a_restart_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    arguments = ("stopped_program", 1, 2, store, tmp_path)
    other = start("stopped_program", 0, 2, store, tmp_path, 0, cwd=tmp_path)
    stopped = start(*arguments, 0.05, cwd=tmp_path)
    wait_for(stopped, "batch 8")
    stopped.send_signal(signal.SIGTERM)
    end(stopped, code=143)
    assert len(list((tmp_path / "replica-1").glob("round-000002-*.ckpt"))) >= 1
    end(start(*arguments, 0, cwd=tmp_path))
    end(other)
    first, second = results(tmp_path)
    assert first["digest"] == second["digest"] == undisturbed(tmp_path)
    assert second["rounds"] == 8
    # What the second process saw begins where the first one ended.
    assert second["seen"][0][0] >= 2 * 8 and second["seen"][-1] == [47]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [2, 8])
def test_kill_9_and_restart_end_as_the_undisturbed_run(tmp_path: Path, batch: int) -> None:
    store = (tmp_path / "store").as_uri()
    arguments = ("stopped_program", 1, 2, store, tmp_path)
    other = start("stopped_program", 0, 2, store, tmp_path, 0, cwd=tmp_path)
    killed = start(*arguments, 0.05, cwd=tmp_path)
    wait_for(killed, f"batch {batch}")
    killed.kill()
    killed.communicate()
    end(start(*arguments, 0, cwd=tmp_path))
    end(other)
    first, second = results(tmp_path)
    assert first["digest"] == second["digest"] == undisturbed(tmp_path)
