"""A causal language model of Transformers: from its name on the Hugging Face Hub or a folder. Needs `transformers`.

Invariant: no code that comes with a model is run; its weights are read by its own library's safe loader.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composer_replication.errors import RecipeError, StoreError

__all__ = ["DTYPES", "causal_lm", "load_error", "ready_to_train", "transformers_module"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "auto": "auto"}


def transformers_module() -> Any:
    """The library, or a RecipeError that says how to get it."""
    try:
        return import_module("transformers")
    except ImportError as error:
        raise RecipeError(
            f"causal language models need transformers ({error}): pip install 'composer-replication[transformers]'"
        ) from error


def causal_lm(
    *,
    path: str,
    dtype: str = "float32",
    pretrained: bool = True,
    revision: str | None = None,
    gradient_checkpointing: bool = False,
) -> nn.Module:
    """A model that maps token ids (batch, time) to an output with `logits` (batch, time, vocabulary), ready to train.

    Args:
        path: its name on the Hub (`owner/name`), or a folder with its config.json.
        dtype: of weights, gradients and the inner optimizer's state; "auto" for that of the files. With bfloat16 all
            take half the memory, and steps below a 256th of a weight round away (those of norms, near 1); float32
            with `training.precision: bf16-mixed` keeps them.
        pretrained: False for fresh weights of the same shape, drawn from torch's generator.
        revision: branch, tag or commit on the Hub.
        gradient_checkpointing: compute activations a second time rather than keep them.

    Raises ValueError for what can't be loaded, StoreError while the Hub can't be reached, RecipeError without
    transformers.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    library = transformers_module()
    where: dict[str, Any] = {"revision": revision} if revision else {}
    auto = library.AutoModelForCausalLM
    try:
        if pretrained:
            model = auto.from_pretrained(path, dtype=DTYPES[dtype], **where)
        else:
            config = library.AutoConfig.from_pretrained(path, **where)
            model = auto.from_config(config, dtype=getattr(config, "dtype", None) if dtype == "auto" else DTYPES[dtype])
    except (OSError, ValueError, KeyError) as error:
        raise load_error(path, "model", error) from error
    return ready_to_train(model, gradient_checkpointing)


def ready_to_train(model: Any, gradient_checkpointing: bool) -> nn.Module:
    """One of the library's models as a trainer wants it."""
    model.config.use_cache = False  # keys and values of the past are for generating
    if gradient_checkpointing:
        # Transformers 5 has another name for it, and will drop this one.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    return model.train()  # it comes ready to be asked


def load_error(path: str, what: str, error: Exception) -> Exception:
    """For a failed `from_pretrained`: StoreError if the Hub didn't answer, ValueError if it can't work."""
    words = " ".join(str(error).split())
    hub_name = not Path(path).is_dir()
    if hub_name and _out_of_reach(error):
        return StoreError(f"the {what} {path} is neither in the cache nor can the Hub be reached: {words}")
    hint = "" if "/" in path or not hub_name else " (on the Hub a model is owner/name)"
    return ValueError(f"the {what} {path!r} can't be loaded{hint}: {words}")


def _out_of_reach(error: BaseException | None) -> bool:
    while error is not None:
        name = type(error).__name__
        if name in ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "Timeout"):
            return True
        error = error.__cause__ or error.__context__
    return False
