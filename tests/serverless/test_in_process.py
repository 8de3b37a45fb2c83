"""run_replica: one replica from its spec, in this process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from composer_replication.diloco.serverless import ReplicaSpec, run_replica
from composer_replication.errors import RecipeError
from composer_replication.isolate import REPLICA, REPLICAS

pytest.importorskip("lightning")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the trainer's advice on workers

SMALL = (
    *("model.args.width=16", "model.args.layers=1", "data.args.max_bytes=50000", "data.args.validation_bytes=5000"),
    *("data.args.batch_size=4", "training.accelerator=cpu"),
)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # Lightning leaves them behind
        monkeypatch.setenv(name, "1")
    for name in (REPLICA, REPLICAS, "DATA_URI"):
        monkeypatch.delenv(name, raising=False)


def spec(folder: Path, **more: Any) -> ReplicaSpec:
    given: dict[str, Any] = {"replica_id": 0, "num_replicas": 1, "rendezvous_uri": (folder / "store").as_uri()}
    given |= {"sync_every": 3, "outer_rounds": 2, "overrides": SMALL, "inner_optimizer": {"name": "AdamW", "lr": 1e-2}}
    return ReplicaSpec(**{**given, **more})


def test_it_trains_with_nothing_but_the_spec(tmp_path: Path) -> None:
    before = dict(os.environ)
    result = run_replica(spec(tmp_path, extra_env={"COLOUR": "red"}), output=tmp_path / "out")
    assert (result.replica_id, result.status) == (0, "completed")
    assert (result.metrics["steps"], result.metrics["rounds"]) == (6, 2)
    assert result.final_checkpoint_uri == (tmp_path / "out" / "final.ckpt").as_uri()
    assert json.loads((tmp_path / "out" / "result.json").read_text())["digest"] == result.metrics["digest"]
    assert dict(os.environ) == before  # neither its variables nor its identity are left behind
    again = run_replica(spec(tmp_path), output=tmp_path / "out")  # goes on from its checkpoint, which is the end
    assert again.metrics["digest"] == result.metrics["digest"]


def test_settings_may_be_keywords(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPLICAS, "1")
    config = {"model": "byte_gpt", "outer_rounds": 1, "sync_every": 2, "overrides": SMALL}
    result = run_replica(replica_id=0, rendezvous_uri=(tmp_path / "store").as_uri(), output=tmp_path / "out", **config)
    assert result.metrics["steps"] == 2
    monkeypatch.delenv(REPLICAS)
    with pytest.raises(ValueError, match="run_replica needs a ReplicaSpec, or num_replicas, rendezvous_uri"):
        run_replica(replica_id=0)


def test_what_does_not_fit_is_raised(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="owner/model needs text to train on: set DATA_URI"):
        run_replica(spec(tmp_path, model_id="owner/model"))
    with pytest.raises(RecipeError, match="there is no built-in model 'bite_gpt'.*byte_gpt"):
        run_replica(spec(tmp_path, model_id="bite_gpt"), output=tmp_path / "out")
    with pytest.raises(ValueError, match="has a command of its own"):
        run_replica(spec(tmp_path, command=("python", "train.py")))
    assert os.environ.get(REPLICA) is None
