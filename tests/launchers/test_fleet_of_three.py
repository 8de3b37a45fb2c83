"""One fleet on three back ends, through S3, ends with the weights of the same fleet on one machine."""

from __future__ import annotations

import contextlib
from importlib import import_module
from pathlib import Path

import pytest

from composer_replication.diloco.serverless import LocalProcessExecutor, ReplicaSpec
from composer_replication.diloco.serverless.mixed import MixedExecutor
from composer_replication.recipe import load_recipe, to_yaml
from tests.launchers.engine import Engine

pytestmark = [pytest.mark.servers, pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
SHORTER = [
    "fleet.replicas=3",
    "training.steps=60",
    "scheduler.warmup_steps=6",
    "autoloco.warmup_steps=10",
    "data.args.max_bytes=200000",
    "data.args.validation_bytes=2000",
]
PLACES = ("hf_jobs", "modal", "volcano")


def test_three_back_ends_are_one_fleet(
    s3_uri: str, s3_credentials: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(to_yaml(load_recipe(RECIPE, SHORTER)))

    def specs(uri: str) -> list[ReplicaSpec]:
        return [ReplicaSpec(i, 3, uri, recipe=str(recipe)) for i in range(3)]

    for name, value in s3_credentials.items():
        monkeypatch.setenv(name, value)
    with contextlib.ExitStack() as stack:
        engines = [Engine() for _ in PLACES]
        for engine in engines:
            stack.callback(engine.close)
        places = [
            stack.enter_context(import_module(f"tests.launchers.{name}").backend(engine, monkeypatch))
            for name, engine in zip(PLACES, engines, strict=True)
        ]
        fleet = MixedExecutor([(place.make(secrets=sorted(s3_credentials)), 1) for place in places])
        fleet.poll_seconds = 0.2
        handles = fleet.launch_replicas(specs(s3_uri))
        assert [handle.backend for handle in handles] == list(PLACES)
        apart = fleet.collect(handles, timeout=400)
        assert all(place.unknown == [] for place in places)
        words = [line for engine in engines for one in engine.containers for line in one.lines]
    local = LocalProcessExecutor(output=tmp_path / "local")
    together = local.collect(local.launch_replicas(specs((tmp_path / "store").as_uri())), timeout=200)
    assert [r.status for r in (*apart, *together)] == ["completed"] * 6, "\n".join(words)
    assert all(r.metrics["rounds"] >= 3 for r in apart)
    assert len({r.metrics["digest"] for r in (*apart, *together)}) == 1
    assert not any(value in line for line in words for value in s3_credentials.values() if len(value) > 6)
