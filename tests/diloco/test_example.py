"""The examples run as they stand, and whatever drives the loop, the weights are those of the loop by hand."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from composer_replication import AutoLoCoConfig, AutoLoCoPolicy, InProcessFleet, OuterLoop
from composer_replication.autoloco import Preview
from composer_replication.preview import LoopPosition, Previewer, Scheduled
from tests.support.threads import run_threads

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.processes


def outputs_of(name: str, folder: Path) -> list[list[str]]:
    """What each of two replicas prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "examples" / name), f"file://{folder}"]
    replicas = [
        subprocess.Popen([*command, str(i), "2"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    said = [replica.communicate(timeout=200) for replica in replicas]
    assert [replica.returncode for replica in replicas] == [0, 0], said
    lines = [out.splitlines() for out, _ in said]
    assert lines[0][-1] == lines[1][-1] and lines[0][-1].startswith("final weights "), said
    return lines


def test_by_hand_and_under_accelerate(tmp_path: Path) -> None:
    by_hand = outputs_of("plain_loop.py", tmp_path / "plain")
    assert [line.split(",")[0] for line in by_hand[0][:-1]] == [f"round {i}: 10 steps" for i in range(6)]
    pytest.importorskip("accelerate")
    assert outputs_of("accelerate_loop.py", tmp_path / "accelerate") == by_hand


def test_hugging_face_s_trainer_gives_the_weights_of_a_loop_by_hand(tmp_path: Path) -> None:
    """Model, data, clipping, optimizer, schedule as the Trainer has them, in a loop without it."""
    transformers = pytest.importorskip("transformers")
    lines = outputs_of("hf_trainer.py", tmp_path / "run")
    assert [line for line in lines[0] if line.startswith("round")] == [f"round {i}: 6 steps" for i in range(4)]

    spec = importlib.util.spec_from_file_location("hf_trainer", ROOT / "examples" / "hf_trainer.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def by_hand(collective: Any, model: torch.nn.Module) -> str:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 0, example.STEPS)
        ahead = Previewer(optimizer, [Scheduled(scheduler=scheduler)])
        loop = OuterLoop(model, collective, policy=AutoLoCoPolicy(config=AutoLoCoConfig(base_horizon=6)))

        def preview(done: int) -> Preview:
            return ahead.take(LoopPosition(batch=done), grid=loop.grid, remaining=example.STEPS - done).preview

        loop.start(preview(0))
        data = iter(example.Counting(collective.replica))
        for done in range(1, example.STEPS + 1):
            tokens = torch.stack([next(data)["input_ids"] for _ in range(example.BATCH)])
            targets = torch.tensor(example.BATCH * (example.LENGTH - 1))  # the Trainer divides by their count
            model(input_ids=tokens, labels=tokens, num_items_in_batch=targets).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            loop.step_done(lr=rate)
            scheduler.step()
            optimizer.zero_grad()
            if loop.due:
                loop.close_interval(preview(done))
        digest = loop.finish(preview(example.STEPS)).digest
        loop.close()
        return digest

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the example had: a matrix product's bits may depend on it
    try:
        collectives = InProcessFleet(2, timeout_seconds=60).collectives()
        models = [example.make_model().train() for _ in collectives]
        digests = run_threads([partial(by_hand, c, model) for c, model in zip(collectives, models, strict=True)])
    finally:
        torch.set_num_threads(threads)
    assert [f"final weights {digest}" for digest in digests] == [lines[0][-1]] * 2
