"""English prose to train on: the guides of seven packages of Debian 12, in pieces of 32 KiB.

    python -m benchmarks.reproduction text      # on Debian or Ubuntu: apt-get fetches, dpkg-deb unpacks

Invariant: what is trained on is what DIGEST names, byte for byte.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.reproduction.study import DEBIAN_TEXT, ROOT

__all__ = ["DIGEST", "check", "fetch"]

# Package, version, and which of its files are the guide in English.
PACKAGES = (
    ("debian-faq", "11.1", "*.en.txt.gz"),
    ("debian-policy", "4.6.2.0", "*/policy.html/_sources/*.rst.txt"),
    ("debian-reference-en", "2.100", "*.en.txt.gz"),
    ("debmake-doc", "1.17-7", "*.en.txt.gz"),
    ("developers-reference", "12.18", "*/developers-reference/_sources/*.rst.txt"),
    ("installation-guide-amd64", "20230508+deb12u1", "*/en/install.en.txt.gz"),
    ("maint-guide", "1.2.53", "*.en.txt.gz"),
)
PIECE = 1 << 15  # bytes
DIGEST = "b2396398bf953270c29a9e951a9d00324c5ca4cadb356ef71149cb3332657a71"  # SHA-256, in the order of names


def fetch() -> str:
    """Make the folder of the text, and say how large it is. Raises OSError or CalledProcessError where it can't be."""
    for command in ("apt-get", "dpkg-deb"):
        if shutil.which(command) is None:
            raise OSError(f"this needs {command}, of a Debian or Ubuntu machine")
    folder = ROOT / DEBIAN_TEXT
    pieces: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, version, pattern in PACKAGES:
            subprocess.run(["apt-get", "download", "--quiet", f"{name}={version}"], cwd=scratch, check=True)
            package = next(Path(scratch).glob(f"{name}_*.deb"))
            content = Path(scratch) / name
            subprocess.run(["dpkg-deb", "--extract", str(package), str(content)], check=True)
            files = sorted(p for p in content.rglob("*") if p.is_file() and fnmatch(p.as_posix(), pattern))
            text = b"".join(gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes() for p in files)
            for at in range(0, len(text), PIECE):  # in pieces, since some files are kept for validation
                pieces[f"{name}-{at // PIECE:02d}.txt"] = text[at : at + PIECE]
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.txt"):  # of other versions there may be more
        path.unlink()
    for piece, part in pieces.items():
        (folder / piece).write_bytes(part)
    check()
    return f"{folder.relative_to(ROOT)}: {len(PACKAGES)} guides, {sum(map(len, pieces.values())):,} bytes"


def check() -> None:
    """Raise ValueError unless the text that the study was trained on is there."""
    folder = ROOT / DEBIAN_TEXT
    found = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.txt")))).hexdigest()
    if found != DIGEST:
        raise ValueError(
            f"{folder} doesn't hold the text of this study ({found[:12]}, not {DIGEST[:12]}): "
            "python -m benchmarks.reproduction text"
        )
