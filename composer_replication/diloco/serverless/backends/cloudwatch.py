"""Reading a log of CloudWatch as it grows.

Invariant: a line is given once. Streams are read in the order of their making, each from its start; what they hold so
far is known by the token that the service gave last, which comes back unchanged at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from composer_replication.diloco.serverless.backends.aws import told
from composer_replication.diloco.serverless.executor import BackendUnavailable, QuotaExceeded
from composer_replication.errors import ExecutorError

__all__ = ["Log"]


class Log:
    """The streams of a group whose names begin with `prefix`. `client` is boto3's for CloudWatch Logs."""

    def __init__(self, client: Any, group: str, prefix: str) -> None:
        self._client, self._group, self._prefix = client, group, prefix
        self._tokens: dict[str, str] = {}

    def new_lines(self) -> Iterator[str]:
        """What was added since this was last asked. Raises BackendUnavailable."""
        for stream in self._streams():
            yield from self._of(stream)

    def _streams(self) -> list[str]:
        found: list[dict[str, Any]] = []
        wanted = {"logGroupName": self._group, "logStreamNamePrefix": self._prefix}
        while True:
            page = _asked(lambda: self._client.describe_log_streams(**wanted))
            found += page.get("logStreams", [])
            if "nextToken" not in page:
                return [one["logStreamName"] for one in sorted(found, key=lambda one: one.get("creationTime", 0))]
            wanted["nextToken"] = page["nextToken"]

    def _of(self, stream: str) -> Iterator[str]:
        wanted: dict[str, Any] = {"logGroupName": self._group, "logStreamName": stream, "startFromHead": True}
        while True:
            before = self._tokens.get(stream)
            if before is not None:
                wanted["nextToken"] = before
            page = _asked(lambda: self._client.get_log_events(**wanted))
            for event in page.get("events", []):
                yield from event["message"].rstrip("\n").split("\n")
            if page.get("nextForwardToken", before) == before:  # the end, for now
                return
            self._tokens[stream] = page["nextForwardToken"]


def _asked(call: Any) -> dict[str, Any]:
    """Too many questions, or a group or stream that isn't there before its first line, are no errors."""
    try:
        return told(call)
    except QuotaExceeded as error:
        raise BackendUnavailable(str(error)) from error
    except ExecutorError as error:
        if "ResourceNotFound" in str(error):
            return {}
        raise
