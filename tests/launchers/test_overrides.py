"""Executors are built on shared ones: what they override by accident would be called with another's arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from composer_replication.diloco.serverless.groups import executor_class
from composer_replication.diloco.serverless.mixed import MixedExecutor
from composer_replication.recipe.backends import BACKENDS


def overrides(kind: type) -> Iterator[tuple[str, Any, Any]]:
    """(name, what a class has under it, what one below it has) for methods of a class's own."""
    ours = [one for one in kind.__mro__ if one.__module__.startswith(("composer_replication.", __name__))]
    for number, lower in enumerate(ours):
        for base in ours[number + 1 :]:
            for name, method in vars(base).items():
                if name.startswith("_") and not name.startswith("__") and inspect.isfunction(method):
                    if name in vars(lower):
                        yield name, method, vars(lower)[name]


def parameters(method: Any) -> Any:
    if not inspect.isfunction(method):
        return method
    return [(one.name, one.kind) for one in inspect.signature(method).parameters.values()]


@pytest.mark.parametrize("kind", [*map(executor_class, BACKENDS), MixedExecutor])
def test_no_executor_has_another_method_under_the_name_of_one_of_its_base(kind: type) -> None:
    found = list(overrides(kind))
    assert any(name == "_submit" for name, _, _ in found)
    assert [name for name, base, lower in found if parameters(base) != parameters(lower)] == []


def test_an_accident_is_seen() -> None:
    class Unlucky(executor_class("vertex")):
        def _by_job_name(self, display_name: str) -> None: ...

    assert [name for name, base, lower in overrides(Unlucky) if parameters(base) != parameters(lower)] == [
        "_by_job_name"
    ]
