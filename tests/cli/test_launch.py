"""Whole launches with real replicas: to the end, through a kill, through Ctrl-C and --resume, and when one fails.

Replicas are separate processes that import torch and a trainer, so each launch costs seconds; what can be looked at in
one is looked at in one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from composer_replication.cli import main
from composer_replication.cli.view import RunReader
from composer_replication.diloco.round_record import RoundRecord
from composer_replication.store import open_store

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]  # starting a replica is slow on a busy machine

# Big enough that a test can step in between two rounds, small enough to be over in seconds.
RECIPE = """\
name: small
model: {name: byte_gpt, args: {width: 32, layers: 2, heads: 2, context: 32}}
data: {name: text_bytes, args: {context: 32, batch_size: 16, max_bytes: 400000, validation_bytes: 5000}}
optimizer: {lr: 3e-3}
scheduler: {warmup_steps: 10}
training: {steps: 200, log_every: 25, accelerator: cpu, threads: 1}
autoloco: {base_horizon: 8}
codec: int8
fleet: {replicas: 2, timeout_seconds: 300}
executor: {backoff_seconds: 0, grace_seconds: 30}
"""


def wait_for(condition, seconds: float = 300.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("launch") / "small.yaml"
    file.write_text(RECIPE)
    return file


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(recipe) -> tuple[Path, int, str]:
    """One launch to the end: its folder, exit code and output."""
    folder = recipe.parent / "undisturbed"
    ran = subprocess.run(
        [sys.executable, "-m", "composer_replication.cli", "launch", str(recipe), f"output={folder}"],
        capture_output=True,
        text=True,
        timeout=500,
    )
    return folder, ran.returncode, ran.stdout + ran.stderr


@pytest.fixture(params=["lightning", "composer"])
def trainer(request) -> str:
    """Of the launches that are disturbed; the undisturbed one is Lightning's."""
    if find_spec(request.param) is None:
        pytest.skip(f"{request.param} isn't installed")
    return request.param


