"""`export`: the shared weights of a run as a file."""

from __future__ import annotations

import json
from pathlib import Path

from composer_replication.cli.status import open_place
from composer_replication.collective.object_store import keys
from composer_replication.collective.object_store.epochs import current
from composer_replication.collective.object_store.history import closed_roster
from composer_replication.collective.object_store.requests import there
from composer_replication.diloco.export import SharedWeights, read_shared_weights, write_weights
from composer_replication.readable import amount, byte_count
from composer_replication.recipe import load_recipe
from composer_replication.store import ObjectStore

__all__ = ["export"]


def export(
    uri: str,
    output: str,
    *,
    control: str | None,
    round: int | None,
    wide: bool,
    overwrite: bool,
    as_json: bool,
    signing_key_file: str | None = None,
    recipe: str | None = None,
) -> int:
    store = current(open_place(uri, control=control, signing_key_file=signing_key_file))
    weights = read_shared_weights(store, round, narrow=not wide)
    path = Path(output).expanduser()
    if recipe is None:
        write_weights(weights, path, overwrite=overwrite)
    else:
        from composer_replication.cli.transformers_folder import write_folder

        write_folder(weights, load_recipe(recipe), path)
    if as_json:
        about = {"file": str(path), "run": weights.run, "round": weights.round, "steps": weights.position}
        print(json.dumps({**about, "digest": weights.digest, "tied": weights.tied, "frozen": list(weights.frozen)}))
        return 0
    elements = sum(tensor.numel() for name, tensor in weights.tensors.items() if name not in weights.tied)
    print(
        f"{path}: {len(weights.tensors)} tensors, {amount(elements)} elements, {byte_count(_size(path))}, "
        f"after {weights.position} steps (the start of round {weights.round}; digest {weights.digest[:12]}, verified)"
    )
    for note in _notes(store, weights):
        print(note)
    return 0


def _size(path: Path) -> int:
    return sum(one.stat().st_size for one in path.iterdir()) if path.is_dir() else path.stat().st_size


def _notes(store: ObjectStore, weights: SharedWeights) -> list[str]:
    notes: list[str] = []
    if weights.tied:
        pairs = ", ".join(f"{name} = {first}" for name, first in list(weights.tied.items())[:3])
        notes.append(f"tied, each under its own name: {pairs}{' ...' if len(weights.tied) > 3 else ''}")
    if weights.frozen:
        names = ", ".join(weights.frozen[:3])
        notes.append(
            f"not in it: {len(weights.frozen)} frozen tensors ({names}{' ...' if len(weights.frozen) > 3 else ''}), "
            "which the fleet never sent; they are what your model began with"
        )
    if closed_roster(store, weights.run, weights.round) is not None:
        if there(store, keys.FINAL):
            notes.append(
                "the run went on after that, and has ended: a replica's own final checkpoint has the last weights"
            )
        else:
            notes.append("the run goes on after that: a later checkpoint will have more")
    return notes
