"""`ObjectStoreAllReduce` under the name by which the design document's entry point imports it; use `allreduce`."""

from __future__ import annotations

from composer_replication.diloco.serverless.allreduce import ObjectStoreAllReduce

__all__ = ["ObjectStoreAllReduce"]
