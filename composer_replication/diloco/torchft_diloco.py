"""torchft's DiLoCo, set up in one call: over our manager, or over torchft's own.

Invariant: the outer step descends along anchor minus local, as torchft computes it; float32 fragments take the very
step that `OuterLoop` takes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composer_replication.diloco.outer_step import OuterNesterov

if TYPE_CHECKING:
    from torchft.local_sgd import DiLoCo

__all__ = ["make_diloco_outer_loop"]


def make_diloco_outer_loop(
    manager: Any,
    model_fragments: Sequence[nn.Module],
    inner_optimizer: torch.optim.Optimizer,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    sync_every: int = 500,
    *,
    backup_device: torch.device | None = None,
    pin_memory: bool = True,
    use_bucketization: bool = False,
    bucket_cap_mb: int | None = None,
    should_quantize: bool = False,
    fragment_sync_delay: int = 0,
    fragment_update_alpha: float = 0.0,
) -> DiLoCo:
    """torchft's DiLoCo: inside `with`, each `sync_every`th step of the inner optimizer ends in an outer step.

    Args:
        manager: an `ObjectStoreManager` (`MockManager`), an `ObjectStoreAllReduce`, or a `torchft.Manager`.
        model_fragments: the model's parts, in order: [model], or several for Streaming DiLoCo, of which each is shared
            once in `sync_every` steps.
        inner_optimizer: whose steps are counted.
        outer_lr, outer_momentum, nesterov: the outer step.
        sync_every: inner steps between two exchanges of one fragment; a multiple of the number of fragments.
        backup_device, pin_memory, use_bucketization, bucket_cap_mb, should_quantize, fragment_sync_delay,
            fragment_update_alpha: torchft's own.

    Over our managers all replicas begin with the weights of the lowest replica id, and a delayed exchange sets out at
    once. Fragments in float32 take `OuterNesterov`'s steps, others those of `torch.optim.SGD` in their own dtype.

    Raises ImportError without torchft; ValueError for settings that can't be, among them a parameter in two fragments,
    and buckets that don't hold their fragment (torchft 0.2 leaves tensors out of the exchange then, without a word);
    and what `Collective.start` raises.
    """
    try:
        from torchft.local_sgd import DiLoCo
    except ImportError as error:
        raise ImportError(
            "make_diloco_outer_loop needs torchft: pip install 'composer-replication[torchft]'"
        ) from error
    fragments = list(model_fragments)
    if not fragments:
        raise ValueError("model_fragments is empty: [model] shares the whole model")
    _check_apart(fragments)
    if use_bucketization:
        _check_buckets(fragments, bucket_cap_mb)
    outer = [_outer_optimizer(fragment, outer_lr, outer_momentum, nesterov) for fragment in fragments]
    launch: Callable[[], None] | None = getattr(manager, "launch", None)

    class Launching(DiLoCo):
        """An exchange with a delay sets out right after the step that prepared it."""

        def __enter__(self) -> DiLoCo:
            super().__enter__()
            if launch is not None:  # hooks run in the order of their registration
                self._hooks.append(inner_optimizer.register_step_post_hook(_hook(launch)))
            return self

    share = getattr(manager, "share", None)
    if share is not None:
        share(_floating_state(fragments))
    return Launching(
        manager,
        fragments,
        inner_optimizer,
        outer,
        sync_every,
        backup_device=backup_device,
        pin_memory=pin_memory,
        use_bucketization=use_bucketization,
        bucket_cap_mb=bucket_cap_mb,
        should_quantize=should_quantize,
        fragment_sync_delay=fragment_sync_delay,
        fragment_update_alpha=fragment_update_alpha,
    )


def _hook(launch: Callable[[], None]) -> Callable[..., None]:
    return lambda *_: launch()


def _outer_optimizer(fragment: nn.Module, lr: float, momentum: float, nesterov: bool) -> torch.optim.Optimizer:
    parameters = list(fragment.parameters())
    if all(parameter.dtype == torch.float32 for parameter in parameters):
        return OuterNesterov(parameters, lr=lr, momentum=momentum, nesterov=nesterov)
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)


def _floating_state(fragments: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Parameters and persistent floating-point buffers by fragment and name."""
    return {
        f"{index}.{name}": tensor
        for index, fragment in enumerate(fragments)
        for name, tensor in fragment.state_dict().items()
        if tensor.is_floating_point()
    }


def _check_apart(fragments: Sequence[nn.Module]) -> None:
    owner: dict[int, int] = {}
    for index, fragment in enumerate(fragments):
        for name, parameter in fragment.named_parameters():
            first = owner.setdefault(id(parameter), index)
            if first != index:
                raise ValueError(
                    f"model_fragments: {name} of fragment {index} is in fragment {first}, too, and would take two "
                    "outer steps: put tied parameters into one fragment"
                )


def _check_buckets(fragments: Sequence[nn.Module], bucket_cap_mb: int | None) -> None:
    cap = (1 << 30) if bucket_cap_mb is None else int(bucket_cap_mb * 1024 * 1024)
    for index, fragment in enumerate(fragments):
        parameters = list(fragment.parameters())
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        if size > cap:
            raise ValueError(
                f"use_bucketization: fragment {index} has {size} bytes, a bucket {cap}: torchft leaves tensors out of "
                f"the exchange then; set bucket_cap_mb to at least {-(-size // (1024 * 1024))}, or leave "
                "use_bucketization out (over our managers a fragment is one round without it)"
            )
        if len({parameter.dtype for parameter in parameters}) > 1:
            raise ValueError(f"use_bucketization: fragment {index} mixes dtypes, which one bucket can't hold")
