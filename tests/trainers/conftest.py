"""`kind`: each test runs with Lightning and, where it is installed, with Composer."""

from __future__ import annotations

import logging
import warnings
from importlib.util import find_spec

import lightning.pytorch  # noqa: F401  (sets its own log level when imported)
import pytest

from tests.trainers.harness import Kind, WithLightning

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

if find_spec("composer") is not None:
    with warnings.catch_warnings():  # of its own dependencies
        warnings.simplefilter("ignore")
        import composer  # noqa: F401
    logging.getLogger("composer").setLevel(logging.ERROR)


@pytest.fixture(params=["lightning", "composer"])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "lightning":
        return WithLightning()
    pytest.importorskip("composer")
    from tests.trainers.harness_composer import WithComposer

    return WithComposer()
