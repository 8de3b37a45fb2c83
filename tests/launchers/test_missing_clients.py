"""A client that isn't installed: the error names the extra, before anything else is asked."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_replication.diloco.serverless import AzureMLExecutor, ReplicaSpec, SageMakerExecutor
from composer_replication.errors import ExecutorError

AZURE = {"subscription_id": "s", "resource_group": "g", "workspace": "w", "compute": "c"}
AWS = {"role_arn": "arn:aws:iam::123456789012:role/replicas", "output_path": "s3://bucket/out"}


@pytest.mark.parametrize(
    ("kind", "settings", "missing"),
    [
        (SageMakerExecutor, AWS, "boto3"),
        (AzureMLExecutor, AZURE, "azure.identity"),
    ],
)
def test_it_names_the_extra(kind: Any, settings: dict[str, Any], missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    executor = kind(**settings, image="registry/image:1")
    spec = ReplicaSpec(0, 1, "memory://missing", command=("python", "-c", "pass"))
    words = rf"{missing} isn't installed .*pip install 'composer-replication\[{kind.extra}\]'"
    with pytest.raises(ExecutorError, match=words):
        executor.launch_replicas([spec])
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(rf'^{kind.extra} = \[.*"{missing.replace(".", "-")}>=', project, re.MULTILINE)
