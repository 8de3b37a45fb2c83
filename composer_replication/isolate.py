"""Which replica this process is, from the variables that its launcher set.

Invariant: standard library only, and nothing here is read at import: a program may call `isolate()` before it
imports a trainer, so that the trainer sees a world of one process and one device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

__all__ = [
    "ENABLE",
    "LAUNCHERS",
    "RANK",
    "RANKS",
    "REPLICA",
    "REPLICAS",
    "SETTINGS",
    "STORE",
    "Identity",
    "isolate",
    "isolate_world",
    "read_identity",
    "read_rank",
]

REPLICA = "COMPOSER_REPLICATION_REPLICA"
REPLICAS = "COMPOSER_REPLICATION_REPLICAS"
RANK = "COMPOSER_REPLICATION_RANK"  # of this process within its replica
RANKS = "COMPOSER_REPLICATION_RANKS"  # processes of each replica
STORE = "COMPOSER_REPLICATION_STORE"
LAUNCHER = "COMPOSER_REPLICATION_LAUNCHER"
ENABLE = "COMPOSER_REPLICATION_ENABLE"
SETTINGS = "COMPOSER_REPLICATION_SETTINGS"

# launcher: (its id of this process, its number of processes, its id on this machine)
LAUNCHERS: dict[str, tuple[str, str, str]] = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "composer": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
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
    """This process's place in its fleet. An id beyond the fleet's is that of a replica that joins it later."""

    replica: int
    replicas: int

    def __post_init__(self) -> None:
        for name, value in (("replica", self.replica), ("replicas", self.replicas)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        if self.replicas < 1:
            raise ValueError(f"replicas must be at least 1, got {self.replicas}")
        if self.replica < 0:
            raise ValueError(
                f"replica must be between 0 and {self.replicas - 1} in a fleet of {self.replicas}, got {self.replica}"
            )

    @property
    def shard(self) -> int:
        """Which of the `replicas` shards of the training data is this replica's. Whoever joins later shares one."""
        return self.replica % self.replicas


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


