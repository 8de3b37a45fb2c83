"""A run's shared weights as a folder of Transformers': what lm-evaluation-harness, vLLM and others read.

Invariant: the folder has each of the model's tensors as the fleet shared it, and none that isn't from there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from composer_replication.diloco.export import SharedWeights
from composer_replication.diloco.serverless.components import resolve
from composer_replication.errors import RecipeError
from composer_replication.recipe import Recipe
from composer_replication.tasks import MODELS
from composer_replication.tasks.conversations import PLAIN_TEMPLATE
from composer_replication.tasks.shapes import model_shapes
from composer_replication.tasks.sources import load_tokenizer

__all__ = ["write_folder"]

_WRAPPED = "model."  # what both trainers' wrappers call the model


def write_folder(weights: SharedWeights, recipe: Recipe, folder: Path) -> None:
    """Weights, config and, if the recipe's data have one, tokenizer. Raises RecipeError, ValueError."""
    name, args = recipe.model.name, recipe.model.args
    if name not in ("llama", "causal_lm"):
        raise RecipeError(f"model.name: a folder of Transformers' needs llama or causal_lm, not {name or 'your own'}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already: give another name")
    model: Any = model_shapes(name, resolve(MODELS[name], "model.name"), args)
    plain = {name.removeprefix(_WRAPPED): tensor for name, tensor in weights.tensors.items()}
    _fit(model.state_dict(), plain)
    model.load_state_dict(plain, assign=True)
    model.tie_weights()
    tokenizer = load_tokenizer(path, recipe.data.args.get("revision")) if (path := _tokenizer(recipe)) else None
    model.config.use_cache = True  # it is going to be asked
    model.save_pretrained(folder)
    if tokenizer is not None:
        if recipe.data.name == "conversations":  # asked in the form that it was trained in
            own = recipe.data.args.get("chat_template") or tokenizer.chat_template
            tokenizer.chat_template = own or PLAIN_TEMPLATE
        tokenizer.save_pretrained(folder)


def _fit(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Raise ValueError unless these are the model's tensors."""
    for one, other, what in ((wanted, found, "the run has no"), (found, wanted, "the recipe's model has no")):
        missing = sorted(one.keys() - other.keys())
        if missing:
            raise ValueError(f"{what} {missing[0]} (and {len(missing) - 1} more): is this the run's recipe?")
    for name, tensor in wanted.items():
        if tensor.shape != found[name].shape:
            shapes = f"{list(found[name].shape)} in the run, {list(tensor.shape)} in the recipe's model"
            raise ValueError(f"{name} is {shapes}: is this the run's recipe?")


def _tokenizer(recipe: Recipe) -> str | None:
    return recipe.data.args.get("tokenizer") if recipe.data.name is not None else None
