"""The back ends under contract: each with its real client, against a stand-in for its service."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest

from tests.launchers.backend import Backend
from tests.launchers.engine import Engine

BACKENDS = ("local", "hf_jobs", "sagemaker", "modal", "runpod", "volcano", "kuberay", "vertex", "azure_ml")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    engine = Engine()
    module = import_module(f"tests.launchers.{request.param}")
    try:
        with module.backend(engine, monkeypatch) as made:
            name = request.function.__name__
            if name in made.lacks:
                pytest.skip(made.lacks[name])
            yield made
            assert made.unknown == []
    finally:
        engine.close()
