"""What the package for launching replicas offers, and that a fleet of local processes is one of them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from composer_replication.diloco import serverless
from composer_replication.diloco.serverless import BaseExecutor, LocalProcessExecutor, ReplicaSpec, ServerlessExecutor

DOCUMENTED = {
    *("ServerlessExecutor", "LocalProcessExecutor", "ModalExecutor", "HFJobsExecutor", "ObjectStoreAllReduce"),
    *("MockManager", "ReplicaHandle", "ReplicaSpec", "ReplicaResult", "BaseExecutor", "RendezvousAccessPolicy"),
    *("K8sExecutor", "run_replica"),
}
OTHER_NAMES = {"K8sExecutor": "VolcanoExecutor", "MockManager": "ObjectStoreManager"}
SCHEMES = {"file", "s3", "gs", "az", "hf"}


def test_public_reexports_include_all_executors() -> None:
    assert set(serverless.__all__) >= DOCUMENTED
    assert serverless.__all__ == sorted(serverless.__all__) and set(serverless.__all__) == set(serverless._HOME)
    for name in serverless.__all__:
        there = getattr(serverless, name)  # without any vendor's client, too
        assert there.__name__ == OTHER_NAMES.get(name, name)
    folder = Path(serverless.__file__).parent / "backends"
    modules = [import_module(f"{serverless.__name__}.backends.{path.stem}") for path in folder.glob("[a-z]*.py")]
    adapters = {name for module in modules for name in getattr(module, "__all__", ()) if name.endswith("Executor")}
    offered = {getattr(module, name) for module in modules for name in adapters if hasattr(module, name)}
    for kind in (*offered, LocalProcessExecutor):
        if not inspect.isabstract(kind):
            assert kind.__name__ in serverless.__all__, f"{kind.__name__} isn't exported"
            assert issubclass(kind, BaseExecutor) and kind.default_scheme in SCHEMES, kind


def test_looking_at_an_executor_loads_no_trainer_and_no_client() -> None:
    names = sorted(name for name in serverless.__all__ if name.endswith("Executor"))
    code = (
        "import sys; from composer_replication.diloco import serverless\n"
        f"for name in {names}: getattr(serverless, name)\n"
        "heavy = {'torch', 'lightning', 'composer', 'modal', 'boto3', 'kubernetes', 'huggingface_hub', 'runpod',"
        " 'google.cloud.aiplatform', 'azure.ai.ml', 'transformers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.processes
def test_two_local_replicas_meet_in_a_folder(tmp_path: Path) -> None:
    script = (
        "import os, sys, torch\n"
        "from composer_replication.diloco.serverless import ObjectStoreAllReduce\n"
        "replica = int(os.environ['WHO'])\n"
        f"reduce = ObjectStoreAllReduce(replica, 2, {(tmp_path / 'store').as_uri()!r}, timeout_s=60)\n"
        "tensor = torch.full((3,), float(replica))\n"
        "reduce.allreduce(tensor).wait()\n"
        "print('mean', tensor.tolist())\n"
    )
    specs = [
        ReplicaSpec(
            i, 2, (tmp_path / "store").as_uri(), command=(sys.executable, "-c", script), extra_env={"WHO": str(i)}
        )
        for i in range(2)
    ]

    class Scripts(LocalProcessExecutor):
        def command(self, spec: ReplicaSpec, folder: Path) -> list[str]:
            return list(spec.command)

    executor = Scripts(output=tmp_path / "out", env={"OMP_NUM_THREADS": "1"})
    assert isinstance(executor, ServerlessExecutor)
    handles = executor.launch_replicas(specs)
    results = executor.collect(handles, timeout=100)
    logs = [list(executor.stream_logs(handle)) for handle in handles]
    assert [result.status for result in results] == ["completed"] * 2, logs
    assert all("mean [0.5, 0.5, 0.5]" in log for log in logs)
