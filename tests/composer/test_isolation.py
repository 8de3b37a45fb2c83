"""Every process of a launcher becomes a replica, whichever launcher it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from composer_replication.isolate import Identity, isolate_world, read_rank

ROOT = Path(__file__).parent.parent.parent


def composer(rank: int, *, nodes: int = 1, per_node: int = 4) -> dict[str, str]:
    """What Composer's launcher sets."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(nodes * per_node),
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "NODE_RANK": str(rank // per_node),
        "MASTER_ADDR": "first.host",
        "MASTER_PORT": "29500",
        "RUN_NAME": "job7",
    }


def test_each_rank_of_composer_s_launcher() -> None:
    environ = composer(6, nodes=2)
    assert isolate_world(environ=environ) == Identity(replica=6, replicas=8)
    assert environ == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29503",  # the third of its machine
        "CUDA_VISIBLE_DEVICES": "2",
        "RUN_NAME": "job7-replica6",
        "COMPOSER_REPLICATION_REPLICA": "6",
        "COMPOSER_REPLICATION_REPLICAS": "8",
        "COMPOSER_REPLICATION_RANK": "0",
        "COMPOSER_REPLICATION_RANKS": "1",
    }
    before = dict(environ)
    assert isolate_world(environ=environ) == Identity(replica=6, replicas=8)
    assert environ == before


def test_two_ranks_a_replica() -> None:
    environ = composer(7, nodes=2) | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    assert isolate_world(2, environ=environ) == Identity(replica=3, replicas=4)
    world = {name: environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")}
    assert list(world.values()) == ["1", "2", "1", "2", "29502"]
    assert environ["CUDA_VISIBLE_DEVICES"] == "6,7"
    ports = [isolate_and_read("MASTER_PORT", composer(rank), 2) for rank in range(4)]
    assert ports == ["29501", "29501", "29502", "29502"]
    # A launcher that took any free port has one of those that others are given, too: the replicas' are not.
    ports = [isolate_and_read("MASTER_PORT", composer(rank) | {"MASTER_PORT": "45000"}, 2) for rank in range(4)]
    assert ports == ["11001", "11001", "11002", "11002"]
    assert read_rank(environ) == (1, 2)
    assert isolate_world(2, environ=environ) == Identity(replica=3, replicas=4)  # again: nothing more happens
    with pytest.raises(ValueError, match="one of a replica of 2 already.*now of 1: say --ranks-per-replica.*once"):
        isolate_world(environ=environ)
    with pytest.raises(ValueError, match=r"4 processes \(4 on this machine\) can't be cut into replicas of 3"):
        isolate_world(3, environ=composer(0))


def isolate_and_read(name: str, environ: dict[str, str], ranks: int = 1) -> str | None:
    isolate_world(ranks, environ=environ)
    return environ.get(name)


def test_torchrun_srun_and_mpirun() -> None:
    torchrun = composer(3) | {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "ROLE_RANK": "3"}
    assert isolate_world(environ=torchrun) == Identity(replica=3, replicas=4)
    assert not any(name.startswith(("TORCHELASTIC", "ROLE", "GROUP")) for name in torchrun)
    srun = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "2"}
    assert isolate_world(environ=srun) == Identity(replica=5, replicas=8)
    assert (srun["RANK"], srun["CUDA_VISIBLE_DEVICES"]) == ("0", "1") and "SLURM_PROCID" not in srun
    # Composer's launcher inside one task of a SLURM job: the inner one has started this process.
    inner = composer(2) | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0"}
    assert isolate_world(environ=inner) == Identity(replica=2, replicas=4)
    mpirun = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    assert isolate_world(environ=mpirun) == Identity(replica=1, replicas=2)


