"""A dry run's look at the data: the first batches, as a replica on this machine would have them.

Invariant: of a store no more is fetched than those batches take, of the Hub nothing; what wasn't read is said.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from composer_replication import tasks
from composer_replication.diloco.serverless.components import build_data
from composer_replication.diloco.serverless.groups import environment_of, groups_of
from composer_replication.diloco.serverless.spec import environment_with
from composer_replication.errors import RecipeError, StoreError
from composer_replication.recipe import Recipe

__all__ = ["try_data"]

_ON_THE_HUB = "{} is on the Hub, from which a dry run fetches no data"


def try_data(recipe: Recipe) -> str:
    """What was read, in words, or why nothing was. Raises RecipeError for what a replica couldn't read, StoreError
    while a store doesn't answer."""
    here = next((group for group in groups_of(recipe) if not group.remote), None)
    if here is None:
        return "not read: the replicas run elsewhere"
    with environment_with(environment_of(here, recipe)):
        why = _why_not(recipe)
        return f"not read: {why}" if why else _read(recipe)


def _read(recipe: Recipe) -> str:
    section = recipe.data
    args = {**section.args, "workers": 0}
    if section.name in tasks.LARGE:
        args["trial"] = True
    data = build_data(replace(recipe, data=replace(section, args=args)))
    try:
        batches = [next(iter(loader), None) for loader in (data.train_dataloader(), data.val_dataloader())]
    except ValueError as error:  # of a row that only reading shows
        raise RecipeError(f"data.args: {error}") from error
    train, held = map(_size, batches)
    return f"read as far as the first batch for training ({train}) and the first for validation ({held}) take"


def _why_not(recipe: Recipe) -> str:
    args = recipe.data.args
    if recipe.data.name is None:
        return "data of your own (data.class) isn't made before a replica runs"
    dataset = args.get("dataset")
    if dataset is not None and not Path(str(dataset)).is_dir():
        return _ON_THE_HUB.format(dataset)
    text = os.environ.get(tasks.DATA_URI) if recipe.data.name == "text_lm" else None
    for uri in (args.get("uri") or text, args.get("validation_uri")):
        if uri is not None and "hf://" in str(uri).lower():
            return _ON_THE_HUB.format(str(uri).partition("?")[0])
    if "tokenizer" not in args:
        return ""
    from composer_replication.tasks.sources import load_tokenizer

    try:
        load_tokenizer(args["tokenizer"], args.get("revision"), fetch=False)
    except ValueError as error:
        raise RecipeError(f"data.args.tokenizer: {error}") from error
    except StoreError:
        return f"the tokenizer {args['tokenizer']} isn't in this machine's cache, and a dry run fetches none"
    return ""


def _size(batch: Any) -> str:
    if batch is None:
        return "nothing"
    examples, tokens = batch["input_ids"].shape
    return f"{examples} × {tokens} tokens"
