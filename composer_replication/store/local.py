"""A store in a folder: one file for each object, on a local disk or a mount that all replicas see.

Invariant: a file gets its final name only when it is whole and on the disk (write, flush, fsync, then link or
rename), so that a reader sees an object whole or not at all, whenever its writer dies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterable
from io import BufferedWriter
from pathlib import Path

from composer_replication.errors import ObjectCorrupt, ObjectExists, ObjectMissing, StoreError
from composer_replication.store.base import Buffer
from composer_replication.store.keys import check_key

__all__ = ["LocalStore"]

ABANDONED_SECONDS = 3600.0  # a file that is being written changes more often than that
_TEMPORARY = ".tmp-"
_READ_ONLY = "its file system is mounted read-only: have it mounted for writing, or choose another folder"
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}


class LocalStore:
    """The folder `root`. It is made if only its last part is missing, and `create` is set.

    Raises StoreError, with the remedy, when it can't be used.
    """

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        if "\0" in os.fspath(root):
            raise ValueError(f"a folder's name can't hold a NUL byte: {os.fspath(root)!r}")
        self._root = Path(os.path.abspath(os.path.expanduser(os.fspath(root))))
        self._prepare(create)

    @property
    def uri(self) -> str:
        return self._root.as_uri()

    @property
    def root(self) -> Path:
        return self._root

    def put(self, key: str, data: Buffer) -> None:
        self._write(key, data, os.replace)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        # A link is made or refused by the file system in one step, also over NFS; a rename would overwrite.
        self._write(key, data, os.link)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        # Opening, not looking first: over NFS only open() is sure to see what another machine has just written.
        try:
            with open(self._path(key), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if max_bytes is not None and size > max_bytes:
                    raise ObjectCorrupt(f"{key} has {size} bytes, at most {max_bytes} expected ({self.uri})")
                return file.readall()
        except OSError as error:
            raise self._failure(key, error) from error

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        if not 0 <= start <= stop:
            raise ValueError(f"not a range of bytes: [{start}, {stop})")
        try:
            with open(self._path(key), "rb") as file:
                file.seek(start)
                return file.read(stop - start)
        except OSError as error:
            raise self._failure(key, error) from error

    def list(self, prefix: str) -> list[str]:
        return sorted(self._found(prefix))

    def sizes(self, prefix: str) -> dict[str, int]:
        """All keys that begin with `prefix`, and their sizes in bytes."""
        sizes: dict[str, int] = {}
        for key in sorted(self._found(prefix)):
            with contextlib.suppress(FileNotFoundError):
                sizes[key] = os.stat(self._path(key)).st_size
        return sizes

    def modified_seconds(self, key: str) -> float:
        """When an object was written by the file system's own clock, in seconds since 1970."""
        try:
            return os.stat(self._path(key)).st_mtime
        except OSError as error:
            raise self._failure(key, error) from error

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            try:
                os.unlink(path)
                self._drop_empty_folders(path.parent)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._failure(key, error) from error

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _found(self, prefix: str) -> list[str]:
        folder, _, _ = prefix.rpartition("/")
        top = self._root / check_key(folder) if folder else self._root
        if not self._root.is_dir():
            raise self._gone()
        found: list[str] = []
        for where, folders, files in os.walk(top):
            folders[:] = [name for name in folders if not name.startswith(".")]
            base = Path(where).relative_to(self._root)
            found += [(base / name).as_posix() for name in files if not name.startswith(".")]
        return [key for key in found if key.startswith(prefix)]

    def _write(self, key: str, data: Buffer, commit: Callable[[Path, Path], None]) -> None:
        path = self._path(key)
        # In the root, so that what a killed writer leaves is found again without a walk through the whole store.
        temporary = self._root / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            with self._create(temporary) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            self._name(temporary, path, commit)
        except FileExistsError:
            raise ObjectExists(f"{key} is there already ({self.uri})") from None
        except OSError as error:
            raise self._failure(key, error) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        self._sync_folder(path.parent)

    def _create(self, temporary: Path) -> BufferedWriter:
        try:
            return open(temporary, "xb")
        except FileNotFoundError as error:
            raise self._gone() from error

    def _name(self, temporary: Path, path: Path, commit: Callable[[Path, Path], None]) -> None:
        # Someone who deletes the last object of a folder removes the folder too: make it again, a few times.
        for _ in range(20):
            if not self._root.is_dir():
                raise self._gone()
            try:
                self._make_folders(path.parent)
            except FileNotFoundError:
                continue
            except (FileExistsError, NotADirectoryError) as error:
                raise StoreError(f"{self.uri}: {error.filename} is an object, it can't be a folder too") from error
            try:
                return commit(temporary, path)
            except FileNotFoundError as error:
                if not temporary.exists():
                    raise StoreError(f"{self.uri}: {temporary.name} was removed while it was written") from error
        raise StoreError(f"{self.uri}: the folder {path.parent} vanishes as often as it is made")

    def _make_folders(self, folder: Path) -> None:
        """Make a folder and what is missing above it, each with a name that lasts."""
        missing = [folder] if not folder.is_dir() else []
        while missing and missing[-1].parent != self._root and not missing[-1].parent.is_dir():
            missing.append(missing[-1].parent)
        for one in reversed(missing):
            one.mkdir(exist_ok=True)
            self._sync_folder(one.parent)

    def _gone(self) -> StoreError:
        return StoreError(f"{self.uri} is gone: the folder was removed or unmounted while the run used it")

    def _remove_abandoned(self) -> None:
        """Remove what killed writers have left. Ages are told by the file system's own clock; a store that can't be
        tidied (read-only, say) can be used all the same."""
        with contextlib.suppress(OSError):
            left = [name for name in os.listdir(self._root) if name.startswith(_TEMPORARY)]
            if not left:
                return
            probe = self._root / f"{_TEMPORARY}{uuid.uuid4().hex}"
            probe.touch(exist_ok=False)
            try:
                now = probe.stat().st_mtime
            finally:
                probe.unlink()
            for name in left:
                with contextlib.suppress(OSError):
                    if os.stat(self._root / name).st_mtime < now - ABANDONED_SECONDS:
                        os.unlink(self._root / name)

    def _drop_empty_folders(self, folder: Path) -> None:
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError:  # not empty, or someone else was faster
                return
            folder = folder.parent

    @staticmethod
    def _sync_folder(folder: Path) -> None:
        # Makes the name last as well as the bytes. Some mounts can't; then the server decides.
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError:
            return
        try:
            os.fsync(descriptor)
        except OSError:
            return
        finally:
            os.close(descriptor)

    def _failure(self, key: str, error: OSError) -> StoreError:
        if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
            if not self._root.is_dir():  # not that object alone: the reader must not take it for a collected one
                return self._gone()
            return ObjectMissing(f"{key} isn't there ({self.uri})")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreError(f"{self.uri} is full ({error.strerror}) while writing {key}: free some space")
        if error.errno == errno.EROFS:
            return StoreError(f"{key} can't be written in {self.uri}: {_READ_ONLY}")
        if isinstance(error, PermissionError) and error.filename2 is None:
            return StoreError(f"{key} can't be read or written in {self.uri}: give this user the rights to it")
        if error.errno in _NO_HARD_LINKS:
            return StoreError(
                f"{self.uri} has no hard links ({error.strerror}), and create-if-absent needs them: "
                "use a folder on a local disk or on NFS"
            )
        return StoreError(f"{key} in {self.uri}: {error.strerror or error}")

    def _prepare(self, create: bool) -> None:
        root = self._root
        try:
            if root.is_dir():
                self._remove_abandoned()
                return
            if root.exists() and not root.is_dir():  # a folder by now: another replica has just made it
                raise StoreError(f"{self.uri} is a file: name a folder")
            if not create:
                raise StoreError(f"{self.uri} isn't there: check the path, or start a run that makes it")
            above = next(folder for folder in root.parents if folder.exists())
            if not above.is_dir():
                raise StoreError(f"{self.uri} can't be made: {above} above it is a file, not a folder")
            if above != root.parent:
                raise StoreError(
                    f"{self.uri} isn't there, nor is the folder above it: check the path, or run "
                    f"`mkdir -p {root.parent}` first (only the last folder is made for you)"
                )
            root.mkdir(exist_ok=True)
        except OSError as error:
            if error.errno == errno.EROFS:
                raise StoreError(f"{self.uri} can't be made: {_READ_ONLY}") from error
            if error.errno == errno.ENAMETOOLONG:
                raise StoreError(f"{self.uri} can't be used ({error.strerror}): choose a shorter one") from error
            raise StoreError(
                f"{self.uri} can't be used ({error.strerror}): give this user the rights to {root.parent}, "
                "or choose another folder"
            ) from error
