"""The API of a Kubernetes cluster, through `kubernetes`: the way to it, its errors in our words, and a pod's log.

Facts of the service that this rests on: a kubeconfig's plug-in that fails leaves requests without credentials, which
then come from `system:anonymous`; a quota that is used up is 403; a log that is followed may end before its container,
with the connection.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from composer_replication.diloco.serverless.backends.client import answer, client_module
from composer_replication.diloco.serverless.executor import BackendUnavailable, QuotaExceeded
from composer_replication.errors import ExecutorError

__all__ = ["EXTRA", "Api", "Exists", "Forbidden", "Missing"]

EXTRA = "kubernetes"
_CALL_SECONDS = 30  # whole numbers: older clients take no others
_SILENT_LOG_SECONDS = 600  # then the connection is made anew: it may be dead


class Missing(ExecutorError):
    """404: no such thing."""


class Exists(ExecutorError):
    """409: there is one of that name."""


class Forbidden(ExecutorError):
    """403: these credentials may not."""


class Api:
    """One cluster, with the credentials that kubectl would use."""

    def __init__(self, kubeconfig: str | None = None, context: str | None = None) -> None:
        self.kubeconfig = kubeconfig
        self.context = context

    @cached_property
    def client(self) -> Any:
        models = self.models
        config = client_module("kubernetes.config", EXTRA)
        path = self.kubeconfig or os.environ.get("KUBECONFIG")
        try:
            if path or "KUBERNETES_SERVICE_HOST" not in os.environ or Path("~/.kube/config").expanduser().exists():
                return config.new_client_from_config(config_file=path, context=self.context, persist_config=False)
            own = models.Configuration()
            config.load_incluster_config(client_configuration=own)
            return models.ApiClient(own)
        except Exception as error:  # a loader's: missing or broken files, unknown contexts, plug-ins
            where = path or "~/.kube/config"
            wanted = f", context {self.context!r}" if self.context else ""
            raise ExecutorError(f"no way to a Kubernetes cluster through {where}{wanted}: {_first(error)}") from error

    @property
    def models(self) -> Any:
        return client_module("kubernetes.client", EXTRA)

    @cached_property
    def core(self) -> Any:
        return self.models.CoreV1Api(self.client)

    @cached_property
    def scheduling(self) -> Any:
        return self.models.SchedulingV1Api(self.client)

    @cached_property
    def objects(self) -> Any:
        return self.models.CustomObjectsApi(self.client)

    def call(self, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        return answer(lambda: function(*args, _request_timeout=_CALL_SECONDS, **more), translated)

    def pod_lines(self, pod: str, namespace: str, container: str | None) -> Iterator[str]:
        """A pod's log from its first line, as it comes. Nothing if the pod has just gone."""
        timeout = (_CALL_SECONDS, _SILENT_LOG_SECONDS)
        more = {"container": container} if container else {}
        try:
            answer = self.core.read_namespaced_pod_log(
                pod, namespace, follow=True, _preload_content=False, _request_timeout=timeout, **more
            )
            partial = b""
            try:
                for part in answer.stream():
                    *lines, partial = (partial + part).split(b"\n")
                    yield from (line.decode("utf-8", errors="replace") for line in lines)
            finally:
                answer.close()
            if partial:
                yield partial.decode("utf-8", errors="replace")
        except Exception as error:
            told = translated(error)
            if not isinstance(told, Missing):
                raise told from error


def translated(error: Exception) -> Exception:
    status, words = getattr(error, "status", None), _first(error)
    of_the_wire = isinstance(error, OSError) or "urllib3" in type(error).__module__
    if isinstance(error, ExecutorError) or (status is None and not of_the_wire):
        return error
    if status == 401 or (status == 403 and "system:anonymous" in words):
        return ExecutorError(f"the cluster refuses the credentials, which may be missing or expired: {words}")
    if status == 429 or (status == 403 and "exceeded quota" in words):
        return QuotaExceeded(f"Kubernetes: {words}")
    kinds = {403: Forbidden, 404: Missing, 409: Exists}
    if status and status < 500:
        return kinds.get(status, ExecutorError)(f"Kubernetes: {words}")
    return BackendUnavailable(f"Kubernetes: {words}")


def _first(error: Exception) -> str:
    """The API's own message if it gave one."""
    body = getattr(error, "body", None)
    try:
        words = json.loads(body)["message"] if body else ""
    except (ValueError, TypeError, KeyError):
        words = str(body)
    words = words or getattr(error, "reason", "") or str(error) or type(error).__name__
    return " ".join(str(words).split())
