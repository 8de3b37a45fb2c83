"""llm-foundry finds the algorithm by its name, and builds it from the YAML that docs/composer.md shows.

llm-foundry itself holds too many other packages in place to be installed here. What it does is small, and done here
with the library that it uses: its registry of algorithms is a `catalogue` with entry points and the namespace
("llmfoundry", "algorithms"); it takes the class of that name, which must be an
Algorithm, and calls it with the mapping.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("composer")
pytest.importorskip("catalogue")

import yaml
from composer.core import Algorithm, Callback

from composer_replication.composer import AutoLoCo
from composer_replication.isolate import Identity

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def catalogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The library as a new process would import it: it looks at what is installed once."""
    if not any(one.name == "autoloco" for one in metadata.entry_points(group="llmfoundry_algorithms")):
        # The package is only importable, not installed: this is what an installation would add.
        declared = re.search(
            r"(?ms)^\[project\.entry-points\.llmfoundry_algorithms\]\n(.*?)(?=^\[|\Z)",
            (ROOT / "pyproject.toml").read_text(),
        )
        assert declared is not None
        info = tmp_path / "composer_replication_here-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: composer-replication-here\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[llmfoundry_algorithms]\n" + declared[1].replace('"', ""))
        monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "catalogue")
    import catalogue

    return catalogue


def construct(registry: Any, name: str, kind: type, settings: dict[str, Any]) -> Any:
    found = registry.get(name)
    if not issubclass(found, kind):
        raise ValueError(f"expected {name} to be a {kind.__name__}, but got {found}")
    return found(**settings)


def documented() -> dict[str, Any]:
    """The YAML under "llm-foundry" in docs/composer.md."""
    text = (ROOT / "docs" / "composer.md").read_text()
    block = re.search(r"## llm-foundry\n.*?```yaml\n(.*?)```", text, re.DOTALL)
    assert block is not None
    return yaml.safe_load(block[1])


def test_the_documented_yaml_builds_it(catalogue: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOSER_REPLICATION_REPLICA", "1")
    monkeypatch.setenv("COMPOSER_REPLICATION_REPLICAS", "4")
    algorithms = catalogue.create("llmfoundry", "algorithms", entry_points=True)
    made = construct(algorithms, "autoloco", Algorithm, documented()["algorithms"]["autoloco"])
    assert type(made) is AutoLoCo and made.identity == Identity(replica=1, replicas=4)
    assert made.policy.settings()["base_horizon"] == 500 and made.policy.settings()["warmup_steps"] == 2000
    more = {"store": "s3://bucket/run1", "base_horizon": 500, "min_replicas": None, "growth_cap": 1.3, "timeout": 900}
    assert construct(algorithms, "autoloco", Algorithm, more).policy.settings()["growth_cap"] == 1.3


def test_it_stands_under_algorithms_only(catalogue: ModuleType) -> None:
    callbacks = catalogue.create("llmfoundry", "callbacks", entry_points=True)
    with pytest.raises(catalogue.RegistryError, match="autoloco"):
        callbacks.get("autoloco")
    callbacks.register("autoloco", func=AutoLoCo)  # by hand, with code_paths
    with pytest.raises(ValueError, match="expected autoloco to be a Callback"):
        construct(callbacks, "autoloco", Callback, documented()["algorithms"]["autoloco"])
