"""The model's tensors: which of them are shared, and how this process holds one.

Invariant: a tensor is written from float32 values of its whole, so that it makes no difference where its parts are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

__all__ = ["Held", "named_tensors", "reshard"]


def _canonical(name: str) -> str:
    """The name that a tensor has in the plain model, whether or not torch.compile has wrapped it."""
    return name.replace("_orig_mod.", "")


def named_tensors(model: nn.Module | Mapping[str, Tensor], buffers: bool) -> Iterator[tuple[str, Tensor, str]]:
    """Parameters, and persistent floating-point buffers if wanted, by canonical name; tied tensors once."""
    if not isinstance(model, nn.Module):
        for name, tensor in model.items():
            yield name, tensor, "parameter"
        return
    for name, parameter in model.named_parameters():
        yield _canonical(name), parameter, "parameter"
    if not buffers:
        return
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            persistent = name not in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
            if persistent and buffer.is_floating_point() and id(buffer) not in seen:
                seen.add(id(buffer))
                yield _canonical(f"{prefix}.{name}" if prefix else name), buffer, "buffer"


def reshard(model: nn.Module | Mapping[str, Tensor]) -> None:
    """Drop the gathered copies of FSDP2's parameters: after an evaluation some are still there, and would go stale."""
    if isinstance(model, nn.Module):
        for module in model.modules():
            if hasattr(module, "set_requires_gradient_sync") and hasattr(module, "reshard"):  # an FSDPModule
                module.reshard()  # pyright: ignore[reportCallIssue]


class Held:
    """A tensor that this process holds whole."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        if type(tensor).__name__ == "DTensor":
            raise ValueError(
                f"{name} is sharded (DTensor): only the trainers' adapters share a model that is spread over processes"
            )
        self.name, self.tensor = name, tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def elements(self) -> int:
        return self.tensor.numel()

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flat tensor, in its own dtype; a view where it can be one."""
        return self.tensor.detach().reshape(-1)[start:stop]

    def view(self, start: int, stop: int) -> Tensor | None:
        """The same to write into, or None: then `write` is the only way. After writing call `written`."""
        return self.tensor.detach().view(-1)[start:stop] if self.tensor.is_contiguous() else None

    def written(self, anchor: Tensor, start: int, stop: int) -> None:
        """The elements [start, stop) of `anchor`, which is the whole tensor's, were written through `view`."""

    def write(self, anchor: Tensor, start: int, stop: int) -> None:
        """Take elements [start, stop) of `anchor`: 1-D, of the whole tensor."""
        flat = self.view(start, stop)
        if flat is not None:
            flat.copy_(anchor[start:stop])
        elif stop == self.elements:  # can't be seen as flat: once, with its last part
            self.tensor.detach().copy_(anchor.view(self.shape))

    def keep(self) -> Tensor:
        """A copy of what this process holds, for `put_back`."""
        return self.tensor.detach().clone()

    def put_back(self, kept: Tensor) -> None:
        self.tensor.detach().copy_(kept)
