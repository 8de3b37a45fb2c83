"""These tests see none of the machine's credentials."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _environment(store_environment: None) -> None:
    """tests/support/store_fixtures.py has it."""
