"""What each process of a world of replicas of two ranks runs in the tests: a Lightning user's script."""

from __future__ import annotations

import hashlib
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from composer_replication.adapter.data import rank_share
from composer_replication.collective.regrouping import RegroupingCollective
from composer_replication.collective.rendezvous import Rendezvous
from composer_replication.errors import ReplicationError
from composer_replication.isolate import isolate_world, read_identity, read_rank
from composer_replication.lightning import AutoLoCoCallback, latest_checkpoint
from tests.lightning.helpers import Numbered, Tiny

STRATEGIES = {"ddp": "local_replica", "fsdp": "local_replica_fsdp"}


def quiet() -> None:
    import logging

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


class Module(Tiny):
    """Logs what `sync_dist` and a metric make of the replica's number, and of how many samples it validated."""

    def __init__(self, *, sharded: bool, replica: int, dropout: bool = False, optimizer: str = "adamw") -> None:
        super().__init__(seed=replica, optimizer=optimizer, scheduler=True, lr=0.02)
        self.sharded, self.replica = sharded, replica
        self.drop = torch.nn.Dropout(0.2 if dropout else 0.0)
        self.validated = torchmetrics.SumMetric()
        self.synced: list[float] = []

    def configure_model(self) -> None:
        if self.sharded and not hasattr(self.net, "unshard"):
            mesh = self.device_mesh["data_parallel"]
            for layer in (self.net[0], self.net[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch["id"].tolist())
        loss = torch.nn.functional.mse_loss(self.net(self.drop(batch["x"])), batch["y"])
        self.log("who", float(self.replica), sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.net(batch["x"])
        self.validated.update(float(len(batch["id"])))
        self.log("validated", self.validated)

    def on_train_batch_end(self, *_: Any) -> None:
        self.synced.append(float(self.trainer.callback_metrics["who"]))


def full(module: torch.nn.Module) -> dict[str, Tensor]:
    """The whole weights, on every rank."""
    found = {}
    for name, tensor in module.named_parameters():
        whole: Any = tensor.detach()
        found[name] = (whole.full_tensor() if hasattr(whole, "full_tensor") else whole).clone()
    return found


def hash_of(tensors: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(t.cpu().numpy().tobytes() for t in tensors.values())).hexdigest()


class Journal(pl.Callback):
    """After AutoLoCo: the weights' hash after each batch. SIGTERM to one rank after a batch, if asked."""

    def __init__(self, stop: tuple[int, int] | None = None) -> None:
        self.hashes: list[str] = []
        self.stop = stop  # (rank in the replica, batches)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.hashes.append(hash_of(full(pl_module)))
        if self.stop is not None and (trainer.global_rank, len(self.hashes)) == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)


class Spoiler(pl.Callback):
    """Before AutoLoCo: after a batch, in one rank, a weight goes bad or the process dies."""

    def __init__(self, what: str, rank: int, batch: int) -> None:
        self.what, self.rank, self.batch = what, rank, batch

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_rank, batch_idx + 1) != (self.rank, self.batch):
            return
        if self.what == "dies":
            os._exit(9)
        weight: Any = pl_module.net[2].weight.detach()
        local = weight.to_local() if hasattr(weight, "to_local") else weight
        local[0, 0] = float("nan")


class Rewindable:
    """One process's share, in order; the loader knows where it is."""

    def __init__(self, count: int) -> None:
        share = rank_share(read_identity(), *read_rank())
        self.samples, self.ids, self.at = Numbered(count), list(range(share.replica, count, share.replicas)), 0

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.at < len(self.ids):
            sample = self.samples[self.ids[self.at]]
            self.at += 1
            yield {name: value.unsqueeze(0) for name, value in sample.items()}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def train(
    rank: int,
    kind: str,
    out: Path,
    *,
    batches: tuple[int, int] = (8, 8),
    stop: tuple[int, int] | None = None,
    stopped_replica: int = -1,
    resume: bool = False,
    validate: bool = False,
    accumulate: int = 1,
    optimizer: str = "adamw",
    spoil: tuple[str, int, int, int] | None = None,
    timeout: float = 60.0,
    address: str = "",
    **options: Any,
) -> dict[str, Any]:
    """One process of two replicas of two ranks."""
    quiet()
    out.mkdir(exist_ok=True)
    identity = isolate_world(2)
    replica = identity.replica
    dropout = (resume or stop is not None) and optimizer == "adamw"
    module = Module(sharded=kind == "fsdp", replica=replica, dropout=dropout, optimizer=optimizer)
    folder = out / "checkpoints"
    options |= {"policy": "fixed", "base_horizon": 3, "checkpoint_dir": folder}
    if address:  # a process group between the replicas, instead of a store

        def meet(fit: int) -> RegroupingCollective:
            return RegroupingCollective(Rendezvous(address, replica=replica, ids=(0, 1), run=f"fit{fit}"))

        ours = AutoLoCoCallback(collective=meet, replica=replica, replicas=2, **options)
    else:
        ours = AutoLoCoCallback((out / "store").as_uri(), timeout=timeout, **options)
    journal = Journal(stop if replica == stopped_replica else None)
    spoilers = [Spoiler(spoil[0], *spoil[2:])] if spoil is not None and spoil[1] == replica else []
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=STRATEGIES[kind],
        callbacks=[*spoilers, ours, journal],
        max_epochs=1,
        limit_train_batches=batches[replica],
        val_check_interval=4 if validate else None,
        limit_val_batches=1.0 if validate else 0,
        num_sanity_val_steps=1 if validate else 0,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    pl.seed_everything(5, verbose=False)  # Lightning's sampler takes its seed; dropout differs from rank to rank
    torch.manual_seed(100 + rank)
    data: Any = Rewindable(160) if stop is not None or resume else DataLoader(Numbered(160), shuffle=True)
    path = latest_checkpoint(folder, replica) if resume else None
    result: dict[str, Any] = {"replica": replica}
    try:
        trainer.fit(module, data, DataLoader(Numbered(10)) if validate else None, ckpt_path=path)
    except SIGTERMException as told:
        result["stopped"] = told.code
    except (ReplicationError, RuntimeError) as error:
        return result | {"error": type(error).__name__, "text": str(error)}
    assert ours.loop is not None
    return result | {
        "world": (trainer.global_rank, trainer.world_size, torch.distributed.get_world_size()),
        "hashes": journal.hashes,
        "synced": module.synced,
        "seen": module.seen,
        "losses": module.losses,
        "validated": float(trainer.callback_metrics["validated"]) if validate else None,
        "digest": ours.final.digest if ours.final else None,
        "rounds": [(one.round, one.steps, one.members, one.tokens) for one in ours.rounds],
        "said": ours.said,
        "weights": {name: tensor.tolist() for name, tensor in full(module).items()},
        "checkpoint": latest_checkpoint(folder, replica),
    }
