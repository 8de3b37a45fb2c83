"""Hugging Face: repositories, whose commits can demand their parent, and buckets, which can't demand anything.

Invariant: a key in a repository is created by a commit onto exactly the commit in which it was seen to be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from composer_replication.errors import StoreError
from composer_replication.store.clients import Client, FilesystemClient, library
from composer_replication.store.location import Location

__all__ = ["connect_hub"]

_REFUSAL = (
    "Hugging Face buckets can't create an object only if it is absent, and the rounds rest on that. Use the bucket "
    "through its S3 gateway (s3://BUCKET/PREFIX?endpoint_url=https://s3.hf.co/NAMESPACE) if that keeps conditions, "
    "another store, a repository for a small fleet, or keep only the blobs here and the pointers in a store that can: "
    "control='s3://...' (docs/stores.md)"
)
_TYPES = {"datasets": "dataset", "models": "model", "spaces": "space"}


def connect_hub(location: Location, given: dict[str, Any]) -> Client:
    """`hf://buckets/NAMESPACE/NAME/…`, `hf://datasets/NAMESPACE/NAME/…` or `hf://NAMESPACE/NAME/…` (a model)."""
    parts = location.root.split("/")
    kind = parts.pop(0) if parts[0] in (*_TYPES, "buckets") else "models"
    if len(parts) < 2:
        raise StoreError(f"{location.uri}: name an owner and a repository, like hf://datasets/me/runs/one")
    if kind == "buckets":
        return _Bucket(library("huggingface_hub").HfFileSystem(skip_instance_cache=True, **given))
    prefix = location.root.partition("/".join(parts[:2]))[0] + "/".join(parts[:2]) + "/"
    return _Repository(_TYPES[kind], "/".join(parts[:2]), prefix, location.options.get("revision", "main"), given)


class _Bucket(FilesystemClient):
    refusal = _REFUSAL

    def call(self, name: str, *args: Any, limit_seconds: float = 0.0, **kwargs: Any) -> Any:
        self.fs.invalidate_cache()  # its listings are kept whatever one asks for
        return super().call(name, *args, **kwargs)


class _Repository:
    """Each write is a commit: seconds, and a limit on how many an hour. For control objects and small fleets."""

    refusal = ""

    def __init__(self, kind: str, repo: str, prefix: str, revision: str, given: dict[str, Any]) -> None:
        self._hub = library("huggingface_hub")
        self._api = self._hub.HfApi(**given)
        self._prefix = prefix
        self._about: dict[str, Any] = {"repo_id": repo, "repo_type": kind, "revision": revision}

    def put(self, path: str, data: bytes | bytearray, limit_seconds: float) -> None:
        self._commit([self._addition(path, data)], f"Write {self._name(path)}")

    def create(self, path: str, data: bytes | bytearray, mark: str, limit_seconds: float) -> None:
        head = self._api.repo_info(**self._about).sha
        if self._present([path], head):
            raise FileExistsError(path)
        addition = self._addition(path, data)
        try:
            self._commit([addition], f"Create {self._name(path)}", parent_commit=head)
        except Exception as error:
            if getattr(getattr(error, "response", None), "status_code", None) == 412:
                raise _Moved("another commit came first") from None
            raise
        if not getattr(addition, "_is_committed", True):
            # The client leaves out what is there already with the same bytes: then somebody else has created it.
            raise FileExistsError(path)

    def mark_of(self, path: str) -> str | None:
        return None

    def read(self, path: str, start: int, stop: int, limit_seconds: float) -> bytes:
        url = self._hub.hf_hub_url(filename=self._name(path), endpoint=self._api.endpoint, **self._about)
        token = self._hub.utils.build_hf_headers(token=self._api.token)
        headers = {**token, "Range": f"bytes={start}-{stop - 1}"}
        answer = self._hub.utils.get_session().get(url, headers=headers, follow_redirects=True)
        self._hub.utils.hf_raise_for_status(answer)
        return answer.content if answer.status_code == 206 else answer.content[start:stop]

    def size(self, path: str) -> int:
        (info,) = self._present([path], None) or [None]
        if info is None:
            raise FileNotFoundError(path)
        return int(info.size)

    def modified(self, path: str) -> float | None:
        return None

    def sizes(self, root: str, prefix: str) -> Iterable[tuple[str, int]]:
        folder = f"{root}/{prefix}".removeprefix(self._prefix).rpartition("/")[0]
        tree = self._api.list_repo_tree(path_in_repo=folder or None, recursive=True, **self._about)
        try:
            return [(self._prefix + entry.path, int(entry.size)) for entry in tree if hasattr(entry, "size")]
        except self._hub.utils.EntryNotFoundError:
            return []

    def remove(self, paths: Sequence[str]) -> None:
        there = self._present(list(paths), None)
        if there:
            self._commit([self._hub.CommitOperationDelete(info.path) for info in there], f"Remove {len(there)} objects")

    def _commit(self, operations: list[Any], message: str, **kwargs: Any) -> None:
        self._api.create_commit(operations=operations, commit_message=message, **self._about, **kwargs)

    def _addition(self, path: str, data: bytes | bytearray) -> Any:
        return self._hub.CommitOperationAdd(self._name(path), bytes(data))

    def _present(self, paths: list[str], revision: str | None) -> list[Any]:
        about = {**self._about, "revision": revision or self._about["revision"]}
        return [
            info
            for info in self._api.get_paths_info(paths=[self._name(path) for path in paths], **about)
            if hasattr(info, "size")
        ]

    def _name(self, path: str) -> str:
        return path.removeprefix(self._prefix)


class _Moved(Exception):
    code = "ConditionalRequestConflict"
