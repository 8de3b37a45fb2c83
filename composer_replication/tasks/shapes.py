"""A built-in model without its weights: how large it is, and what others' weights are put into.

Invariant: no memory is taken for weights, and of a model on the Hub only its config is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from composer_replication.tasks.causal_lm import load_error, transformers_module

__all__ = ["model_shapes", "trained_parameters"]


def trained_parameters(name: str, make: Callable[..., nn.Module], args: Mapping[str, Any]) -> int:
    """How many the built-in model `name` has. Raises what `make` raises."""
    return sum(p.numel() for p in model_shapes(name, make, args).parameters() if p.requires_grad)


def model_shapes(name: str, make: Callable[..., nn.Module], args: Mapping[str, Any]) -> nn.Module:
    """The built-in model `name`, which `make` makes from `args`, on the meta device. Raises what `make` raises."""
    args = dict(args)
    # What a library imports when it is first asked for a model can't be imported while tensors are only shapes.
    if name == "llama":
        _ = transformers_module().LlamaForCausalLM
    elif name == "causal_lm":
        args["pretrained"] = False
        _import_code(args["path"], args.get("revision"))
    with torch.device("meta"):
        return make(**args)


def _import_code(path: str, revision: str | None) -> None:
    library = transformers_module()
    try:
        config = library.AutoConfig.from_pretrained(path, **({"revision": revision} if revision else {}))
        _ = library.AutoModelForCausalLM._model_mapping[type(config)]
    except (OSError, ValueError, KeyError) as error:
        raise load_error(path, "model", error) from error
