"""The shared state as objects: the initial weights (checkpoint 0), and later ones for those who join or come back.

Invariant: a checkpoint exists when its manifest does; the manifest is written last, and, but for checkpoint 0, only
when the next roster starts from the very same digest. Tensors pass chunk by chunk, as raw float32 with their hashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from composer_replication.collective.base import Snapshot
from composer_replication.collective.codec import chunk_bytes, content_hash, decode_chunk, encode_chunk
from composer_replication.collective.layout import Layout
from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.requests import create
from composer_replication.collective.object_store.wire import MAX_POINTER_BYTES, WIRE_VERSION, dump, load
from composer_replication.collective.reduce import part_sizes
from composer_replication.errors import ObjectCorrupt, ObjectMissing
from composer_replication.store import details
from composer_replication.store.base import ObjectStore

__all__ = [
    "Abandoned",
    "Manifest",
    "Trace",
    "collect_checkpoints",
    "commit",
    "commit_draft",
    "digest_of",
    "is_whole",
    "latest_round",
    "put_draft",
    "read",
    "rounds",
    "write_blobs",
]

Trace = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A checkpoint whose blobs are written, and which may be committed."""

    round: int
    digest: str
    data: bytes


class Abandoned(Exception):
    """Nobody wants the checkpoint any more."""


def write_blobs(
    store: ObjectStore, run: str, snapshot: Snapshot, trace: Trace, *, abandoned: Callable[[], bool] = lambda: False
) -> Manifest:
    """Write a snapshot's tensors; gives the manifest, which is not written yet. `abandoned` is asked before each chunk,
    and ends it with Abandoned."""
    chunks: dict[str, list[list[Any]]] = {}
    for what, tensors in (("anchor", snapshot.anchor), ("momentum", snapshot.momentum)):
        facts: list[list[Any]] = []
        if len(tensors):
            for index, values in enumerate(_chunks(snapshot.layout, tensors)):
                if abandoned():
                    raise Abandoned
                sizes = part_sizes(snapshot.layout.chunks[index])
                payload = encode_chunk("float32", sizes, values, _fields(run, snapshot.round, what, index))
                digest = content_hash(payload)
                trace("before:checkpoint")
                store.put(keys.checkpoint_blob(snapshot.round, digest), payload)
                trace("after:checkpoint")
                facts.append([digest, len(payload)])
        chunks[what] = facts
    content = {
        "wire": WIRE_VERSION,
        "run": run,
        "round": snapshot.round,
        "digest": snapshot.digest,
        "layout": snapshot.layout.to_json(),
        "state": dict(snapshot.state),
        **chunks,
    }
    return Manifest(snapshot.round, snapshot.digest, dump(content))


def commit(store: ObjectStore, manifest: Manifest, trace: Trace) -> None:
    """Make the checkpoint exist; one that is there already stays."""
    trace("before:manifest")
    create(store, keys.manifest(manifest.round), manifest.data)
    trace("after:manifest")


def put_draft(store: ObjectStore, manifest: Manifest, trace: Trace) -> None:
    """Leave a manifest for `commit_draft`, by whoever it may be."""
    trace("before:manifest")
    store.put(keys.draft(manifest.round), manifest.data)
    trace("after:manifest")


def commit_draft(store: ObjectStore, round: int, digest: str, trace: Trace) -> None:
    """Make a checkpoint of the draft that was left for `round`, if it is of the state with this digest."""
    key = keys.draft(round)
    try:
        data = store.get(key, max_bytes=MAX_POINTER_BYTES)
        if load(data, key).get("digest") == digest:
            commit(store, Manifest(round, digest, data), trace)
    except (ObjectMissing, ObjectCorrupt):
        return  # the rounds that led there are in the store still


def rounds(store: ObjectStore) -> list[int]:
    """The rounds of all checkpoints, the newest first."""
    found = (keys.manifest_round(key) for key in store.list(keys.CHECKPOINTS))
    return sorted((round for round in found if round is not None), reverse=True)


def latest_round(store: ObjectStore) -> int | None:
    """The round of the newest checkpoint."""
    return next(iter(rounds(store)), None)


def digest_of(store: ObjectStore, round: int) -> str:
    """The digest of the state that a checkpoint holds. Raises ObjectMissing."""
    key = keys.manifest(round)
    return str(load(store.get(key, max_bytes=MAX_POINTER_BYTES), key).get("digest"))


