"""The Secrets of the stand-in for a Kubernetes API server."""

from __future__ import annotations

from typing import Any

from tests.launchers.http import Refused, Request, Route


def refused(code: int, reason: str, message: str) -> Refused:
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message}
    return Refused(code, {**status, "reason": reason, "code": code})


class Secrets(dict[str, dict[str, Any]]):
    """By name; what is sent is read with the client's own models, which take no unknown fields."""

    def __init__(self, owner: tuple[str, str]) -> None:
        self.owner = owner  # apiVersion and kind of what may own a Secret

    def routes(self, place: str) -> list[Route]:
        return [
            ("POST", place, self._create),
            ("GET", f"{place}/([^/]+)", lambda r: self._shown(r.groups[0])),
            ("PUT", f"{place}/([^/]+)", self._replace),
            ("PATCH", f"{place}/([^/]+)", self._patch),
            ("DELETE", f"{place}/([^/]+)", self._delete),
        ]

    def collect_garbage(self, uid: str) -> None:
        """An object has gone: what it owns goes, too."""
        for name, secret in list(self.items()):
            if any(one["uid"] == uid for one in secret["metadata"].get("ownerReferences", [])):
                del self[name]

    def _shown(self, name: str) -> dict[str, Any]:
        if name not in self:
            raise refused(404, "NotFound", f'secrets "{name}" not found')
        return {key: value for key, value in self[name].items() if key != "stringData"}

    def _create(self, request: Request) -> dict[str, Any]:
        body = self._checked(request)
        name = body["metadata"]["name"]
        if name in self:
            raise refused(409, "AlreadyExists", f'secrets "{name}" already exists')
        self[name] = body
        return self._shown(name)

    def _replace(self, request: Request) -> dict[str, Any]:
        self._shown(request.groups[0])
        self[request.groups[0]] = self._checked(request)
        return self._shown(request.groups[0])

    def _checked(self, request: Request) -> dict[str, Any]:
        from kubernetes.client import V1Secret

        V1Secret.model_validate(request.json)
        return request.json

    def _patch(self, request: Request) -> dict[str, Any]:
        from kubernetes.client import V1OwnerReference

        self._shown(request.groups[0])
        (owner,) = request.json["metadata"]["ownerReferences"]
        V1OwnerReference.model_validate(owner)
        assert request.json == {"metadata": {"ownerReferences": [owner]}} and owner["uid"] == f"uid-{owner['name']}"
        assert (owner["apiVersion"], owner["kind"]) == self.owner
        self[request.groups[0]]["metadata"]["ownerReferences"] = [owner]
        return self._shown(request.groups[0])

    def _delete(self, request: Request) -> dict[str, Any]:
        self._shown(request.groups[0])
        del self[request.groups[0]]
        return {"kind": "Status", "status": "Success"}
