"""The server of the live page: for this machine's browser, and for nobody else."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from composer_replication.cli import main
from composer_replication.report import payload, run_from_json
from composer_replication.report.live import LiveServer
from tests.report.samples import run_json


@pytest.fixture
def server() -> Iterator[LiveServer]:
    looks: list[int] = []

    def look() -> dict[str, Any]:
        looks.append(1)
        return {**payload([run_from_json(run_json(name="<b>"), source="s")]), "looks": len(looks)}

    one = LiveServer(look, every_seconds=3600)
    thread = threading.Thread(target=one.serve)
    thread.start()
    yield one
    one.stop()
    thread.join()


def ask(server: LiveServer, path: str, host: str | None = None, method: str = "GET") -> tuple[int, bytes]:
    where = server.url.removeprefix("http://").rstrip("/")
    with closing(http.client.HTTPConnection(where, timeout=60)) as connection:
        connection.request(method, path, headers={"Host": host or where})
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_the_page_and_its_values(server: LiveServer) -> None:
    assert server.url.startswith("http://127.0.0.1:")
    status, html = ask(server, "/")
    assert status == 200 and b'"poll_seconds": 3600' in html and b"<b>" not in html.partition(b'id="values"')[2][:500]
    for _ in range(2):  # asked again, the run is looked at no oftener than it was told
        status, values = ask(server, "/values.json")
        assert status == 200 and json.loads(values)["looks"] == 1 and json.loads(values)["title"] == "<b>"
    assert ask(server, "/", method="HEAD") == (200, b"")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example:1", "[::1]:1", "localhost.evil"]
)
def test_a_name_that_is_not_this_machine_is_refused(server: LiveServer, host: str) -> None:
    assert ask(server, "/values.json", host)[0] == 403


def test_localhost_is_this_machine_and_nothing_else_is_there(server: LiveServer) -> None:
    assert ask(server, "/values.json", "localhost:1234")[0] == 200
    assert ask(server, "/../../etc/passwd")[0] == 404 and ask(server, "/values.json?x")[0] == 404
    assert ask(server, "/", method="POST")[0] == 501


def test_a_port_that_is_taken_is_one_sentence(server: LiveServer, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    port = server.url.rpartition(":")[2].rstrip("/")
    assert main(["status", str(tmp_path), "--watch", "--web", "--port", port]) == 2
    assert f"--port {port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--web"], "--web goes with --watch"),
        (["--watch", "--web", "--json"], "without --json"),
        (["--watch", "--port", "80"], "--port goes with"),
        (["--watch", "--web", "--port", "70000"], "between 0 and 65535"),
    ],
)
def test_options_that_do_not_go_together(more, words, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path), *more]) == 2
    assert words in capsys.readouterr().err
