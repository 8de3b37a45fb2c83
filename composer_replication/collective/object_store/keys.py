"""Where everything of a run lies, under the run's prefix.

Invariant: a key is a pure function of (round, attempt, replica, incarnation, chunk or shard, content hash); no key is
ever read from an object.

*Pointers* are small, created once and never deleted while the run can live. *Blobs* are big and may be collected:
`in/`, `out/` and the checkpoints' contents.
"""

from __future__ import annotations

import re

__all__ = [
    "CHECKPOINTS",
    "CLAIMS",
    "FINAL",
    "FLEET",
    "MEMBERS",
    "checkpoint",
    "checkpoint_blob",
    "claim",
    "claims",
    "closed",
    "incarnation_of",
    "draft",
    "epoch",
    "epoch_prefix",
    "input_chunk",
    "inputs",
    "is_blob",
    "join",
    "layout",
    "manifest",
    "manifest_round",
    "mean",
    "member",
    "output_chunk",
    "outputs",
    "ready",
    "result",
    "roster",
    "round_of",
    "round_prefix",
]

FLEET = "fleet.json"
FINAL = "final.json"
CLAIMS = "claims/"
MEMBERS = "members/"
CHECKPOINTS = "checkpoints/"
_BLOB = re.compile(r"(?:\A|/)(?:rounds/\d{8}/\d{1,6}/(?:in|out)/.|checkpoints/\d{8}/(?!manifest\.json\Z).)")


def epoch(number: int) -> str:
    """The pointer by which the number-th epoch exists, from 1 on."""
    return f"epochs/{number}.json"


def epoch_prefix(number: int) -> str:
    """Where an epoch's own objects lie, within the run."""
    return f"epochs/{number}/" if number else ""


def claims(replica: int) -> str:
    return f"{CLAIMS}{replica}/"


def claim(replica: int, incarnation: int) -> str:
    return f"{claims(replica)}{incarnation}"


def closed(replica: int, incarnation: int) -> str:
    """Says that this incarnation has ended on purpose."""
    return f"{claims(replica)}{incarnation}.closed"


def incarnation_of(key: str) -> int | None:
    """The incarnation that a claim's key names."""
    found = re.fullmatch(r"claims/\d+/([1-9]\d{0,8})", key)
    return int(found[1]) if found else None


def join(number: int) -> str:
    """The number-th replica that came in after the start."""
    return f"joins/{number}.json"


def member(replica: int) -> str:
    return f"{MEMBERS}{replica}.json"


def layout(fingerprint: str) -> str:
    return f"layouts/{fingerprint}.json"


def round_prefix(round: int) -> str:
    return f"rounds/{round:08d}/"


def _attempt(round: int, attempt: int) -> str:
    return f"{round_prefix(round)}{attempt}/"


def inputs(round: int, attempt: int) -> str:
    return f"{_attempt(round, attempt)}in/"


def outputs(round: int, attempt: int) -> str:
    return f"{_attempt(round, attempt)}out/"


def input_chunk(round: int, attempt: int, replica: int, incarnation: int, chunk: int) -> str:
    return f"{inputs(round, attempt)}{replica}.{incarnation}/{chunk}"


def output_chunk(round: int, attempt: int, content_hash: str) -> str:
    # The round is part of the key: the same bytes in two rounds must not share a blob that one of them collects.
    return f"{outputs(round, attempt)}{content_hash}"


def ready(round: int, attempt: int, replica: int) -> str:
    return f"{_attempt(round, attempt)}ready/{replica}.json"


def roster(round: int, attempt: int) -> str:
    return f"{_attempt(round, attempt)}roster.json"


def mean(round: int, attempt: int, shard: int) -> str:
    return f"{_attempt(round, attempt)}mean/{shard}.json"


def round_of(key: str) -> tuple[int, int] | None:
    """(round, attempt) of a key below rounds/."""
    found = re.match(r"rounds/(\d{8})/(\d{1,6})/", key)
    return (int(found[1]), int(found[2])) if found else None


def is_blob(key: str) -> bool:
    """Is it a blob's key, wherever the run lies? All others are pointers, or small objects for people."""
    return _BLOB.search(key) is not None


def checkpoint(round: int) -> str:
    return f"{CHECKPOINTS}{round:08d}/"


def checkpoint_blob(round: int, content_hash: str) -> str:
    return f"{checkpoint(round)}{content_hash}"


def manifest(round: int) -> str:
    return f"{checkpoint(round)}manifest.json"


def draft(round: int) -> str:
    """The manifest of the last state, until all have ended in it."""
    return f"{checkpoint(round)}draft.json"


def manifest_round(key: str) -> int | None:
    found = re.fullmatch(r"checkpoints/(\d{8})/manifest\.json", key)
    return int(found[1]) if found else None


def result(replica: int) -> str:
    return f"results/{replica}.json"
