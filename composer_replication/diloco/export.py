"""The shared weights of a run as a file: read from a checkpoint in the store, verified, under the model's own names.

Invariant: nothing is written unless every chunk has its hash and the whole state the digest that the fleet agreed on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from composer_replication.collective.base import Snapshot
from composer_replication.collective.object_store import checkpoints, keys
from composer_replication.collective.object_store.epochs import read_fleet
from composer_replication.diloco.outer_step import digest
from composer_replication.drafts import written_whole
from composer_replication.errors import ObjectCorrupt, ObjectMissing, ReplicationError, StoreError
from composer_replication.store.base import ObjectStore

__all__ = ["SharedWeights", "read_shared_weights", "write_weights"]

_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True, kw_only=True)
class SharedWeights:
    """What the fleet shared at the start of `round`, which is after `position` inner steps."""

    run: str
    round: int
    position: int
    digest: str
    tensors: dict[str, Tensor]  # by the model's own names, tied ones under each of theirs
    tied: dict[str, str]  # name -> the name that it is tied to
    frozen: tuple[str, ...]  # parameters that were never trained: the store doesn't hold them


def read_shared_weights(store: ObjectStore, round: int | None = None, *, narrow: bool = True) -> SharedWeights:
    """The weights of the newest checkpoint, or of that of `round`.

    In the model's own dtypes; with `narrow` False in float32, as the fleet keeps them. Raises ObjectCorrupt when a hash
    or the digest doesn't hold, ObjectMissing when there is no such checkpoint, StoreError when there is no run.
    """
    fleet, _ = read_fleet(store)
    if fleet is None:
        raise StoreError(
            f"there is no run in {store.uri} (no {keys.FLEET}): is that the run's store? One that has a second store "
            f"keeps its {keys.FLEET} there: name that as well (--control)"
        )
    run, settings = str(fleet.get("nonce", "")), cast("dict[str, Any]", fleet.get("settings") or {})
    there = checkpoints.rounds(store)
    if not there:
        raise ObjectMissing(f"there is no checkpoint in {store.uri} yet")
    chosen = there[0] if round is None else round
    if chosen not in there:
        raise ObjectMissing(f"{store.uri} has no checkpoint of round {chosen}, only of {_listed(there)}")
    try:
        snapshot = checkpoints.read(store, run, chosen)
    except ObjectMissing as error:
        raise ObjectMissing(
            f"the contents of the checkpoint of round {chosen} were collected ({error}): the newest is of round "
            f"{there[0]}"
        ) from error
    except ObjectCorrupt as error:
        others = [other for other in there if other != chosen]
        hint = f"; --round {others[0]} is the next older checkpoint" if round is None and others else ""
        raise ObjectCorrupt(
            f"the checkpoint of round {chosen} is damaged, nothing was written: {error}{hint}"
        ) from error
    state = _verified_state(snapshot, store.uri)
    tensors: dict[str, Tensor] = {}
    for slot, values in zip(snapshot.layout.slots, snapshot.anchor, strict=True):
        dtype = _DTYPES.get(slot.dtype, torch.float32) if narrow else torch.float32
        tensors[slot.name] = values.view(slot.shape).to(dtype)
    if not tensors:
        raise StoreError(
            f"the run in {store.uri} averages tensors of its caller's (an all-reduce): it holds no weights"
        )
    known = cast("dict[str, str]", settings.get("tied") or {})
    tied = {name: first for name, first in known.items() if first in tensors}
    tensors |= {name: tensors[first] for name, first in tied.items()}
    frozen = tuple(sorted(name for name in cast("dict[str, str]", settings.get("frozen") or {}) if name not in tensors))
    return SharedWeights(
        run=run,
        round=chosen,
        position=int(state["position"]),
        digest=snapshot.digest,
        tensors=tensors,
        tied=tied,
        frozen=frozen,
    )


def _verified_state(snapshot: Snapshot, uri: str) -> dict[str, Any]:
    if not snapshot.layout.slots:
        return {"position": 0}
    text = str(snapshot.state.get("text", ""))
    found = digest(_named(snapshot), text)
    if found != snapshot.digest:
        raise ObjectCorrupt(
            f"the checkpoint of round {snapshot.round} of {uri} has the digest {found}, and the fleet agreed on "
            f"{snapshot.digest}: it is damaged, nothing was written"
        )
    return cast("dict[str, Any]", json.loads(text))


def _named(snapshot: Snapshot) -> Iterator[tuple[str, Tensor, Tensor]]:
    for index, slot in enumerate(snapshot.layout.slots):
        anchor = snapshot.anchor[index]
        yield slot.name, anchor, snapshot.momentum[index] if len(snapshot.momentum) else torch.zeros_like(anchor)


def write_weights(weights: SharedWeights, path: Path, *, overwrite: bool = False) -> None:
    """Write `path` in one step: safetensors, or a state dict of torch's if the name ends in .pt or .pth."""
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise ValueError(f"the file's name must end in .safetensors, .pt or .pth, not {path.name!r}")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} is there already: give another name, or --overwrite")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent}: make it first")
    about = {"run": weights.run, "round": str(weights.round), "steps": str(weights.position), "digest": weights.digest}
    with written_whole(path, durable=True) as draft:
        if path.suffix == ".safetensors":
            _save_safetensors(weights, draft, about)
        else:
            torch.save(weights.tensors, draft)


def _save_safetensors(weights: SharedWeights, path: Path, about: dict[str, str]) -> None:
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ReplicationError(
            f"writing .safetensors needs the package safetensors ({error}): pip install "
            "'composer-replication[safetensors]', or give the file a name that ends in .pt"
        ) from error
    # Each tensor needs memory of its own there, and tied ones share it.
    own = {
        name: value.clone() if name in weights.tied else value.contiguous() for name, value in weights.tensors.items()
    }
    save_file(own, path, metadata={"format": "pt", **about})


def _listed(rounds: list[int]) -> str:
    shown = ", ".join(str(round) for round in rounds[:5])
    return shown + (f" and {len(rounds) - 5} older ones" if len(rounds) > 5 else "")
