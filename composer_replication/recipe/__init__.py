"""One YAML file says everything about a run. Needs the extra `recipe` (OmegaConf)."""

from __future__ import annotations

from composer_replication.recipe.load import claim_folder, load_recipe, recipe_from, to_yaml, with_group
from composer_replication.recipe.schema import (
    AutoLoCoSection,
    DataSection,
    ExecutorSection,
    FleetSection,
    GroupSection,
    LoggingSection,
    ModelSection,
    OptimizerSection,
    Recipe,
    SchedulerSection,
    StoreSection,
    TrainingSection,
)
from composer_replication.recipe.settings import controller_config, outer_config, policy_of, task_of

__all__ = [
    "AutoLoCoSection",
    "DataSection",
    "ExecutorSection",
    "FleetSection",
    "GroupSection",
    "LoggingSection",
    "ModelSection",
    "OptimizerSection",
    "Recipe",
    "SchedulerSection",
    "StoreSection",
    "TrainingSection",
    "claim_folder",
    "controller_config",
    "load_recipe",
    "outer_config",
    "policy_of",
    "recipe_from",
    "task_of",
    "to_yaml",
    "with_group",
]
