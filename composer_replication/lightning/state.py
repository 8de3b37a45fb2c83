"""What a checkpoint needs beside the outer loop's state for a resume in the middle of an interval, bit for bit.

Invariant: tensors and primitives only, so that `weights_only=True` loads it.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

__all__ = ["accumulated_gradients", "random_state", "restore_gradients", "restore_random_state"]


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """What this process holds of it."""
    sharded: Any = gradient
    return sharded.to_local() if type(gradient).__name__ == "DTensor" else gradient


def _like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A gradient for `parameter`, of which this process holds `local`."""
    if type(parameter).__name__ != "DTensor":
        return local
    sharded: Any = parameter
    return type(sharded).from_local(
        local, sharded.device_mesh, sharded.placements, shape=sharded.shape, stride=sharded.stride()
    )


def accumulated_gradients(trainer: Trainer, module: LightningModule) -> dict[str, torch.Tensor]:
    """The gradients of an unfinished accumulation window; empty at a step's end. Lightning itself drops them."""
    if not module.automatic_optimization or not trainer.fit_loop.epoch_loop._should_accumulate():
        return {}
    return {name: _local(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def restore_gradients(module: LightningModule, gradients: dict[str, torch.Tensor]) -> None:
    named = dict(module.named_parameters())
    for name, gradient in gradients.items():
        named[name].grad = _like(named[name], gradient.to(named[name].device, copy=True))


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """torch's generators, for dropout; others (numpy, Python) are the data pipeline's own business."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
