"""Composer warns of its own dependencies and leftovers; tests count other people's warnings as errors."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import composer  # noqa: F401
    except ModuleNotFoundError:
        pass  # the tests skip themselves

logging.getLogger("composer").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _collected_here() -> Iterator[None]:
    """Its CheckpointSaver leaves temporary folders to the garbage collector: collect them before the next test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
