"""What each process of replicas of two ranks runs under Composer: the user's script, as the runner runs it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from composer_replication.isolate import isolate_world
from tests.composer.user_script import main

__all__ = ["train"]


def train(rank: int, out: Path, batches: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    isolate_world(2)
    return main(out, batches)
