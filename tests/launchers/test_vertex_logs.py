"""A custom job's output in Cloud Logging: pages, late entries, errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from composer_replication.diloco.serverless.backends.vertex import VertexExecutor
from composer_replication.diloco.serverless.backends.vertex_logs import Entries
from composer_replication.diloco.serverless.executor import BackendUnavailable, QuotaExceeded
from composer_replication.errors import ExecutorError


class Pages:
    """Cloud Logging as an AuthorizedSession shows it: entries come late, and out of order."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.bodies = list(answers), []

    def post(self, url: str, *, json: Any, timeout: float) -> Any:
        self.bodies.append((url, copy.deepcopy(json)))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        self.status_code, self.text, self._values = answer
        return self

    def json(self) -> Any:
        return self._values


def entry(key: str, second: int, **payload: Any) -> dict[str, Any]:
    return {"insertId": key, "timestamp": f"2026-11-01T00:02:{second:02}.5Z", **payload}


def test_entries_are_read_by_pages_and_from_a_minute_before() -> None:
    pages = Pages(
        (200, "", {"entries": [entry("a", 1, textPayload="one")], "nextPageToken": "2"}),
        (200, "", {"entries": [entry("b", 2, jsonPayload={"message": "two"}), entry("c", 3, jsonPayload={"x": 1})]}),
    )
    found = list(Entries(pages, "http://logs/", "shop").after("17", "2026-11-01T00:00:30.123456789Z"))
    assert [one.text for one in found] == ["one", "two", "{'x': 1}"]
    url, body = pages.bodies[0]
    assert url == "http://logs/v2/entries:list" and "pageToken" not in body and pages.bodies[1][1]["pageToken"] == "2"
    assert body["filter"].endswith(' AND timestamp>="2026-10-31T23:59:30Z"')


def test_a_late_entry_is_told_once() -> None:
    executor = VertexExecutor(credentials=object(), project="shop")
    executor.sleep = lambda seconds: None  # type: ignore[method-assign]
    executor.api = type("", (), {"get_custom_job": lambda self, name: self, "display_name": "run-0"})()  # type: ignore[misc]
    one, two, three = (entry(word, place, textPayload=word) for place, word in enumerate(("one", "two", "three")))
    end = entry("end", 9, textPayload="job run-0: completed")
    answers = [{"entries": [one, three]}, {"entries": [one, two, three]}, {"entries": [one, two, three, end]}]
    pages = Pages(*((200, "", answer) for answer in answers))
    executor.entries = Entries(pages, "", "shop")  # type: ignore[misc]
    states = ["running", "running", "completed"]
    executor.look = lambda job_id: type("", (), {"state": states.pop(0)})()  # type: ignore[method-assign]
    assert list(executor.follow("projects/shop/locations/x/customJobs/17")) == [
        *("one", "three", "two", "job run-0: completed")
    ]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((429, "slowly", None), QuotaExceeded),
        ((503, "later", None), BackendUnavailable),
        (OSError("no route"), BackendUnavailable),
        ((403, "may not", None), ExecutorError),
    ],
)
def test_errors_of_cloud_logging(answer: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="Cloud Logging: ") as caught:
        list(Entries(Pages(answer), "", "shop").after("17", ""))
    assert type(caught.value) is kind
