"""A collective whose replicas meet in an object store. See docs/protocol.md."""

from __future__ import annotations

from composer_replication.collective.object_store.collective import ObjectStoreCollective
from composer_replication.collective.object_store.sealing import begin_epoch

__all__ = ["ObjectStoreCollective", "begin_epoch"]