def is_whole(store: ObjectStore, round: int) -> bool:
    """Are all contents of a checkpoint there, with the sizes that its manifest names? (No hash is computed.)"""
    key = keys.manifest(round)
    try:
        content = load(store.get(key, max_bytes=MAX_POINTER_BYTES), key)
        facts = [(str(digest), int(size)) for what in ("anchor", "momentum") for digest, size in content[what]]
    except (ObjectMissing, ObjectCorrupt, KeyError, TypeError, ValueError):
        return False
    sizes = details.sizes(store, keys.checkpoint(round))
    return all(sizes.get(keys.checkpoint_blob(round, digest), 0) in (size, None) for digest, size in facts)


def read(store: ObjectStore, run: str, round: int) -> Snapshot:
    """A checkpoint, every chunk verified. Raises ObjectMissing (no such manifest, or collected), ObjectCorrupt."""
    key = keys.manifest(round)
    content = load(store.get(key, max_bytes=MAX_POINTER_BYTES), key)
    try:
        if (content["wire"], content["run"], content["round"]) != (WIRE_VERSION, run, round):
            raise ValueError("it is of another run, round or wire version")
        layout = Layout.from_json(content["layout"])
        facts = {what: _facts(content[what], layout) for what in ("anchor", "momentum")}
        digest, state = content["digest"], content["state"]
        if not isinstance(digest, str) or not isinstance(state, dict) or len(facts["anchor"]) != len(layout.chunks):
            raise ValueError("its digest, state or anchor is not what it should be")
    except (KeyError, TypeError, ValueError) as error:
        raise ObjectCorrupt(f"{key} is damaged: {error}") from error
    return Snapshot(
        round=round,
        layout=layout,
        anchor=_tensors(store, run, round, "anchor", facts["anchor"], layout),
        momentum=_tensors(store, run, round, "momentum", facts["momentum"], layout) if facts["momentum"] else (),
        state=cast(dict[str, Any], state),
        digest=digest,
    )


def collect_checkpoints(store: ObjectStore, keep_from: int) -> None:
    """Delete the contents of checkpoints before `keep_from`; their manifests stay."""
    old: list[str] = []
    for key in store.list(keys.CHECKPOINTS):
        round = key.split("/")[1]
        if round.isdigit() and int(round) < keep_from and keys.manifest_round(key) is None:
            old.append(key)
    if old:
        store.delete(old)


def _fields(run: str, round: int, what: str, chunk: int) -> dict[str, Any]:
    return {"run": run, "checkpoint": round, "of": what, "chunk": chunk}


def _facts(value: Any, layout: Layout) -> list[tuple[str, int]]:
    facts = [(str(digest), int(size)) for digest, size in value]
    if facts and len(facts) != len(layout.chunks):
        raise ValueError(f"it has {len(facts)} chunks, its layout {len(layout.chunks)}")
    return facts


def _chunks(layout: Layout, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    buffer = torch.empty(max((chunk.elements for chunk in layout.chunks), default=0), dtype=torch.float32)
    for chunk in layout.chunks:
        begin = 0
        for part in chunk.parts:
            buffer[begin : begin + part.elements].copy_(tensors[part.slot][part.start : part.stop])
            begin += part.elements
        yield buffer[:begin]


def _tensors(
    store: ObjectStore, run: str, round: int, what: str, facts: list[tuple[str, int]], layout: Layout
) -> list[Tensor]:
    tensors = [torch.empty(slot.elements, dtype=torch.float32) for slot in layout.slots]
    for index, ((digest, size), chunk) in enumerate(zip(facts, layout.chunks, strict=True)):
        key, fields = keys.checkpoint_blob(round, digest), _fields(run, round, what, index)
        try:
            if size != chunk_bytes("float32", part_sizes(chunk), fields):
                raise ObjectCorrupt(f"the manifest says {size} bytes, which its layout doesn't come to")
            data = store.get(key, max_bytes=size)
            if len(data) != size or content_hash(data) != digest:
                raise ObjectCorrupt("its size or hash is not what the manifest says")
            values = decode_chunk("float32", part_sizes(chunk), data, fields=fields)
        except ObjectMissing:
            raise
        except ObjectCorrupt as error:
            raise ObjectCorrupt(f"{key}: {error}") from error
        begin = 0
        for part in chunk.parts:
            tensors[part.slot][part.start : part.stop].copy_(values[begin : begin + part.elements])
            begin += part.elements
    return tensors
