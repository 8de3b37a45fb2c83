"""A folder of code as one archive, on its way through the store to where replicas run; `container.unpack` opens it.

Invariant: the same files give the same bytes, whenever, wherever and by whomever they are packed, so that the archive's
hash names it. What is no code stays here, and so does what usually holds credentials.
"""

from __future__ import annotations

import gzip
import io
import logging
import os
import stat
import tarfile
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from composer_replication.errors import RecipeError

__all__ = ["LARGEST_BYTES", "LARGEST_FILE_BYTES", "code_files", "pack_code"]

logger = logging.getLogger(__name__)

LARGEST_BYTES = 32 * 1024 * 1024  # of the archive's contents
LARGEST_FILE_BYTES = 8 * 1024 * 1024  # a bigger file is data, or weights

_FOLDERS = (".git .hg .svn .venv venv .tox .nox __pycache__ .mypy_cache .pytest_cache .ruff_cache .hypothesis").split()
_FOLDERS += ".ipynb_checkpoints node_modules .aws .azure .ssh .kube .gnupg .gcloud .idea .vscode wandb".split()
_FILES = "*.pyc *.pyo .DS_Store .env .env.* .netrc .pypirc *.pem *.key id_rsa id_ed25519 credentials.json".split()


def code_files(folder: str | Path) -> Iterator[tuple[str, Path]]:
    """(name in the archive, file), sorted by name: everything below `folder` but what is left out.

    Left out are version control, virtual environments, caches, editors' and credentials' folders, folders of runs,
    files that usually hold keys, files over `LARGEST_FILE_BYTES` (with a warning), and links outside or to a folder.
    """
    root = Path(folder).resolve()
    found: dict[str, Path] = {}
    for place, folders, files in os.walk(root):
        here = Path(place)
        folders[:] = [name for name in folders if not _left_out(here / name)]
        for name in files:
            path = here / name
            if any(fnmatchcase(name, pattern) for pattern in _FILES) or not _plain(path, root):
                continue
            size = path.stat().st_size
            if size > LARGEST_FILE_BYTES:
                logger.warning("%s (%s) is not sent along: too big for code", path.relative_to(root), _megabytes(size))
                continue
            found[path.relative_to(root).as_posix()] = path
    for name in sorted(found):
        yield name, found[name]


def pack_code(folder: str | Path, *, largest_bytes: int = LARGEST_BYTES) -> bytes:
    """A tar.gz of the folder's code. Raises RecipeError if it isn't there, is empty or too big."""
    if not Path(folder).is_dir():
        raise RecipeError(f"executor.code: there is no folder {folder}")
    contents = {name: (path.read_bytes(), _runs(path)) for name, path in code_files(folder)}
    if not contents:
        raise RecipeError(f"executor.code: there is nothing to send in {folder}")
    total = sum(len(data) for data, _ in contents.values())
    if total > largest_bytes:
        by_size = sorted(contents, key=lambda name: (-len(contents[name][0]), name))[:5]
        named = ", ".join(f"{name} ({_megabytes(len(contents[name][0]))})" for name in by_size)
        raise RecipeError(
            f"executor.code: {folder} holds {_megabytes(total)} in {len(contents)} files, more than the "
            f"{_megabytes(largest_bytes)} that are sent along. The largest: {named}. Keep data elsewhere, or give a "
            "smaller folder"
        )
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0, compresslevel=9) as zipped:
        with tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for name, (data, runs) in contents.items():
                about = tarfile.TarInfo(name)
                about.size, about.mode = len(data), 0o755 if runs else 0o644
                tar.addfile(about, io.BytesIO(data))
    return packed.getvalue()


def _left_out(folder: Path) -> bool:
    if folder.is_symlink() or folder.name in _FOLDERS or folder.name.endswith(".egg-info"):
        return True
    if (folder / "pyvenv.cfg").exists():
        return True
    run = (folder / "recipe.yaml").exists() or (folder / "fleet.json").exists()
    return run and any((folder / name).exists() for name in ("replica-0", "store", "rosters", "launch", "summary.json"))


def _plain(path: Path, root: Path) -> bool:
    """A file that can be read, here: not a socket, and not a link out of the folder."""
    try:
        return stat.S_ISREG(path.stat().st_mode) and path.resolve().is_relative_to(root)
    except OSError:  # a link to nothing
        return False


def _runs(path: Path) -> bool:
    return bool(path.stat().st_mode & stat.S_IXUSR)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"
