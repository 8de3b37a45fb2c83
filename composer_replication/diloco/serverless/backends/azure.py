"""What Azure's clients say, in our words, and the output of Azure ML jobs, which their client can only print.

Invariant: whatever Azure's clients raise comes out as ExecutorError or one of its two retryable kinds. The
token goes to the workspace's own service and never along with a signed address.

The output is a file whose signed address the run's details give (`logFiles`, user_logs/std_log.txt). It grows, so it is
read from where the last read ended; a job that is started again may begin it anew.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from composer_replication.diloco.serverless.backends.client import answer, client_module
from composer_replication.diloco.serverless.executor import BackendUnavailable, QuotaExceeded
from composer_replication.errors import ExecutorError

__all__ = ["SCOPE", "RunHistory", "later", "quietly", "told"]

T = TypeVar("T")

SCOPE = "https://management.azure.com/.default"
_LOGS = ("user_logs/std_log.txt", "user_logs/std_log_process_0.txt", "azureml-logs/70_driver_log.txt")
_STEP = 4 << 20  # bytes in one read
_SAME = "as it was"
_PATIENCE = {"connection_timeout": 20, "read_timeout": 60}


class RunHistory:
    """The run history of one workspace. `runs` is the path of its runs; `discovery_url` says which host has them."""

    def __init__(self, credential: Any, discovery_url: str, runs: str, extra: str) -> None:
        core, rest = client_module("azure.core", extra), client_module("azure.core.rest", extra)
        policies = client_module("azure.core.pipeline.policies", extra)
        self._request = rest.HttpRequest
        agent = policies.UserAgentPolicy("composer-replication")
        self._plain = core.PipelineClient("", policies=[agent])
        api = json.loads(self._get(self._plain, discovery_url))["api"].rstrip("/")
        token = policies.BearerTokenCredentialPolicy(credential, SCOPE)
        self._signed_in = core.PipelineClient(api, policies=[agent, token])
        self._runs = f"{api}/history/v1.0{runs}/runs"

    def details(self, run: str) -> dict[str, Any]:
        """Status, times, error and the addresses of its files, as the service has them."""
        return json.loads(self._get(self._signed_in, f"{self._runs}/{run}/details?api-version=v1.0"))

    def _get(self, client: Any, url: str) -> bytes:
        def send() -> bytes:
            response = client.send_request(self._request("GET", url), **_PATIENCE)
            response.raise_for_status()
            return response.read()

        return told(send)

    def output(self, run: str) -> Output:
        return Output(self, run)

    def read(self, url: str, begin: int) -> tuple[bytes, str]:
        """(the file from byte `begin` on, as far as one read goes, when it was begun)."""

        def send() -> tuple[bytes, str]:
            span = {"x-ms-range": f"bytes={begin}-{begin + _STEP - 1}"}
            response = self._plain.send_request(self._request("GET", url, headers=span), **_PATIENCE)
            if response.status_code in (404, 416):  # not there yet, or not that long: nothing new, or begun anew
                size = response.headers.get("Content-Range", "").rpartition("/")[2]
                return b"", "" if size.isdigit() and int(size) < begin else _SAME
            response.raise_for_status()
            return response.read(), response.headers.get("x-ms-creation-time", "")

        return told(send)


class Output:
    """A job's output, by lines; knows how far it was read."""

    def __init__(self, history: RunHistory, run: str) -> None:
        self._history, self._run = history, run
        self._name, self._read, self._rest = "", 0, b""
        self._begun = ""

    def new_lines(self) -> Iterator[str]:
        """Whole lines that were added since this was last asked."""
        files = self._history.details(self._run).get("logFiles") or {}
        name = next((one for one in _LOGS if one in files), "")
        if not name:
            return
        if name != self._name:
            self._name, self._read, self._rest = name, 0, b""
        while True:
            data, begun = self._history.read(files[name], self._read)
            if begun != _SAME and begun != self._begun:
                again, self._begun = self._read > 0, begun
                if again:
                    self._read, self._rest = 0, b""
                    continue
            if not data:
                return
            self._read += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from (line.decode("utf-8", errors="replace") for line in lines)

    def rest(self) -> Iterator[str]:
        """What is behind the last newline."""
        if self._rest:
            yield self._rest.decode("utf-8", errors="replace")


def told(call: Callable[[], T]) -> T:
    """The call's answer, or its error in our words."""
    return answer(call, _translated)


def quietly(make: Callable[[], T], *loggers: str) -> T:
    """A client that warns of its own experimental parts, at import and at each use, made without that.

    What fails is told by what it raises.
    """

    def hush() -> None:
        for name in loggers:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    hush()
    made = make()
    hush()  # it sets levels of its own when it is imported
    return made


def later(call: Callable[[], T]) -> T:
    """The answer to a question; too many of them is a service that doesn't answer now."""
    try:
        return told(call)
    except QuotaExceeded as error:
        raise BackendUnavailable(str(error)) from error


def _translated(error: Exception) -> Exception:
    home, kinds = type(error).__module__, {one.__name__ for one in type(error).__mro__}
    lines = [line.strip() for line in str(getattr(error, "message", "") or error).splitlines() if line.strip()]
    words = lines[0] if lines else type(error).__name__
    status = getattr(error, "status_code", None)
    if "ClientAuthenticationError" in kinds or status == 401:
        return ExecutorError(
            f"Azure refuses the credentials, or there are none (`az login`, AZURE_CLIENT_ID and the like): {words}"
        )
    if status == 429 or "QuotaExceeded" in words:
        return QuotaExceeded(f"Azure ML: {words}")
    if isinstance(status, int):
        return (BackendUnavailable if status >= 500 else ExecutorError)(f"Azure ML: {words}")
    if home.startswith("azure.core") or isinstance(error, OSError):
        return BackendUnavailable(f"Azure ML: {words}")
    if home.startswith(("azure.ai.ml", "marshmallow")):  # the client refuses the job before it sends it
        faults = [line.removeprefix("(x) ") for line in lines if line.startswith("(x)")]
        return ExecutorError(f"Azure ML: {'; '.join(faults) or words}")
    return error
