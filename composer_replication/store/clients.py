"""The stores' own clients, through fsspec: what each needs to be asked for, and how it creates an object only once.

Invariant: no answer comes from a cache. Listings are asked for anew, and a read is one request for a range.

A create carries a *mark*, a name made up for that one call, in the object's metadata: a client that tries again by
itself after an answer was lost is refused by its own first try, and the mark tells that apart from another writer.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Protocol

from composer_replication.errors import StoreError
from composer_replication.store.location import Location

__all__ = ["EXTRAS", "PART_BYTES", "Client", "FilesystemClient", "check_installed", "connect", "extra_of", "library"]

PART_BYTES = 32 * 1024 * 1024  # of an upload in parts, and of a read in ranges
PARALLEL_PARTS = 4  # in flight at once: what bounds the memory of both
STALL_SECONDS = 30.0  # without any progress: the connection counts as dead
_MARK = "writer"

# family -> (fsspec's name for it, module that must be there, extra that brings it)
EXTRAS = {"s3": ("s3", "s3fs", "s3"), "gs": ("gs", "gcsfs", "gcs"), "az": ("abfs", "adlfs", "azure")}


class Client(Protocol):
    """What RemoteStore asks of a client. Paths are root + "/" + key. Any exception of the client's may come out."""

    refusal: str  # why create() can't be atomic here, for people; "" if it can

    def put(self, path: str, data: bytes | bytearray, limit_seconds: float) -> None: ...
    def create(self, path: str, data: bytes | bytearray, mark: str, limit_seconds: float) -> None: ...
    def mark_of(self, path: str) -> str | None: ...
    def read(self, path: str, start: int, stop: int, limit_seconds: float) -> bytes: ...
    def size(self, path: str) -> int: ...
    def sizes(self, root: str, prefix: str) -> Iterable[tuple[str, int]]: ...
    def modified(self, path: str) -> float | None: ...
    def remove(self, paths: Sequence[str]) -> None: ...


class FilesystemClient:
    """Any asynchronous or plain fsspec filesystem. Creating only once is as good as the filesystem makes it."""

    refusal = ""
    create_options: dict[str, Any] = {}

    def __init__(self, filesystem: Any) -> None:
        self.fs = filesystem

    def call(self, name: str, *args: Any, limit_seconds: float = 2 * STALL_SECONDS, **kwargs: Any) -> Any:
        """A method of the filesystem; cancelled after `limit_seconds` if it is an asynchronous one."""
        if not self.fs.async_impl:
            return getattr(self.fs, name)(*args, **kwargs)
        return self.wait(getattr(self.fs, f"_{name}"), *args, limit_seconds=limit_seconds, **kwargs)

    def wait(self, function: Any, *args: Any, limit_seconds: float = 2 * STALL_SECONDS, **kwargs: Any) -> Any:
        return library("fsspec.asyn").sync(self.fs.loop, function, *args, timeout=limit_seconds, **kwargs)

    def put(self, path: str, data: bytes | bytearray, limit_seconds: float) -> None:
        self.call("pipe_file", path, data, limit_seconds=limit_seconds)

    def create(self, path: str, data: bytes | bytearray, mark: str, limit_seconds: float) -> None:
        self.call("pipe_file", path, data, mode="create", limit_seconds=limit_seconds)

    def mark_of(self, path: str) -> str | None:
        return None

    def read(self, path: str, start: int, stop: int, limit_seconds: float) -> bytes:
        return self.call("cat_file", path, start=start, end=stop, limit_seconds=limit_seconds)

    def size(self, path: str) -> int:
        return int(self.call("info", path)["size"])

    def sizes(self, root: str, prefix: str) -> Iterable[tuple[str, int]]:
        # Only some filesystems look for a prefix; all look below a folder. What is too much is dropped by the caller.
        folder = prefix.rpartition("/")[0]
        return _sized(self.call("find", f"{root}/{folder}" if folder else root, refresh=True, detail=True))

    def modified(self, path: str) -> float | None:
        return _moment(self.call("info", path))

    def remove(self, paths: Sequence[str]) -> None:
        for path in paths:
            try:
                self.call("rm_file", path)
            except FileNotFoundError:
                continue


