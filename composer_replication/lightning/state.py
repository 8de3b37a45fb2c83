"""What a checkpoint needs beside the outer loop's state for a resume in the middle of an interval, bit for bit.

Invariant: tensors and primitives only, so that `weights_only=True` loads it.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer

__all__ = ["accumulated_gradients", "random_state", "restore_gradients", "restore_random_state"]


def accumulated_gradients(trainer: Trainer, module: LightningModule) -> dict[str, torch.Tensor]:
    """The gradients of an unfinished accumulation window; empty at a step's end. Lightning itself drops them."""
    if not module.automatic_optimization or not trainer.fit_loop.epoch_loop._should_accumulate():
        return {}
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def restore_gradients(module: LightningModule, gradients: dict[str, torch.Tensor]) -> None:
    named = dict(module.named_parameters())
    for name, gradient in gradients.items():
        named[name].grad = gradient.to(named[name].device, copy=True)


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
