"""Least-privilege access: golden files, and an evaluator of its own for what a policy means."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from composer_replication.cli import main
from composer_replication.store import access

GOLDEN = Path(__file__).parent.parent / "golden" / "access"
CASES = {
    "s3.json": ["s3://training/runs/one"],
    "s3_key_china.json": [
        *("s3://training/runs/one?endpoint_url=https://example.com", "--partition", "aws-cn"),
        *("--kms-key", "arn:aws-cn:kms:cn-north-1:123456789012:key/12ab"),
    ],
    "s3_read_only.json": ["s3://training/runs/one", "--read-only"],
    "gs.json": ["gs://training/runs/one", "--member", "serviceAccount:a@b.iam.gserviceaccount.com", "--json"],
    "gs_read_only.json": ["gs://training/runs/one", "--member", "user:a@example.com", "--read-only", "--json"],
    "az.json": ["az://training/runs/one", "--account", "/subscriptions/1/x", "--principal", "42", "--json"],
    "az_read_only.json": ["abfs://training@acc.dfs.core.windows.net/one", "--read-only", "--json"],
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name, capsys):
    assert main(["policy", *CASES[name]]) == 0
    found = capsys.readouterr().out
    path = GOLDEN / name
    if os.environ.get("WRITE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found)
    assert json.loads(found) == json.loads(path.read_text())


@pytest.mark.parametrize("uri", ["gs://training/runs/one", "az://training/runs/one"])
def test_for_people_it_says_how_to_use_it(uri, capsys):
    assert main(["policy", uri]) == 0
    out = capsys.readouterr().out
    assert "# 1. " in out and "# 2. or" in out and "runs/one/" in out


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("s3://training", "give the run a prefix of its own"),
        ("s3://training/", "give the run a prefix of its own"),
        ("s3://training/runs/*", "letters, digits"),
        ("s3://training/runs/${aws:username}", "letters, digits"),
        ("gs://training/runs/o'ne", "letters, digits"),
        ("file:///shared/run1", "a folder has its file system's rights"),
        ("hf://datasets/me/runs/one", "access by prefix is for"),
    ],
)
def test_what_no_policy_can_say_is_refused(uri, words, capsys):
    assert main(["policy", uri]) == 2
    assert words in capsys.readouterr().err


def allows(policy, action: str, key: str = "", *, bucket: str = "training", listed: str | None = None) -> bool:
    """A small IAM: what an identity with this policy alone may do. A missing key in a condition doesn't match."""
    resource = f"arn:aws:s3:::{bucket}" + (f"/{key}" if key else "")
    for statement in policy["Statement"]:
        condition = statement.get("Condition", {})
        assert set(condition) <= {"StringLike"} and statement["Effect"] == "Allow"
        patterns = condition.get("StringLike", {}).get("s3:prefix")
        met = patterns is None or (listed is not None and any(fnmatchcase(listed, pattern) for pattern in patterns))
        if action in statement["Action"] and fnmatchcase(resource, statement["Resource"]) and met:
            return True
    return False


def test_what_the_s3_policy_means():
    policy = access.s3_policy("training", "runs/r1/")
    for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"):
        assert allows(policy, action, "runs/r1/fleet.json") and allows(
            policy, action, "runs/r1/rounds/00000000/0/in/0.1/0"
        )
        for other in ("runs/r10/fleet.json", "runs/r2/fleet.json", "runs/r1", "fleet.json"):
            assert not allows(policy, action, other)
        assert not allows(policy, action, "runs/r1/fleet.json", bucket="other")
    for listed in ("runs/r1/", "runs/r1/claims/0/", "runs/r1/missing.json"):
        assert allows(policy, "s3:ListBucket", listed=listed)
    for listed in (None, "", "runs/", "runs/r1", "runs/r10/"):
        assert not allows(policy, "s3:ListBucket", listed=listed)
    only_read = access.s3_policy("training", "runs/r1/", read_only=True)
    assert allows(only_read, "s3:GetObject", "runs/r1/fleet.json")
    assert not any(allows(only_read, f"s3:{name}", "runs/r1/x") for name in ("PutObject", "DeleteObject"))
    assert len(json.dumps(policy, separators=(",", ":"))) < 2048  # what a session's policy may have


def test_a_wrong_partition_is_refused():
    with pytest.raises(ValueError, match="partition must be one of aws, aws-cn, aws-us-gov"):
        access.s3_policy("training", "runs/r1/", partition="azure")
