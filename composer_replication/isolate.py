"""Which replica this process is, from the variables that its launcher set.

Invariant: standard library only, and nothing here is read at import: a program may call `isolate()` before it
imports a trainer, so that the trainer sees a world of one process and one device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

__all__ = ["ENABLE", "LAUNCHERS", "REPLICA", "REPLICAS", "SETTINGS", "STORE", "Identity", "isolate", "read_identity"]

REPLICA = "COMPOSER_REPLICATION_REPLICA"
REPLICAS = "COMPOSER_REPLICATION_REPLICAS"
STORE = "COMPOSER_REPLICATION_STORE"
LAUNCHER = "COMPOSER_REPLICATION_LAUNCHER"
ENABLE = "COMPOSER_REPLICATION_ENABLE"
SETTINGS = "COMPOSER_REPLICATION_SETTINGS"

# launcher: (its id of this process, its number of processes, its id on this machine)
LAUNCHERS: dict[str, tuple[str, str, str]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "slurm-array": ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", ""),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "kubernetes": ("JOB_COMPLETION_INDEX", "", ""),  # an indexed job doesn't say how many there are
}

# What makes a trainer believe that it is one process of many.
_WORLD = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    *("SLURM_NODEID", "SLURM_JOB_NAME", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
)


@dataclass(frozen=True, kw_only=True)
class Identity:
    """This process's place in its fleet."""

    replica: int
    replicas: int

    def __post_init__(self) -> None:
        for name, value in (("replica", self.replica), ("replicas", self.replicas)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {self.replicas}")
        if not 0 <= self.replica < self.replicas:
            raise ValueError(
                f"replica must be between 0 and {self.replicas - 1} in a fleet of {self.replicas}, got {self.replica}"
            )


def read_identity(
    *,
    replica: int | None = None,
    replicas: int | None = None,
    launcher: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Identity:
    """Who this process is: the arguments, else COMPOSER_REPLICATION_REPLICA and _REPLICAS, else a launcher's variables.

    Launchers' variables are read only when one is named (`launcher=`, or COMPOSER_REPLICATION_LAUNCHER): a process
    of a multi-process replica has them as well, and must not take itself for a replica. "auto" takes the first
    launcher whose variables are there. Raises ValueError with the remedy when something is missing or wrong.
    """
    if replica is None:
        replica = _number(environ, REPLICA)
    if replicas is None:
        replicas = _number(environ, REPLICAS)
    launcher = launcher or environ.get(LAUNCHER)
    if launcher and (replica is None or replicas is None):
        index, count, _ = LAUNCHERS[_named(launcher, environ)]
        replica = _number(environ, index) if replica is None else replica
        replicas = _number(environ, count) if replicas is None and count else replicas
    if replica is None or replicas is None:
        missing = " and ".join(n for n, v in (("replica", replica), ("replicas", replicas)) if v is None)
        raise ValueError(
            f"this process doesn't know its place in the fleet ({missing} missing): pass replica= and replicas=, or "
            f"set {REPLICA} and {REPLICAS}, or name the launcher whose processes are the replicas with {LAUNCHER} "
            f"({', '.join(LAUNCHERS)} or auto)"
        )
    return Identity(replica=replica, replicas=replicas)


def isolate(
    *, launcher: str | None = None, pin_gpu: bool = True, environ: MutableMapping[str, str] = os.environ
) -> Identity:
    """Make this process a replica of its own: call it before the first trainer import.

    Takes the identity (see `read_identity`), writes it to COMPOSER_REPLICATION_REPLICA and _REPLICAS, hides the
    launcher's variables, so that the trainer sees one process, and with `pin_gpu` shows it only the GPU that
    belongs to its place on this machine. Give `pin_gpu=False` when several replicas share one GPU.
    """
    identity = read_identity(launcher=launcher, environ=environ)
    chosen = launcher or environ.get(LAUNCHER)
    local = LAUNCHERS[_named(chosen, environ)][2] if chosen else ""
    place = _number(environ, local) if local else None
    if pin_gpu and place is not None:
        visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        if visible and place >= len(visible) and len(visible) > 1:
            raise ValueError(
                f"this is process {place} of its machine, but CUDA_VISIBLE_DEVICES shows only {len(visible)} devices: "
                "start fewer processes, or use pin_gpu=False to share"
            )
        if len(visible) != 1:
            environ["CUDA_VISIBLE_DEVICES"] = visible[place] if visible else str(place)
    for name in _WORLD:
        environ.pop(name, None)
    environ[REPLICA], environ[REPLICAS] = str(identity.replica), str(identity.replicas)
    return identity


def _named(launcher: str, environ: Mapping[str, str]) -> str:
    if launcher == "auto":
        for name, (index, _, _) in LAUNCHERS.items():
            if index in environ:
                return name
        raise ValueError(
            f"no launcher's variables are set ({', '.join(index for index, _, _ in LAUNCHERS.values())}): "
            f"pass replica= and replicas=, or set {REPLICA} and {REPLICAS}"
        )
    if launcher not in LAUNCHERS:
        raise ValueError(f"launcher must be one of {', '.join(LAUNCHERS)} or auto, got {launcher!r}")
    return launcher


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if text is None or not text.strip():
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, got {text!r}") from None