def test_several_ranks_a_replica_under_srun() -> None:
    srun = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "40123"}
    assert isolate_world(2, environ=srun) == Identity(replica=2, replicas=4)
    # srun names no port: it comes from the job's number, and the place on the machine.
    assert {name: srun[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")} == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "20124",
    }
    cyclic = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    with pytest.raises(ValueError, match="process 1 is number 0 of its machine.*srun --distribution=block"):
        isolate_world(2, environ=cyclic)


def test_one_launch_for_a_replica_of_several_machines() -> None:
    ids = {"COMPOSER_REPLICATION_REPLICA": "1", "COMPOSER_REPLICATION_REPLICAS": "2"}
    environ = composer(5, nodes=2) | ids
    assert isolate_world(8, environ=environ) == Identity(replica=1, replicas=2)
    assert (environ["MASTER_ADDR"], environ["RANK"], environ["WORLD_SIZE"]) == ("first.host", "5", "8")
    assert read_rank(environ) == (5, 8)
    with pytest.raises(ValueError, match="can't be cut into replicas of 8 on one machine each.*launch each replica by"):
        isolate_world(8, environ=composer(5, nodes=4))


def test_one_launch_for_each_replica() -> None:
    ids = {"COMPOSER_REPLICATION_REPLICA": "2", "COMPOSER_REPLICATION_REPLICAS": "5"}
    environ = composer(0, per_node=1) | ids
    assert isolate_world(environ=environ) == Identity(replica=2, replicas=5)
    assert (environ["RUN_NAME"], environ["MASTER_PORT"]) == ("job7-replica2", "29500")
    assert "CUDA_VISIBLE_DEVICES" not in environ
    assert isolate_world(environ={}) == Identity(replica=0, replicas=1)
    assert isolate_world(environ=dict(ids)) == Identity(replica=2, replicas=5)
    with pytest.raises(ValueError, match="set both COMPOSER_REPLICATION_REPLICA and COMPOSER_REPLICATION_REPLICAS"):
        isolate_world(environ={"COMPOSER_REPLICATION_REPLICA": "2"})


def test_devices() -> None:
    assert isolate_and_read("CUDA_VISIBLE_DEVICES", composer(1) | {"CUDA_VISIBLE_DEVICES": ""}) == ""
    assert isolate_and_read("CUDA_VISIBLE_DEVICES", composer(1) | {"CUDA_VISIBLE_DEVICES": "3"}) == "3"
    with pytest.raises(ValueError, match="shows 2 devices, and this replica's would be 3 to 3"):
        isolate_world(environ=composer(3) | {"CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"COMPOSER_REPLICATION_REPLICA": "0"},
            "COMPOSER_REPLICATION_REPLICA=0 contradicts the launcher.*replica 1 of 4",
        ),
        ({"COMPOSER_REPLICATION_REPLICAS": "2"}, "COMPOSER_REPLICATION_REPLICAS=2 contradicts the launcher"),
        ({"RANK": "4"}, "contradict each other: RANK=4, WORLD_SIZE=4"),
        ({"LOCAL_RANK": "4"}, "contradict each other.*LOCAL_RANK=4"),
        ({"LOCAL_RANK": "3"}, "contradict each other.*LOCAL_RANK=3"),  # more than its rank
        ({"LOCAL_WORLD_SIZE": "8"}, "contradict each other.*8 processes on this machine"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE must be a whole number, got 'four'"),
        ({"WORLD_SIZE": ""}, "RANK and WORLD_SIZE must both be set"),
    ],
)
def test_variables_that_contradict_each_other_are_refused(change: dict[str, str], message: str) -> None:
    environ = composer(1) | change
    before = dict(environ)
    with pytest.raises(ValueError, match=message):
        isolate_world(environ=environ)
    assert environ == before


def test_the_script_runs_as_if_it_had_been_started_itself(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 5\n")
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "import beside\n"
        "if __name__ == '__main__':\n"
        "    print(beside.value, sys.argv[1:], os.environ['WORLD_SIZE'], os.environ['COMPOSER_REPLICATION_REPLICA'])\n"
        "    print(os.path.basename(__file__), [name for name in ('torch', 'composer') if name in sys.modules])\n"
    )

    def start(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "composer_replication.run", *arguments],
            env={"PYTHONPATH": str(ROOT), **composer(2), **environ},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )

    done = start(str(tmp_path / "script.py"), "foo.yaml", "--key=1")
    assert done.stdout.splitlines() == ["5 ['foo.yaml', '--key=1'] 1 2", "script.py []"], done.stderr
    for wrong, message in (
        (start(str(tmp_path / "none.py")), "there is no script"),
        (start(str(tmp_path / "script.py"), RANK="9"), "contradict each other: RANK=9, WORLD_SIZE=4"),
        (start("--ranks-per-replica", "3", str(tmp_path / "script.py")), "can't be cut into replicas of 3"),
    ):
        assert wrong.returncode == 2 and message in wrong.stderr and "Traceback" not in wrong.stderr
