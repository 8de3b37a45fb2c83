"""What a replica of a recipe does alike, whichever trainer the recipe names: how it sets out, its log and its result.

Invariant: one recipe gives both trainers' adapters the same settings, and both trainers' replicas the same files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from composer_replication.adapter.files import latest_checkpoint
from composer_replication.diloco.summary import FinalSummary, RoundSummary
from composer_replication.drafts import written_whole
from composer_replication.errors import RecipeError
from composer_replication.isolate import Identity
from composer_replication.recipe import Recipe, outer_config, policy_of

__all__ = ["CHECKPOINTS", "FINAL", "Journal", "adapter_options", "set_out"]

RESULT_FILE = "result.json"
CHECKPOINTS = "checkpoints"  # folder of the adapter's own durable checkpoints
FINAL = "final.ckpt"  # the fleet's last weights


def adapter_options(recipe: Recipe, identity: Identity, folder: Path) -> dict[str, Any]:
    """The keyword arguments of `AutoLoCoCallback`, and of Composer's `AutoLoCo`, that the recipe amounts to."""
    outer, section, fleet = outer_config(recipe), recipe.autoloco, recipe.fleet
    return {
        "replica": identity.replica,
        "replicas": identity.replicas,
        "control": recipe.store.control,
        "signing_key_file": recipe.store.signing_key_file,
        "policy": policy_of(recipe),
        "outer_lr": outer.lr,
        "outer_momentum": outer.momentum if outer.kind == "nesterov" else None,
        "outer_kind": outer.kind,
        "momentum_min": outer.momentum_min,
        "momentum_max": outer.momentum_max,
        "max_scale": outer.max_scale,
        "normalize": outer.normalize,
        "adapt_momentum": outer.adapt_momentum,
        "adapt_lr": outer.adapt_lr,
        "codec": recipe.codec,
        "replica_failure_policy": fleet.failure_policy,
        "min_replicas": fleet.min_replicas,
        "timeout": fleet.timeout_seconds,
        "start_timeout": fleet.start_timeout_seconds,
        "deadline": fleet.deadline,
        "outliers": fleet.outliers,
        "outlier_threshold": fleet.outlier_threshold,
        "aggregation": fleet.aggregation,
        "trim_fraction": fleet.trim_fraction,
        "outer_device": section.outer_device,
        "weighting": section.weighting,
        "buffers": section.buffers,
        "validate_with": section.validate_with,
        "checkpoint_dir": folder / CHECKPOINTS,
        "checkpoint_every_rounds": fleet.checkpoint_every_rounds,
        "checkpoint_every": fleet.shared_checkpoint_every_rounds,
    }


class _Adapter(Protocol):
    @property
    def rounds(self) -> Sequence[RoundSummary]: ...

    @property
    def final(self) -> FinalSummary | None: ...


A = TypeVar("A", bound=_Adapter)


def set_out(
    adapter: Callable[..., A], recipe: Recipe, identity: Identity, uri: str, folder: Path, **more: Any
) -> tuple[A, Journal, str | None]:
    """(the adapter of the recipe's settings, its journal, the checkpoint that this replica goes on from or None).

    Says in the log where the replica begins. Raises RecipeError if the settings can't work.
    """
    try:
        made = adapter(uri, **more, **adapter_options(recipe, identity, folder))
    except ValueError as error:
        raise RecipeError(f"the recipe's settings: {error}") from error
    checkpoint = latest_checkpoint(folder / CHECKPOINTS, identity.replica)
    print(f"goes on from {checkpoint}" if checkpoint else "starts from the beginning", flush=True)
    return made, Journal(made, identity, folder, recipe.training.log_every), checkpoint


class Journal:
    """Lines for the log, and running totals that outlive a restart. Of a replica's processes one speaks."""

    def __init__(self, adapter: _Adapter, identity: Identity, folder: Path, log_every: int) -> None:
        self.adapter = adapter
        self.identity = identity
        self.path = folder / RESULT_FILE
        self.log_every = log_every
        self.speaks = True
        self.values: dict[str, Any] = {"status": "running"}
        self._before = _read(self.path)  # of the processes before this one
        self._seen = 0
        self._began = time.monotonic()

    def due(self, step: int) -> bool:
        """After this many steps a line is due."""
        return self.speaks and step % self.log_every == 0

    def step(self, step: int, loss: float | None) -> None:
        print(f"step {step}" + (f"  loss {loss:.4f}" if loss is not None else ""), flush=True)

    def tell(self) -> None:
        """A line for each round closed since the last time, and the totals on the disk."""
        rounds = self.adapter.rounds if self.speaks else ()
        for closed in rounds[self._seen :]:
            loss = closed.member_metrics.get(self.identity.replica, {}).get("loss")
            print(
                f"round {closed.round}: {closed.steps} steps, fleet at {closed.position}"
                + (f", loss {loss:.4f}" if loss is not None else "")
                + f", replicas {list(closed.members)}, waited {closed.wait_seconds:.2f} s"
                + (f" (for replica {late[0]}: {late[1]:.1f} s)" if (late := closed.straggler) and late[1] >= 1 else "")
                + f", next {closed.next_plan.steps} steps"
                + (f" ({closed.assessment}: {closed.action})" if closed.assessment else "")
                + "".join(f"; without replica {r}: {why}" for r, why in closed.absent.items())
                + "".join(f"; replica {r}: {w}" for r, w in closed.outliers.items() if r in closed.members),
                flush=True,
            )
        if len(rounds) > self._seen:
            self._seen = len(rounds)
            self.write()

    def complete(self, final: Path, metrics: Mapping[str, float]) -> dict[str, Any]:
        """The result of a replica that has come to the end of the run, whose last weights are in `final`."""
        values: dict[str, Any] = {"status": "completed", "final_checkpoint_uri": final.absolute().as_uri()}
        if self.adapter.final is not None:
            values["digest"] = self.adapter.final.digest
        return self.write(**{**values, **metrics})

    def write(self, **values: Any) -> dict[str, Any]:
        """Put the totals, and these values, on the disk."""
        closed = self.adapter.rounds
        sums = {
            "wait_seconds": sum(r.wait_seconds for r in closed),
            "exchange_seconds": sum(r.exchange_seconds for r in closed),
            "bytes_sent": sum(r.bytes_sent for r in closed),
            "bytes_received": sum(r.bytes_received for r in closed),
            "seconds": time.monotonic() - self._began,
        }
        self.values |= {name: value + self._before.get(name, 0) for name, value in sums.items()}
        if closed:
            self.values |= {"rounds": closed[-1].round + 1, "steps": closed[-1].position}
            loss = closed[-1].member_metrics.get(self.identity.replica, {}).get("loss")
            if loss is not None:
                self.values["loss"] = loss
        self.values |= {"replica": self.identity.replica, **values}
        if not self.speaks:
            return dict(self.values)
        with written_whole(self.path) as draft:
            draft.write_text(json.dumps(self.values, indent=1), encoding="utf-8")
        return dict(self.values)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
