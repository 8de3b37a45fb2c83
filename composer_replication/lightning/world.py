"""The processes of one Trainer, where a replica is several: which strategies can be one, and how SIGTERM is heard.

Invariant: no signal handler speaks with another process. Lightning's own broadcasts from inside one, which pairs with
whatever the other ranks are doing; the ranks of a replica tell each other at the end of a batch instead.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

__all__ = ["check_strategy", "hear_sigterm"]


def check_strategy(trainer: Trainer) -> None:
    """Raises ValueError for a strategy that keeps the model where rank 0 can't reach it."""
    strategy = trainer.strategy
    if trainer.world_size > 1 and not isinstance(strategy, (DDPStrategy, ModelParallelStrategy)):
        raise ValueError(
            f"a replica of {trainer.world_size} processes can't use {type(strategy).__name__}: use "
            "strategy='local_replica' (DDP inside the replica) or 'local_replica_fsdp' (FSDP2 inside it)"
        )


def hear_sigterm(trainer: Trainer, told: Callable[[], None]) -> None:
    """From now until the fit's end SIGTERM calls `told`, in the place of Lightning's own handler."""
    if threading.current_thread() is not threading.main_thread():
        return  # Lightning has set none either
    connector: Any = trainer._signal_connector
    handlers: list[Any] | None = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", None)

    def handler(signum: int, frame: Any) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signum)  # type: ignore[arg-type]  # the children that Lightning started
        told()

    for index, one in enumerate(handlers or ()):
        if getattr(one, "__func__", None) is type(connector)._sigterm_notifier_fn:
            assert handlers is not None
            handlers[index] = handler
