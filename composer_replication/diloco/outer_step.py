"""The outer step on tensors: pseudo-gradient, Nesterov momentum, direct averaging, and a digest of the result.

Invariant: each float32 operation is elementwise and rounded by itself: multiply, then add, never fused. Such
operations give the same bits on every instruction set, thread count and device, which `torch.optim.SGD` does not
(some of its paths fuse a multiply with an add).

    g        <- mean / divisor                       (paper, appendix B.3; divisor 1 leaves the mean alone)
    momentum <- factor * momentum + g
    anchor   <- anchor - lr * (g + factor * momentum)

The coefficients are rounded to float32 once. On the CPU the work goes block by block, so that an element is touched by
every operation while it is in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import torch
import xxhash
from torch import Tensor

from composer_replication.collective.scratch import scratch

__all__ = ["OuterNesterov", "average_step_", "digest", "nesterov_step_", "pseudo_gradient"]

_BLOCK = 131_072  # elements: 512 KiB of each float32 operand; smaller blocks lose more to calls than they gain in cache


def _scalar(value: float, device: torch.device) -> Tensor:
    """A coefficient, rounded to float32 once, as a tensor beside the operands.

    Not a Python number: CUDA multiplies by the reciprocal of a number instead of dividing by it.
    """
    return torch.tensor(value, dtype=torch.float32).to(device)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Equal stretches of tensors of one shape. Whole tensors off the CPU, or if they can't be seen as flat."""
    first = tensors[0]
    for other in tensors[1:]:
        if other.shape != first.shape:
            raise ValueError(f"tensors must have one shape, got {list(first.shape)} and {list(other.shape)}")
    flat = all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors)
    if not flat:
        yield tensors
        return
    yield from zip(*(torch.split(tensor.view(-1), _BLOCK) for tensor in tensors), strict=True)


def _spare(purpose: str, block: Tensor) -> Tensor:
    return scratch(purpose, block.numel(), torch.float32, block.device).view(block.shape)


def pseudo_gradient(start: Tensor, local: Tensor, out: Tensor) -> Tensor:
    """`out = start - local` in float32: anchor minus local, so that the outer optimizer descends."""
    return torch.sub(start.detach(), local.detach(), out=out)


def nesterov_step_(
    anchor: Tensor,
    momentum: Tensor,
    mean: Tensor,
    *,
    lr: float,
    momentum_factor: float,
    divisor: float = 1.0,
    local: Tensor | None = None,
) -> None:
    """Take one outer step in place. All tensors have one shape and device; anchor, momentum and mean are float32.

    `local`, if given, is set to the new anchor, in its own dtype. `mean` is left as it is.
    """
    rate, factor = _scalar(lr, anchor.device), _scalar(momentum_factor, anchor.device)
    by = _scalar(divisor, mean.device) if divisor != 1.0 else None
    tensors = (anchor, momentum, mean) if local is None else (anchor, momentum, mean, local)
    for a, m, g, *rest in _blocks(*(tensor.detach() for tensor in tensors)):
        if by is not None:
            g = torch.div(g, by, out=_spare("outer mean", g))
        m.mul_(factor).add_(g)
        # `local` is about to be written anyway: working in it keeps one operand less in cache.
        room = rest[0] if rest and rest[0].dtype == torch.float32 else _spare("outer step", m)
        step = torch.mul(m, factor, out=room)
        step.add_(g).mul_(rate)
        a.sub_(step)
        for target in rest:
            target.copy_(a)


def average_step_(anchor: Tensor, mean: Tensor, *, local: Tensor | None = None) -> None:
    """Move the anchor to the mean of the replicas' values: `anchor - mean`, mean being that of the pseudo-gradients."""
    tensors = (anchor, mean) if local is None else (anchor, mean, local)
    for a, delta, *rest in _blocks(*(tensor.detach() for tensor in tensors)):
        a.sub_(delta)
        for target in rest:
            target.copy_(a)


def digest(named: Iterable[tuple[str, Tensor, Tensor]], text: str) -> str:
    """xxh3_128 over a state text and, for each slot in order, its name and every bit of its anchor and momentum."""
    hasher = xxhash.xxh3_128(text.encode())
    for name, anchor, momentum in named:
        hasher.update(name.encode())
        for tensor in (anchor, momentum):
            flat: Any = tensor.detach().cpu().contiguous()
            hasher.update(memoryview(flat.numpy()).cast("B"))
    return hasher.hexdigest()


class OuterNesterov(torch.optim.Optimizer):
    """The outer step as an optimizer whose gradients are pseudo-gradients, for torchft's DiLoCo or a loop by hand.

    The same arithmetic as `nesterov_step_`, bit for bit; `nesterov=False` steps along the momentum alone. Parameters
    and gradients are float32. Settings: `lr` > 0, 0 <= `momentum` < 1 (defaults: method, section 2).
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.7, momentum: float = 0.9, *, nesterov: bool = True) -> None:
        if not lr > 0.0:
            raise ValueError(f"lr must be greater than 0, got {lr}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be at least 0 and less than 1, got {momentum}")
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov})
        for group in self.param_groups:
            for index, parameter in enumerate(group["params"]):
                if parameter.dtype != torch.float32:
                    raise ValueError(f"parameter {index} must be float32, got {parameter.dtype}")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One outer step along each parameter's gradient; parameters without one stay as they are."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse or parameter.grad.dtype != torch.float32:
                    raise ValueError(f"gradients must be dense float32, got {parameter.grad.dtype}")
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                self._update(parameter, state["momentum_buffer"], group)
        return loss

    @staticmethod
    def _update(parameter: Tensor, momentum: Tensor, group: dict[str, Any]) -> None:
        assert parameter.grad is not None, "checked by the caller"
        if group["nesterov"]:
            nesterov_step_(parameter, momentum, parameter.grad, lr=group["lr"], momentum_factor=group["momentum"])
            return
        rate, factor = _scalar(group["lr"], parameter.device), _scalar(group["momentum"], parameter.device)
        for p, m, g in _blocks(parameter.detach(), momentum, parameter.grad.detach()):
            m.mul_(factor).add_(g)
            p.sub_(torch.mul(m, rate, out=_spare("outer step", m)))