class S3Client(FilesystemClient):
    """Amazon S3, and everything that speaks like it."""

    def put(self, path: str, data: bytes | bytearray, limit_seconds: float) -> None:
        self._pipe(path, data, limit_seconds)

    def create(self, path: str, data: bytes | bytearray, mark: str, limit_seconds: float) -> None:
        self._pipe(path, data, limit_seconds, mode="create", Metadata={_MARK: mark})

    def _pipe(self, path: str, data: bytes | bytearray, limit_seconds: float, **kwargs: Any) -> None:
        # One PUT below twice PART_BYTES; above, parts: invisible until the last request, which carries the condition.
        parts = {"chunksize": PART_BYTES, "max_concurrency": PARALLEL_PARTS}
        self.call("pipe_file", path, data, limit_seconds=limit_seconds, **parts, **kwargs)

    def mark_of(self, path: str) -> str | None:
        return self.call("metadata", path).get(_MARK)

    def read(self, path: str, start: int, stop: int, limit_seconds: float) -> bytes:
        return self.call("cat_file", path, start=start, end=stop, max_concurrency=1, limit_seconds=limit_seconds)

    def size(self, path: str) -> int:
        return int(self.call("info", path, refresh=True)["size"])

    def sizes(self, root: str, prefix: str) -> Iterable[tuple[str, int]]:
        bucket, _, folder = root.partition("/")
        found = self.call(
            "lsdir", bucket, refresh=True, delimiter="", prefix=f"{folder}/{prefix}" if folder else prefix
        )
        return [(entry["name"], int(entry["size"])) for entry in found]

    def modified(self, path: str) -> float | None:
        return _moment(self.call("info", path, refresh=True))

    def remove(self, paths: Sequence[str]) -> None:
        for first in range(0, len(paths), 1000):
            names = [path.partition("/") for path in paths[first : first + 1000]]
            what = {"Objects": [{"Key": key} for _, _, key in names], "Quiet": True}
            done = self.call("call_s3", "delete_objects", Bucket=names[0][0], Delete=what)
            for error in done.get("Errors", []):  # a refusal of single keys comes with status 200
                if error.get("Code") != "NoSuchKey":
                    raise _S3DeleteError(error)


class _S3DeleteError(Exception):
    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error.get('Code')}: {error.get('Message')}")
        self.code = error.get("Code")


class GCSClient(FilesystemClient):
    """Google Cloud Storage: a create asks for generation 0."""

    def create(self, path: str, data: bytes | bytearray, mark: str, limit_seconds: float) -> None:
        self.call("pipe_file", path, data, mode="create", metadata={_MARK: mark}, limit_seconds=limit_seconds)

    def mark_of(self, path: str) -> str | None:
        return self.call("info", path).get("metadata", {}).get(_MARK)

    def sizes(self, root: str, prefix: str) -> Iterable[tuple[str, int]]:
        return _sized(self.call("find", root, prefix=prefix, update_cache=False, detail=True))


class AzureClient(FilesystemClient):
    """Azure Blob Storage. adlfs keeps an object's metadata to itself, so that writing goes to the client below it."""

    _tries = {"connection_timeout": 10, "read_timeout": STALL_SECONDS}

    def put(self, path: str, data: bytes | bytearray, limit_seconds: float) -> None:
        self.wait(self._upload, path, data, overwrite=True, limit_seconds=limit_seconds)

    def create(self, path: str, data: bytes | bytearray, mark: str, limit_seconds: float) -> None:
        about = {"overwrite": False, "metadata": {_MARK: mark}}
        self.wait(self._upload, path, data, limit_seconds=limit_seconds, **about)

    def mark_of(self, path: str) -> str | None:
        return self.wait(self._properties, path).metadata.get(_MARK)

    def size(self, path: str) -> int:
        return int(self.wait(self._properties, path).size)

    def sizes(self, root: str, prefix: str) -> Iterable[tuple[str, int]]:
        container, _, folder = root.partition("/")
        return self.wait(self._listed, container, f"{folder}/{prefix}" if folder else prefix)

    def modified(self, path: str) -> float | None:
        return _moment({"last_modified": self.wait(self._properties, path).last_modified})

    async def _upload(self, path: str, data: bytes | bytearray, **kwargs: Any) -> None:
        async with self._blob(path) as blob:
            await blob.upload_blob(bytes(data), max_concurrency=PARALLEL_PARTS, **kwargs, **self._tries)

    async def _properties(self, path: str) -> Any:
        async with self._blob(path) as blob:
            return await blob.get_blob_properties(**self._tries)

    async def _listed(self, container: str, prefix: str) -> list[tuple[str, int]]:
        async with self.fs.service_client.get_container_client(container) as client:
            found = client.list_blobs(name_starts_with=prefix)
            return [(f"{container}/{blob.name}", int(blob.size)) async for blob in found]

    def _blob(self, path: str) -> Any:
        container, _, name = path.partition("/")
        return self.fs.service_client.get_blob_client(container, name)


