"""One mean for every machine: added in order, with no rounding made good again."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

from composer_replication import autoloco
from composer_replication.autoloco.means import mean

TINY = 2.0**-53  # half the last bit of 1.0


def test_it_is_added_in_order_and_each_sum_is_rounded() -> None:
    assert mean([1.0, TINY, TINY]) == 1.0 / 3.0
    assert mean([TINY, TINY, 1.0]) == (1.0 + 2.0 * TINY) / 3.0 != 1.0 / 3.0
    assert mean(iter([3.0])) == 3.0


def test_there_is_none_of_nothing() -> None:
    assert math.isnan(mean([]))
    assert math.isnan(mean([1.0, math.nan]))


@pytest.mark.parametrize("path", sorted(Path(autoloco.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_nothing_that_replicas_decide_by_is_added_by_sum(path: Path) -> None:
    """`sum` of floats has other last bits from Python 3.12 on: a fleet of two Pythons would part. Counting is fine."""
    found = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "sum"
        if not (isinstance(node.args[0], ast.GeneratorExp) and isinstance(node.args[0].elt, ast.Constant))
    ]
    assert found == []