def read_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(rank of this process within its replica, processes of its replica), as `isolate_world` or a strategy left them.

    (0, 1) where nobody said anything: a replica is one process then. Raises ValueError if they contradict each other.
    """
    size = _number(environ, RANKS)
    rank = _number(environ, RANK)
    if size is None and rank is None:
        return 0, 1
    if size is None or rank is None or not 0 <= rank < size:
        raise ValueError(
            f"{RANK}={rank} and {RANKS}={size} contradict each other: unset both, or set both by isolate_world"
        )
    return rank, size


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


def isolate_world(
    ranks_per_replica: int = 1, *, launcher: str | None = None, environ: MutableMapping[str, str] = os.environ
) -> Identity:
    """Cut the launcher's world into replicas of consecutive ranks, each a world of its own. Call it before any trainer.

    For launchers that start every process of the fleet (composer, torchrun, srun, mpirun), and for one launch per
    replica with COMPOSER_REPLICATION_REPLICA and _REPLICAS set, whose world stays as it is (it may span machines).
    Rewrites RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT, narrows
    CUDA_VISIBLE_DEVICES to the replica's devices, appends -replica<id> to RUN_NAME and COMPOSER_RUN_NAME, and sets
    COMPOSER_REPLICATION_REPLICA, _REPLICAS, _RANK and _RANKS. Calling it again changes nothing. Raises ValueError, with
    the environment untouched, if the variables contradict each other.
    """
    k = ranks_per_replica
    if k < 1:
        raise ValueError(f"ranks per replica must be at least 1, got {k}")
    rank, size, local, local_size = _launched(launcher, environ)
    before = _number(environ, RANKS)
    if before is not None and before != k:
        raise ValueError(
            f"this process was made one of a replica of {before} already ({RANKS}), and now of {k}: say "
            "--ranks-per-replica (or call isolate_world) once, with one number"
        )
    if size != k and (size % k or local_size % k):
        raise ValueError(
            f"{size} processes ({local_size} on this machine) can't be cut into replicas of {k} on one machine each: "
            f"start a multiple of {k} on each machine, or launch each replica by itself, with {REPLICA} and {REPLICAS} "
            "set"
        )
    if size != k and (rank - local) % k:
        raise ValueError(
            f"process {rank} is number {local} of its machine, so that a replica of {k} consecutive processes would "
            "span machines: place consecutive processes on one machine (srun --distribution=block)"
        )
    given = {name: _number(environ, name) for name in (REPLICA, REPLICAS)}
    if size == k:  # one replica a launch: only the environment can know of the others
        explicit = all(value is not None for value in given.values())
        if not explicit and any(value is not None for value in given.values()):
            raise ValueError(f"set both {REPLICA} and {REPLICAS}, or neither")
        identity = read_identity(environ=environ) if explicit else Identity(replica=0, replicas=1)
    else:
        identity = Identity(replica=rank // k, replicas=size // k)
        for name, found in ((REPLICA, identity.replica), (REPLICAS, identity.replicas)):
            if given[name] is not None and given[name] != found:
                raise ValueError(
                    f"{name}={given[name]} contradicts the launcher: process {rank} of {size}, {k} a replica, is "
                    f"replica {identity.replica} of {identity.replicas}; unset it, or launch each replica by itself"
                )
    if size != k or k == 1:
        _narrow(rank % k, local, k, alone=size == k, environ=environ)
    if identity.replicas > 1:
        for name in ("RUN_NAME", "COMPOSER_RUN_NAME"):
            suffix = f"-replica{identity.replica}"
            if environ.get(name) and not environ[name].endswith(suffix):
                environ[name] += suffix
    environ[REPLICA], environ[REPLICAS] = str(identity.replica), str(identity.replicas)
    environ[RANK], environ[RANKS] = str(rank % k), str(k)
    return identity


def _narrow(rank: int, local: int, count: int, *, alone: bool, environ: MutableMapping[str, str]) -> None:
    """Make the replica of the process with this `local` rank a world of `count`, in which it is `rank`."""
    first = local // count * count
    devices = None if alone else _devices(first, count, environ)
    port = environ.get("MASTER_PORT", "")
    if not port.isdigit() and count > 1:  # srun and mpirun name none; jobs that share a machine have different numbers
        port = str(20000 + (_number(environ, "SLURM_JOB_ID") or 0) % 20000)
    for name in _WORLD:
        environ.pop(name, None)
    environ.update({"RANK": str(rank), "LOCAL_RANK": str(local - first), "NODE_RANK": "0"})
    environ.update({"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)})
    if port.isdigit():
        # One port for each replica of a machine, and none that the launcher itself may hold, or that a system hands out
        # to whoever asks for any (32768 and above): gloo's own connections take many of those.
        own = int(port) + 1 + first // count
        port = port if alone else str(own if own < 32768 else 10000 + own % 22000)
        environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    if devices is not None:
        environ["CUDA_VISIBLE_DEVICES"] = devices


def _launched(launcher: str | None, environ: Mapping[str, str]) -> tuple[int, int, int, int]:
    """(rank, world size, rank on this machine, processes on this machine); one process if nobody says otherwise."""
    chosen = launcher or environ.get(LAUNCHER)
    if chosen:
        chosen = _named(chosen, environ)
    else:
        # composer inside srun: the inner launcher, which started this process, is the one that counts.
        chosen = next((n for n in ("torchrun", "slurm", "openmpi", "mpi") if LAUNCHERS[n][0] in environ), None)
    if chosen is None:
        return 0, 1, 0, 1
    names = LAUNCHERS[chosen]
    rank, size = _number(environ, names[0]), _number(environ, names[1]) if names[1] else None
    if rank is None or size is None:
        raise ValueError(f"{names[0]} and {names[1] or REPLICAS} must both be set where {chosen} starts the processes")
    local = _number(environ, names[2]) if names[2] else None
    count = _number(environ, "LOCAL_WORLD_SIZE") if names[0] == "RANK" else None
    local = rank if local is None else local
    count = size if count is None else count
    if not 0 <= rank < size or not 0 <= local < count <= size or local > rank:
        raise ValueError(
            f"the launcher's variables contradict each other: {names[0]}={rank}, {names[1]}={size}, "
            f"{names[2] or 'local rank'}={local}, {count} processes on this machine: leftovers of another launch? "
            "unset them, or start through one launcher only"
        )
    return rank, size, local, count


def _devices(first: int, count: int, environ: Mapping[str, str]) -> str | None:
    """CUDA_VISIBLE_DEVICES of the replica whose first process is the `first` of its machine; None: leave it."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is not None and not text.strip():
        return None  # hidden on purpose
    if text is None:
        return ",".join(str(index) for index in range(first, first + count))
    visible = [name.strip() for name in text.split(",") if name.strip()]
    if len(visible) == 1 and count == 1:
        return None  # chosen for this process already, or meant to be shared
    if first + count > len(visible):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES shows {len(visible)} devices, and this replica's would be {first} to "
            f"{first + count - 1}: start fewer processes on this machine"
        )
    return ",".join(visible[first : first + count])


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
