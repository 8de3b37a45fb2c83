"""One mean for every machine: added in order, with no rounding made good again."""

from __future__ import annotations

import math

from composer_replication.autoloco.means import mean

TINY = 2.0**-53  # half the last bit of 1.0


def test_it_is_added_in_order_and_each_sum_is_rounded() -> None:
    assert mean([1.0, TINY, TINY]) == 1.0 / 3.0
    assert mean([TINY, TINY, 1.0]) == (1.0 + 2.0 * TINY) / 3.0 != 1.0 / 3.0
    assert mean(iter([3.0])) == 3.0


def test_there_is_none_of_nothing() -> None:
    assert math.isnan(mean([]))
    assert math.isnan(mean([1.0, math.nan]))
