"""The outer loop: `loop.OuterLoop` drives a replica's rounds, `outer_step` holds the arithmetic on tensors.

Importing this package loads nothing: `serverless` can describe and start replicas without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.diloco.loop import OuterLoop
    from composer_replication.diloco.outer_step import OuterNesterov
    from composer_replication.diloco.torchft_diloco import make_diloco_outer_loop

_HOME = {"OuterLoop": "loop", "OuterNesterov": "outer_step", "make_diloco_outer_loop": "torchft_diloco"}

__all__ = ["OuterLoop", "OuterNesterov", "make_diloco_outer_loop"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