def _sized(found: dict[str, dict[str, Any]]) -> list[tuple[str, int]]:
    return [(path, int(about.get("size") or 0)) for path, about in found.items()]


def _moment(about: dict[str, Any]) -> float | None:
    """When an object was written, by the store's own clock, in seconds since 1970; None if it doesn't say."""
    for name in ("LastModified", "last_modified", "updated", "mtime", "modified", "created"):
        value = about.get(name)
        if isinstance(value, str):
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


def library(name: str) -> Any:
    """A module that comes with an extra, only when it is needed."""
    return importlib.import_module(name)


def extra_of(kind: str) -> str | None:
    """The extra of this package that brings the client of a family of stores; None if it needs none."""
    return "hf" if kind == "hf" else EXTRAS[kind][2] if kind in EXTRAS else None


def check_installed(location: Location) -> None:
    """Raise StoreError, naming what to install, if the client isn't there; ValueError for an unknown scheme."""
    _, module, extra = EXTRAS.get(location.kind, ("", "fsspec", "s3"))
    if location.kind == "hf":
        module, extra = "huggingface_hub", "hf"
    try:
        library("fsspec")
        library(module)
    except ImportError as error:
        raise StoreError(
            f"{location.uri} needs {module} ({error}): pip install 'composer-replication[{extra}]'"
        ) from error


def connect(location: Location, given: dict[str, Any]) -> Client:
    """A client of this process's own. `given` are options for the filesystem and may hold credentials."""
    if location.kind == "hf":
        from composer_replication.store.hugging_face import connect_hub

        return connect_hub(location, given)
    builders = {"s3": _s3, "gs": _gcs, "az": _azure}
    if location.kind in builders:
        return builders[location.kind](location.options, {**_UNCACHED, **given})
    return FilesystemClient(library("fsspec").filesystem(location.kind, **{**_UNCACHED, "auto_mkdir": True, **given}))


_UNCACHED = {"skip_instance_cache": True, "use_listings_cache": False}


def _s3(options: dict[str, str], given: dict[str, Any]) -> Client:
    # The rounds hash every object themselves; some servers don't know the checksums that newer clients add.
    checksums = options.get("checksums", "when_required")
    config = {
        "connect_timeout": 10,
        "read_timeout": STALL_SECONDS,
        "tcp_keepalive": True,
        "max_pool_connections": 32,
        "retries": {"mode": "standard", "total_max_attempts": 1},
        "request_checksum_calculation": checksums,
        "response_checksum_validation": checksums,
        "s3": {"addressing_style": options.get("addressing_style", "auto")},
    }
    client = {"region_name": options["region"]} if "region" in options else {}
    rest = {name: options[name] for name in ("endpoint_url", "profile") if name in options}
    fs = library("s3fs").S3FileSystem(**{"config_kwargs": config, "client_kwargs": client, **rest, **given})
    fs.retries = 1  # trying again is RemoteStore's, which knows the time limit
    return S3Client(fs)


def _gcs(options: dict[str, str], given: dict[str, Any]) -> Client:
    base, retry_request = library("gcsfs.core").GCSFileSystem, library("gcsfs.retry").retry_request

    class OneRetry(base):
        # Six tries with pauses up to half a minute by default, without regard to the caller's time limit.
        _request = retry_request(retries=2)(inspect.unwrap(base._request))

    renamed = {"endpoint_url": "endpoint_url", "project": "project", "auth": "token"}
    rest = {renamed[name]: value for name, value in options.items()}
    timeout = library("aiohttp").ClientTimeout(total=None, sock_connect=10, sock_read=STALL_SECONDS)
    return GCSClient(OneRetry(**{"requests_timeout": timeout, **rest, **given}))


def _azure(options: dict[str, str], given: dict[str, Any]) -> Client:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its own deprecated parameters
        filesystem = library("adlfs").AzureBlobFileSystem(**{"max_concurrency": PARALLEL_PARTS, **options, **given})
    # The client would wait a quarter of a minute and more before each of three tries. One, soon; `Retry` does the rest.
    policy = getattr(getattr(filesystem.service_client, "_config", None), "retry_policy", None)
    if policy is not None:
        policy.total_retries, policy.initial_backoff, policy.random_jitter_range = 1, 0.5, 0.25
    return AzureClient(filesystem)
