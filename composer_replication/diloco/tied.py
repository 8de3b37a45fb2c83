"""Which names of a model mean the same parameter."""

from __future__ import annotations

from torch import nn

__all__ = ["tied_names"]


def tied_names(model: nn.Module) -> dict[str, str]:
    """Each further name of a parameter that has several, with its first one, which it is shared under."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for wrapped, parameter in model.named_parameters(remove_duplicate=False):
        name = wrapped.replace("_orig_mod.", "")  # as in the plain model, whether or not torch.compile has wrapped it
        known = first.setdefault(id(parameter), name)
        if known != name:
            tied[name] = known
    return tied
