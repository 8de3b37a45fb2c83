"""Zero-edit mode: the callback for every Trainer of a program, asked for by the environment.

Lightning calls `callbacks` through the entry point `lightning.pytorch.callbacks_factory` for each Trainer that is built
where this package is installed. Invariant: without COMPOSER_REPLICATION_ENABLE=1 it gives nothing and imports nothing.
"""

from __future__ import annotations

import json
import os
from typing import Any

from composer_replication.isolate import ENABLE, SETTINGS

__all__ = ["callbacks"]


def callbacks() -> list[Any]:
    """[] or [AutoLoCoCallback], with the keyword arguments in the JSON file that COMPOSER_REPLICATION_SETTINGS names.

    Store and identity come from the environment too (`composer_replication.isolate`). Raises ValueError if the
    settings are missing, can't be read or can't work.
    """
    if os.environ.get(ENABLE) != "1":
        return []
    path = os.environ.get(SETTINGS)
    if not path:
        raise ValueError(
            f"{ENABLE}=1 needs {SETTINGS}: the path of a JSON file with AutoLoCoCallback's arguments, "
            'e.g. {"base_horizon": 500}'
        )
    try:
        with open(path, encoding="utf-8") as file:
            settings = json.load(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{SETTINGS}={path} can't be read: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{SETTINGS}={path} must hold a JSON object, got a {type(settings).__name__}")
    from composer_replication.lightning import AutoLoCoCallback

    return [AutoLoCoCallback(**settings)]
