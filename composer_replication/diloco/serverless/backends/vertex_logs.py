"""A custom job's output in Cloud Logging, read through its HTTP interface.

Facts of the service that this rests on: entries come late and out of order, by some seconds; each has an id; a line is
a text or the message of a JSON entry; what Vertex itself says of a job is under another task's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from composer_replication.diloco.serverless.executor import BackendUnavailable, QuotaExceeded
from composer_replication.errors import ExecutorError

__all__ = ["Entries", "Entry"]

_LATE_SECONDS = 60.0
_PAGE = 1000
_CALL_SECONDS = 30.0


@dataclass(frozen=True)
class Entry:
    key: str
    timestamp: str
    text: str


class Entries:
    def __init__(self, session: Any, endpoint: str, project: str) -> None:
        self._session, self._endpoint, self._project = session, endpoint.rstrip("/"), project

    def after(self, number: str, timestamp: str) -> Iterator[Entry]:
        """What job `number` has put out since shortly before `timestamp` (RFC 3339; "": since the beginning), by time.

        Raises QuotaExceeded, BackendUnavailable, ExecutorError.
        """
        wanted = [
            'resource.type="ml_job"',
            f'resource.labels.job_id="{number}"',
            'resource.labels.task_name="workerpool0-0"',
        ]
        if timestamp:
            wanted.append(f'timestamp>="{_before(timestamp)}"')
        body: dict[str, Any] = {
            "resourceNames": [f"projects/{self._project}"],
            "filter": " AND ".join(wanted),
            "orderBy": "timestamp asc",
            "pageSize": _PAGE,
        }
        while True:
            page = self._page(body)
            for entry in page.get("entries", []):
                text = entry.get("textPayload")
                if text is None:
                    payload = entry.get("jsonPayload") or {}
                    text = str(payload.get("message", payload))
                yield Entry(f"{entry['timestamp']} {entry['insertId']}", entry["timestamp"], text)
            if not page.get("nextPageToken"):
                return
            body["pageToken"] = page["nextPageToken"]

    def _page(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = self._session.post(f"{self._endpoint}/v2/entries:list", json=body, timeout=_CALL_SECONDS)
        except Exception as error:  # of requests and of google-auth, which wraps some
            raise BackendUnavailable(f"Cloud Logging: {error}") from error
        if answer.status_code == 200:
            return answer.json()
        kind = QuotaExceeded if answer.status_code == 429 else ExecutorError
        kind = BackendUnavailable if answer.status_code >= 500 else kind
        raise kind(f"Cloud Logging: {answer.status_code} {answer.text[:300]}")


def _before(timestamp: str) -> str:
    """A minute earlier. Fractions of a second are cut off: they have up to nine digits."""
    whole = datetime.strptime(timestamp[:19], "%Y-%m-%dT%H:%M:%S")
    return f"{(whole - timedelta(seconds=_LATE_SECONDS)).isoformat()}Z"