def start(recipe: Path, folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "composer_replication.cli", "launch", str(recipe), f"output={folder}", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def closed_rounds(folder: Path) -> int:
    if not (folder / "store" / "fleet.json").exists():
        return 0
    reader = RunReader(open_store(str(folder / "store")))
    reader.refresh()
    return len(reader.rounds)


def process_of(folder: Path, replica: int) -> int:
    """The process that holds a replica id, from its newest claim."""
    claims = [p for p in (folder / "store" / "claims" / str(replica)).iterdir() if p.name.isdigit()]
    return json.loads(max(claims, key=lambda p: int(p.name)).read_text())["pid"]


def test_a_launch_trains_and_sums_up(undisturbed):
    folder, code, output = undisturbed
    assert code == 0, output
    values = summary_of(folder)
    assert values["steps"] == 200 and values["fixed_rounds"] == 25 and sum(values["horizons"]) == 200
    assert values["rounds"] == len(values["horizons"]) < 25  # the interval grew
    assert len(values["digests"]) == 1
    assert values["loss_last"] < values["loss_first"] - 1.0
    assert values["validation_loss"] < 4.0  # ln 256 = 5.5 before training
    # int8: a byte an element and little more, once a round from each of two replicas
    elements = 256 * 32 + 2 * (32 * 96 + 32 * 32 + 2 * 4 * 32 * 32 + 4 * 32) + 2 * 32
    assert values["bytes_sent"] == pytest.approx(2 * values["rounds"] * elements, rel=0.5)
    for words in ("rounds; a fixed interval of 8 takes 25", "as int8", "the same on all replicas", "training.png"):
        assert words in output
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    # Plain lines, as there is no terminal; how many depends on how often one looks while it trains.
    assert re.search(r"^round \d+  step \d+/200 .* loss ", output, re.MULTILINE)


def test_each_replica_leaves_a_log_a_result_and_its_weights(undisturbed):
    import torch

    folder = undisturbed[0]
    weights = []
    for replica in (0, 1):
        log = (folder / f"replica-{replica}" / "log.txt").read_text()
        assert f"replica {replica} of 2" in log and "torch 2" in log and "store file://" in log and "completed" in log
        final = torch.load(folder / f"replica-{replica}" / "final.ckpt", weights_only=True)
        weights.append(final["state_dict"])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_rounds_are_kept_as_json_lines_that_tell_where_time_and_bytes_went(undisturbed):
    folder = undisturbed[0]
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    records = [RoundRecord.from_json(json.loads(line)) for line in lines]
    assert [record.round for record in records] == list(range(summary_of(folder)["rounds"]))
    assert [record.steps for record in records] == summary_of(folder)["horizons"]
    assert all(before.next_steps == after.steps for before, after in zip(records, records[1:], strict=False))
    assert any(record.action == "grow" for record in records)
    told = [record.observed.replicas[replica] for record in records for replica in (0, 1)]
    for name in ("loss", "tokens_per_second", "train_seconds", "wait_seconds", "exchange_seconds"):
        assert all(name in one for one in told), f"{name} of every round, the last one's from the results"
    # What the rounds tell, together, is what the replicas have counted for themselves.
    for name in ("bytes_sent", "bytes_received"):
        assert sum(one[name] for one in told) == summary_of(folder)[name]


def test_status_reads_the_same_from_the_store(undisturbed, capsys):
    folder = undisturbed[0]
    assert main(["status", str(folder / "store"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ended"] and answer["step"] == 200 and answer["round"] == summary_of(folder)["rounds"]
    assert [row["state"] for row in answer["replicas"]] == ["finished", "finished"]
    assert main(["status", str(folder / "store"), "--watch"]) == 0  # of an ended run, it shows it and returns
    assert main(["launch", str(folder / "recipe.yaml"), f"store.uri={folder}/store"]) == 2  # and isn't trodden upon


@pytest.mark.slow
def test_a_killed_replica_comes_back_and_the_weights_are_those_of_an_undisturbed_run(recipe, undisturbed, trainer):
    """Under Composer, too, each replica behind a launcher of its own: and one recipe gives both the same bits."""
    folder = recipe.parent / f"killed-{trainer}"
    with start(recipe, folder, f"trainer={trainer}") as process:
        wait_for(lambda: closed_rounds(folder) >= 3 or process.poll() is not None)
        os.kill(process_of(folder, 1), signal.SIGKILL)
        output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    assert "replica 1: killed by signal 9; restart 1 of 3" in output
    log = (folder / "replica-1" / "log.txt").read_text()
    assert "goes on from" in log and f", {trainer} " in log
    values = summary_of(folder)
    assert values["replicas"]["1"]["restarts"] == 1
    assert values["digests"] == summary_of(undisturbed[0])["digests"]
    assert values["horizons"] == summary_of(undisturbed[0])["horizons"]
    assert values["validation_loss"] == pytest.approx(summary_of(undisturbed[0])["validation_loss"], rel=1e-5)


@pytest.mark.slow
def test_ctrl_c_stops_everything_and_resume_goes_on(recipe, undisturbed, trainer):
    folder = recipe.parent / f"interrupted-{trainer}"
    with start(recipe, folder, f"trainer={trainer}") as process:
        wait_for(lambda: closed_rounds(folder) >= 3 or process.poll() is not None)
        pids = [process_of(folder, replica) for replica in (0, 1)]
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output
    assert "--resume" in output and "Traceback" not in output
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    done = closed_rounds(folder)
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == done
    assert 3 <= done < len(summary_of(undisturbed[0])["horizons"])
    assert main(["launch", str(folder / "recipe.yaml"), "--resume", "--plain"]) == 0
    assert summary_of(folder)["digests"] == summary_of(undisturbed[0])["digests"]
    told = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [(one["round"], one["steps"]) for one in told] == list(enumerate(summary_of(folder)["horizons"]))


BROKEN = """\
import os
from composer_replication.tasks.byte_gpt import ByteGPT
from composer_replication.tasks.language_module import LanguageModule
from composer_replication.tasks.optim import build_optimizer, build_scheduler

class Broken(LanguageModule):
    def __init__(self):
        super().__init__(
            ByteGPT(width=16, layers=1, heads=2, context=32),
            make_optimizer=lambda model: build_optimizer(model.parameters(), name="sgd", lr=0.1),
            make_scheduler=lambda optimizer: build_scheduler(optimizer, name="constant", steps=1),
        )

    def training_step(self, batch, batch_index):
        if batch_index == 5 and os.environ["BREAK"] in self.trainer.default_root_dir:
            raise RuntimeError("a bug in the model")
        return super().training_step(batch, batch_index)
"""


def test_a_failing_replica_is_named_its_log_is_shown_and_the_others_are_stopped(recipe, tmp_path, monkeypatch):
    (tmp_path / "broken_model.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.getcwd()}")
    text = recipe.read_text().replace(
        "model: {name: byte_gpt, args: {width: 32, layers: 2, heads: 2, context: 32}}", ""
    )
    mine = tmp_path / "own.yaml"
    mine.write_text(text + "model: {class: broken_model.Broken}\n")
    with start(mine, tmp_path / "run", "executor.env.BREAK=replica-1") as process:
        output, _ = process.communicate(timeout=500)
    assert process.returncode == 1, output
    assert "replica 1 failed: an exception in its code" in output
    assert "| replica 1: RuntimeError: a bug in the model" in output
    assert summary_of(tmp_path / "run")["replicas"]["0"]["status"] == "cancelled"
