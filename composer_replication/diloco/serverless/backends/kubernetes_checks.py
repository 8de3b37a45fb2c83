"""Whether what a manifest names is in the cluster: found out before anything starts.

Invariant: what these credentials may not look at passes, since whoever may start jobs need not see the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from composer_replication.diloco.serverless.backends.client import check_known
from composer_replication.diloco.serverless.backends.kubernetes_client import Api, Forbidden, Missing
from composer_replication.diloco.serverless.backends.pods import PodSettings
from composer_replication.errors import ExecutorError

__all__ = ["Reference", "check_nodes", "check_references"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reference:
    """A setting that names something of the cluster; `read` gets it, `names` all of its kind."""

    what: str
    name: str
    read: Callable[..., Any]
    names: Callable[..., Any] | None = None  # None: such as Secrets, which aren't to be listed for a hint


def check_references(api: Api, references: Iterable[Reference]) -> None:
    """Raise ValueError for the first that isn't there, with the nearest name that is.

    Raises Missing where the cluster has no such kind of thing at all.
    """
    for one in references:
        try:
            api.call(one.read)
        except Forbidden:
            continue
        except Missing as error:
            known = _names(api, one)
            if known:
                check_known(one.what, one.name, known)
            raise ValueError(f"{one.what} {one.name!r} isn't known in this cluster: {error}") from error


def check_nodes(api: Api, pod: PodSettings) -> None:
    """Raise ValueError if the nodes offer devices, but none of the pod's name. Clusters may make nodes on demand, so
    labels that none has now are only told."""
    try:
        nodes = api.call(api.core.list_node).items
    except Forbidden:
        return
    offered = {name for node in nodes for name in node.status.allocatable or {} if "/" in name}
    if offered and pod.gpus:
        check_known("gpu_resource", pod.gpu_resource, offered)
    for label, value in pod.node_selector.items():
        there = {str(node.metadata.labels[label]) for node in nodes if label in (node.metadata.labels or {})}
        if value not in there:
            has = f"; there are {', '.join(sorted(there))}" if there else ""
            logger.warning("node_selector: no node has %s=%s now%s", label, value, has)


def _names(api: Api, reference: Reference) -> list[str]:
    if reference.names is None:
        return []
    try:
        found = api.call(reference.names)
    except Missing:
        raise
    except ExecutorError:
        return []
    if isinstance(found, dict):
        return [one["metadata"]["name"] for one in found["items"]]
    return [one.metadata.name for one in found.items]
