"""Shared fixtures: one seed, one thread, and a way to rewrite golden files on purpose."""

from __future__ import annotations

import pytest
import torch

pytest_plugins = ["tests.support.store_fixtures"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="rewrite the golden files instead of comparing")


@pytest.fixture
def write_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--write-golden"))


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(1234)
    torch.set_num_threads(1)
