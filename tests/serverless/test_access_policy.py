"""The policy of a run's rendezvous: the store's own rendering, for each cloud's tool."""

from __future__ import annotations

import json

import pytest

from composer_replication.diloco.serverless import RendezvousAccessPolicy
from composer_replication.store import access

S3, GS, AZ = "s3://bucket/runs/one", "gs://bucket/runs/one", "az://box/runs/one"


def test_boto3_s_is_an_iam_policy_below_the_run_s_prefix() -> None:
    policy = RendezvousAccessPolicy(S3)
    assert policy.cloud == "s3"
    assert policy.to_boto3() == access.s3_policy("bucket", "runs/one/")
    (listing, objects) = policy.to_boto3()["Statement"]
    assert objects["Resource"] == "arn:aws:s3:::bucket/runs/one/*"
    assert listing["Condition"] == {"StringLike": {"s3:prefix": ["runs/one/*"]}}
    assert json.loads(policy.to_json(partition="aws-cn"))["Statement"][1]["Resource"].startswith("arn:aws-cn:")
    (_, looking) = RendezvousAccessPolicy(S3, read_only=True).to_boto3()["Statement"]
    assert looking["Action"] == ["s3:GetObject"]


def test_gcloud_s_is_the_binding_of_a_managed_folder() -> None:
    member = "serviceAccount:trainer@project.iam.gserviceaccount.com"
    policy = RendezvousAccessPolicy(GS).to_gcloud([member])
    assert policy == {"bindings": [{"role": "roles/storage.objectUser", "members": [member]}]}
    assert json.loads(RendezvousAccessPolicy(GS).to_json(members=[member])) == policy


def test_az_s_is_a_role_assignment_with_a_condition() -> None:
    assignment = RendezvousAccessPolicy(AZ).to_az("/subscriptions/1/account", "who")
    assert assignment == access.azure_assignment("/subscriptions/1/account", "box", "runs/one/", "who")
    assert "StringStartsWith 'runs/one/'" in assignment["condition"]
    assert json.loads(RendezvousAccessPolicy(AZ).to_json(account="/subscriptions/1/account", principal="who"))


@pytest.mark.parametrize("uri", ["s3://bucket", "file:///shared/run1", "hf://datasets/me/runs", "s3://bucket/a*"])
def test_what_cannot_be_limited_to_a_prefix_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        RendezvousAccessPolicy(uri)


def test_another_cloud_s_tool_is_refused() -> None:
    with pytest.raises(ValueError, match="is on s3://, and this is for gs://"):
        RendezvousAccessPolicy(S3).to_gcloud(["user:a@b"])
    with pytest.raises(ValueError, match="is on gs://, and this is for az://"):
        RendezvousAccessPolicy(GS).to_az("account", "who")
    with pytest.raises(ValueError, match="is on az://, and this is for s3://"):
        RendezvousAccessPolicy(AZ).to_boto3()
