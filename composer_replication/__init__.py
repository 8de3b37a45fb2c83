"""Train one model on GPUs that sit far apart, synchronising through nothing but an object store.

Names of the trainers' adapters resolve when they are asked for: importing this package loads no trainer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer_replication.autoloco import (
        AutoLoCoConfig,
        AutoLoCoPolicy,
        FixedPolicy,
        LinearPolicy,
        OuterConfig,
        QSRPolicy,
        StaircasePolicy,
        make_policy,
    )
    from composer_replication.collective.in_process import InProcessFleet
    from composer_replication.collective.object_store import ObjectStoreCollective
    from composer_replication.collective.process_group import ProcessGroupCollective
    from composer_replication.collective.regrouping import RegroupingCollective
    from composer_replication.collective.rendezvous import Rendezvous
    from composer_replication.collective.torchft_manager import TorchftCollective
    from composer_replication.diloco.loop import OuterLoop
    from composer_replication.diloco.outer_step import OuterNesterov
    from composer_replication.errors import ReplicationError
    from composer_replication.lightning import AutoLoCoCallback, LocalReplicaFSDPStrategy, LocalReplicaStrategy

__version__ = "0.1.0"

_HOME = {
    "AutoLoCoCallback": "lightning",
    "AutoLoCoConfig": "autoloco",
    "AutoLoCoPolicy": "autoloco",
    "FixedPolicy": "autoloco",
    "InProcessFleet": "collective.in_process",
    "LinearPolicy": "autoloco",
    "LocalReplicaFSDPStrategy": "lightning",
    "LocalReplicaStrategy": "lightning",
    "ObjectStoreCollective": "collective.object_store",
    "OuterConfig": "autoloco",
    "OuterLoop": "diloco.loop",
    "OuterNesterov": "diloco.outer_step",
    "ProcessGroupCollective": "collective.process_group",
    "QSRPolicy": "autoloco",
    "RegroupingCollective": "collective.regrouping",
    "Rendezvous": "collective.rendezvous",
    "ReplicationError": "errors",
    "StaircasePolicy": "autoloco",
    "TorchftCollective": "collective.torchft_manager",
    "make_policy": "autoloco",
}

__all__ = [
    "AutoLoCoCallback",
    "AutoLoCoConfig",
    "AutoLoCoPolicy",
    "FixedPolicy",
    "InProcessFleet",
    "LinearPolicy",
    "LocalReplicaFSDPStrategy",
    "LocalReplicaStrategy",
    "ObjectStoreCollective",
    "OuterConfig",
    "OuterLoop",
    "OuterNesterov",
    "ProcessGroupCollective",
    "QSRPolicy",
    "RegroupingCollective",
    "Rendezvous",
    "ReplicationError",
    "StaircasePolicy",
    "TorchftCollective",
    "make_policy",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
