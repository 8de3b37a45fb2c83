"""Lightning's tips and start-up lines would drown a failing test's output."""

from __future__ import annotations

import logging

import lightning.pytorch  # noqa: F401  (sets its own level when imported)

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
