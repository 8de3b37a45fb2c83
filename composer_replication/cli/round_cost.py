"""What a round of a recipe's fleet comes to, for the commands that say so beforehand."""

from __future__ import annotations

from typing import Any

from composer_replication.collective.object_store.costs import Link, busiest_share
from composer_replication.diloco.serverless.components import parameter_count
from composer_replication.recipe import Recipe

__all__ = ["round_cost"]


def round_cost(recipe: Recipe, elements: int | None, bandwidth: float) -> dict[str, Any] | None:
    """Bytes of the busiest replica and seconds of a round, at `bandwidth` Mbit/s each way; None if nobody knows how
    large the model is (`elements` None, and not to be told from the recipe)."""
    if elements is None:
        elements = parameter_count(recipe)
    if elements is None:
        return None
    link = Link(up=bandwidth * 1e6 / 8, down=bandwidth * 1e6 / 8)
    slowest, seconds = busiest_share(recipe.fleet.replicas, elements, recipe.codec, link)
    return {
        "parameters": elements,
        "codec": recipe.codec,
        "bandwidth_mbit": bandwidth,
        "up_bytes": slowest.up_bytes,
        "down_bytes": slowest.down_bytes,
        "requests": slowest.puts + slowest.gets,
        "seconds": seconds,
    }
