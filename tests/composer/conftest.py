"""Composer warns of its own dependencies when it is imported; tests count other people's warnings as errors."""

from __future__ import annotations

import logging
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import composer  # noqa: F401
    except ModuleNotFoundError:
        pass  # the tests skip themselves

logging.getLogger("composer").setLevel(logging.ERROR)
