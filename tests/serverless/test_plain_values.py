"""Options of executors, and what lies in the store, by the types that they must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from composer_replication.diloco.serverless.groups import groups_of, make_executor, option_defaults, option_names
from composer_replication.diloco.serverless.handle import ReplicaHandle
from composer_replication.diloco.serverless.plain_values import fits
from composer_replication.errors import ExecutorError, RecipeError
from composer_replication.recipe import Recipe
from composer_replication.recipe.backends import BACKENDS
from composer_replication.recipe.schema import ExecutorSection


@pytest.mark.parametrize(
    ("value", "hint", "fitting"),
    [
        ("a", str, True),
        (1, str, False),
        (1, float, True),
        (1.0, int, False),
        (True, int, False),
        (True, bool, True),
        (None, str | None, True),
        (["a"], str | list[str] | None, True),
        ("ab", Sequence[str], False),
        (["a", 1], Sequence[str], False),
        ({"a": 1}, Mapping[str, str], False),
        ({"a": {"b": 1}}, Mapping[str, str | Mapping[str, Any]], True),
        (object(), Any, True),
    ],
)
def test_fits(value: Any, hint: Any, fitting: bool) -> None:
    assert fits(value, hint) is fitting


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("env", "A=1", "env must be a mapping of text to text or null, not a value of type str$"),
        ("env", {"TOKEN": "s3cr3t", "A": 1}, "of text to text or null, not 'A': a value of type int$"),
        ("secrets", {"TOKEN": "s3cr3t"}, "secrets must be a list of text, not 'TOKEN': a value of type str$"),
        ("gpu", 5, "gpu must be text or null, not 5"),
        ("volumes", {"/d": 5}, "volumes must be a mapping"),
        ("restarts", 2.5, "restarts must be a whole number, not 2.5"),
        ("max_concurrent_launches", None, "max_concurrent_launches must be a whole number, not None"),
        ("requirements", "torch", "requirements must be a list of text, not 'torch'"),
        ("time_limit_hours", float("inf"), "time_limit_hours must be more than 0 and at most"),
        ("time_limit_hours", 1e308, "time_limit_hours must be more than 0 and at most"),
    ],
)
def test_an_option_of_another_type_is_refused_by_its_name(name: str, value: Any, message: str) -> None:
    recipe = Recipe(executor=ExecutorSection(name="modal", options={name: value}))
    with pytest.raises(RecipeError, match=message):
        make_executor(groups_of(recipe)[0], recipe)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_the_defaults_are_of_the_types_that_are_asked_for(backend: str) -> None:
    defaults = option_defaults(backend)
    options = {name: defaults[name] for name in option_names(backend) if name in defaults}
    groups_of(Recipe(executor=ExecutorSection(name=backend, options=options)))


@pytest.mark.parametrize("values", [{}, {"replica_id": "0", "backend": "modal", "job_id": "x"}, {"job_id": None}])
def test_what_is_not_a_handle_is_refused(values: Any) -> None:
    with pytest.raises(ExecutorError, match="not a replica's handle"):
        ReplicaHandle.from_dict(values)
