"""A stand-in for Hugging Face's HTTP interface: repositories in memory, as far as the store's client asks for them.

Real: the client library, its requests, commits that demand their parent. Not real: the service; its large files go
over another protocol (Xet), which nothing here speaks, so every file is a regular one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


class Hub:
    """A block in which `endpoint` answers for the repository `repo` (of any type) at its branch main."""

    def __init__(self, repo: str = "me/runs") -> None:
        self.repo = repo
        self.head = uuid.uuid4().hex + "0" * 8
        self.trees: dict[str, dict[str, bytes]] = {self.head: {}}
        self.commits = 0
        self.conflicts = 0
        self.lose_answers = 0  # of that many commits
        self.lock = threading.Lock()

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            state = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=10)

    def tree(self, revision: str) -> dict[str, bytes]:
        return self.trees[self.head if revision == "main" else revision]

    def commit(self, lines: list[dict[str, Any]]) -> str | None:
        """The new head; None if the parent asked for isn't the head."""
        header = next(line["value"] for line in lines if line["key"] == "header")
        with self.lock:
            if header.get("parentCommit") not in (None, self.head):
                self.conflicts += 1
                return None
            files = dict(self.trees[self.head])
            for line in lines:
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del files[line["value"]["path"]]
            self.commits += 1
            self.head = hashlib.sha1(f"{self.head}{self.commits}".encode()).hexdigest()
            self.trees[self.head] = files
            return self.head


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path, query = self._parts()
        if match := re.fullmatch(r"/api/\w+s/([^/]+/[^/]+)(?:/revision/(\w+))?", path):
            if self._known(match[1]):
                sha = self.state.head if match[2] in (None, "main") else match[2]
                self._json(200, {"id": match[1], "_id": "x", "sha": sha, "siblings": [], "private": False, "tags": []})
        elif match := re.fullmatch(r"/api/\w+s/([^/]+/[^/]+)/tree/(\w+)/?(.*)", path):
            if self._known(match[1]):
                folder = f"{match[3].rstrip('/')}/" if match[3] else ""
                files = self.state.tree(match[2])
                found = [self._file(name, files[name]) for name in sorted(files) if name.startswith(folder)]
                folders = {name.rpartition("/")[0] for name in files if "/" in name}
                found += [{"type": "directory", "path": name, "oid": "0" * 40} for name in sorted(folders)]
                if folder and not any(name.startswith(folder) for name in files):
                    self._json(404, {"error": "not there"}, {"X-Error-Code": "EntryNotFound"})
                else:
                    self._json(200, found if query.get("recursive") else [])
        elif match := re.fullmatch(r"/(?:\w+s/)?([^/]+/[^/]+)/resolve/(\w+)/(.+)", path):
            if self._known(match[1]):
                self._content(self.state.tree(match[2]).get(match[3]))
        else:
            self._json(404, {"error": path})

    def do_POST(self) -> None:
        path, _ = self._parts()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match = re.fullmatch(r"/api/\w+s/([^/]+/[^/]+)/(preupload|commit|paths-info)/(\w+)", path)
        if match is None or not self._known(match[1]):
            return
        if match[2] == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            files = self.state.tree(match[3])
            about = [
                {"path": name, "uploadMode": "regular", "shouldIgnore": False, "oid": _oid(files.get(name))}
                for name in names
            ]
            self._json(200, {"files": about})
        elif match[2] == "paths-info":
            files = self.state.tree(match[3])
            self._json(200, [self._file(n, files[n]) for n in parse_qs(body.decode())["paths"] if n in files])
        else:
            head = self.state.commit([json.loads(line) for line in body.splitlines() if line])
            if head is None:
                self._json(412, {"error": "A commit has happened since. Please refresh and try again."})
            elif self.state.lose_answers > 0:
                self.state.lose_answers -= 1
                self.close_connection = True
            else:
                url = f"{self.state.endpoint}/{match[1]}/commit/{head}"
                self._json(200, {"success": True, "commitOid": head, "commitUrl": url, "hookOutput": ""})

    def _parts(self) -> tuple[str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        return unquote(parts.path), parse_qs(parts.query)

    def _known(self, repo: str) -> bool:
        if repo != self.state.repo:
            self._json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif self.headers.get("Authorization") != "Bearer hf_of_the_suite":
            self._json(403, {"error": "Forbidden"})
        else:
            return True
        return False

    @staticmethod
    def _file(name: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}

    def _content(self, data: bytes | None) -> None:
        if data is None:
            self._json(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        status, total = 200, len(data)
        if match is not None:
            if int(match[1]) >= total:
                self._json(416, {"error": "range"})
                return
            status, data = 206, data[int(match[1]) : int(match[2]) + 1]
        self._send(status, data, {"ETag": '"x"', "X-Repo-Commit": self.state.head, "X-Linked-Size": str(total)})

    def _json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _oid(data: bytes | None) -> str | None:
    """Git's name for a file's content, by which the client leaves out what is there already."""
    return None if data is None else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
