"""The paper's recipes, from the shipped files, with everything made small: whole fleets under both trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from composer_replication.diloco.serverless import LocalProcessExecutor, ReplicaSpec
from composer_replication.recipe import load_recipe, to_yaml
from composer_replication.simulation import simulate, simulate_data_parallel
from tests.support.language_model import save_language_model
from tests.support.rows import conversation, write_rows

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(600)]
pytest.importorskip("fsspec")
RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = (
    *("training.steps=24", "training.accelerator=cpu", "training.precision=32-true", "training.threads=1"),
    *("training.log_every=4", "training.gradient_clip=null", "optimizer.lr=1e-2", "scheduler.warmup_steps=4"),
)
HORIZONS = ("autoloco.base_horizon=4", "autoloco.min_horizon=2", "autoloco.max_horizon=6", "autoloco.horizon_step=1")
SIZES = ("model.args.width=16", "model.args.layers=1", "model.args.heads=2", "model.args.hidden=32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_language_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    texts = [f"The {i}th line says {i} and {i + 1}." + "!" * (i % 5) for i in range(400)]
    for name, some in (("train", texts[:360]), ("held", texts[360:])):
        write_rows(folder / f"documents-{name}.parquet", [{"text": text} for text in some])
        chats = [conversation(text[4:8], "ok " + text[-9 : -1 - i % 4]) for i, text in enumerate(some)]
        write_rows(folder / f"chats-{name}.jsonl", [*chats, conversation("unanswered")])
    return folder


def of(name: str, model: str, rows: Path, *more: str) -> Any:
    kind = "chats" if "chat" in name else "documents"
    suffix = "jsonl" if kind == "chats" else "parquet"
    data = [f"data.args.{key}=null" for key in ("dataset", "config") if not (kind == "chats" and key == "config")]
    data += [f"data.args.uri={rows}/{kind}-train.{suffix}", f"data.args.validation_uri={rows}/{kind}-held.{suffix}"]
    data += [f"data.args.tokenizer={model}", "data.args.pad_token=<|end|>", "data.args.context=32"]
    data += ["data.args.batch_size=2"]
    if kind == "chats":
        own = [f"model.args.path={model}", "data.args.validation_conversations=20"]
    else:
        own = [*SIZES, "model.args.vocabulary=257", "model.args.context=32", "training.accumulate=2"]
        own += ["data.args.validation_documents=20", "data.args.workers=0"]
    return load_recipe(RECIPES / f"{name}.yaml", [*SMALL, *data, *own, *more])


def run(recipe: Any, folder: Path) -> dict[str, float]:
    folder.mkdir()
    path = folder / "recipe.yaml"
    path.write_text(to_yaml(recipe))
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    executor = LocalProcessExecutor(output=folder / "run", env=env)
    count = recipe.fleet.replicas
    store = (folder / "store").as_uri()
    handles = executor.launch_replicas([ReplicaSpec(i, count, store, recipe=str(path)) for i in range(count)])
    results = executor.collect(handles, timeout=500)
    logs = ["\n".join(executor.stream_logs(handle)) for handle in handles]
    assert [result.status for result in results] == ["completed"] * count, logs
    assert len({result.metrics["digest"] for result in results}) == 1
    assert not any("may train on the same samples" in log or "began with the same batch" in log for log in logs), logs
    return results[0].metrics


@pytest.mark.parametrize("name", ["c4-215m/autoloco", "ultrachat-8b/autoloco-16-int8"])
def test_both_trainers_end_with_the_same_weights(name: str, model: str, rows: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("composer")
    small = of(name, model, rows, *HORIZONS, "fleet.replicas=2")
    first = run(small, tmp_path / "lightning")
    second = run(load_recipe(tmp_path / "lightning" / "recipe.yaml", ["trainer=composer"]), tmp_path / "composer")
    assert first["digest"] == second["digest"]
    assert first["steps"] == 24 and first["rounds"] == second["rounds"] < 7
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-5)
    assert first["validation_loss"] == pytest.approx(second["validation_loss"], rel=1e-6)
    assert first["validation_loss"] < 4.5  # at first each of 257 tokens is as likely, which is 5.55 nats
    if small.data.name == "conversations":
        simulated = simulate(small)
        assert simulated.digest == first["digest"]
        assert simulated.validation_loss == pytest.approx(first["validation_loss"], rel=1e-6)


@pytest.mark.parametrize("name", ["c4-215m/qsr", "c4-215m/linear", "ablation/normalised", "c4-215m/diloco"])
def test_the_baselines_train(name: str, model: str, rows: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    more = ("autoloco.increment=2",) if "linear" in name else HORIZONS
    metrics = run(of(name, model, rows, *more, "fleet.replicas=2"), tmp_path / "run")
    assert metrics["steps"] == 24 and metrics["validation_loss"] < 4.5


@pytest.mark.parametrize("name", ["c4-215m/ddp", "ultrachat-8b/ddp"])
def test_ddp_is_one_replica_of_several_devices(name: str, model: str, rows: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    recipe = of(name, model, rows, "training.devices=2", "autoloco.base_horizon=12")
    metrics = run(recipe, tmp_path / "run")
    assert metrics["steps"] == 24 and metrics["rounds"] == 2 and metrics["validation_loss"] < 4.5
    if recipe.data.name == "conversations":
        alone = simulate_data_parallel(recipe, replicas=2)
        # Gradients are averaged in another order.
        assert metrics["validation_loss"] == pytest.approx(alone.validation_loss, rel=1e-4)
