"""The S3 policy against a server that enforces it: a round below the prefix works, and nothing beside it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from functools import partial

import boto3
import pytest
import torch

from composer_replication.collective.object_store import ObjectStoreCollective
from composer_replication.diloco.serverless.allreduce import ObjectStoreAllReduce
from composer_replication.errors import ObjectExists, ObjectMissing, StoreRefused
from composer_replication.store import RemoteStore, access
from tests.collective.conformance import SCALAR, begin
from tests.support import servers
from tests.support.threads import run_threads

pytestmark = [pytest.mark.servers]
BUCKET = "training"


@pytest.fixture(scope="module")
def limited() -> Iterator[tuple[str, dict[str, str]]]:
    """A server's endpoint, and the credentials of one who has the policy of runs/r1 and nothing else."""
    reason = servers.missing_for("moto")
    if reason is not None:
        pytest.skip(reason)
    with servers.moto(BUCKET) as endpoint:
        whole = {"aws_access_key_id": "admin", "aws_secret_access_key": "admin", "region_name": "us-east-1"}
        iam = boto3.client("iam", endpoint_url=endpoint, **whole)
        iam.create_user(UserName="replica")
        policy = json.dumps(access.s3_policy(BUCKET, "runs/r1/"))
        iam.put_user_policy(UserName="replica", PolicyName="run", PolicyDocument=policy)
        key = iam.create_access_key(UserName="replica")["AccessKey"]
        # From here on the server asks of every request whether it is allowed.
        request = urllib.request.Request(f"{endpoint}/moto-api/reset-auth", b"0", {"Content-Type": "text/plain"})
        urllib.request.urlopen(request, timeout=10).close()
        yield endpoint, {"key": key["AccessKeyId"], "secret": key["SecretAccessKey"]}


def store(limited, prefix: str) -> RemoteStore:
    endpoint, keys = limited
    return RemoteStore(
        f"s3://{BUCKET}/{prefix}?endpoint_url={endpoint}&region=us-east-1", options=keys, retry_seconds=5
    )


def client(limited):
    endpoint, keys = limited
    names = {"aws_access_key_id": keys["key"], "aws_secret_access_key": keys["secret"], "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=endpoint, **names)


def test_everything_that_a_round_does_below_the_prefix(limited):
    mine = store(limited, "runs/r1/parts")
    mine.put_if_absent("a", b"1")
    with pytest.raises(ObjectExists):
        mine.put_if_absent("a", b"2")
    mine.put("a", b"3")
    assert mine.get("a") == b"3" and mine.list("") == ["a"]
    with pytest.raises(ObjectMissing):
        mine.get("b")
    # Not many at once: for that this server asks for another right, which the service itself doesn't have.
    client(limited).delete_object(Bucket=BUCKET, Key="runs/r1/parts/a")
    assert mine.list("") == []


@pytest.mark.parametrize("prefix", ["runs/r10", "elsewhere"])
def test_nothing_beside_it(limited, prefix):
    other = store(limited, prefix)
    for attempt in (lambda: other.put("x", b"1"), lambda: other.put_if_absent("x", b"1"), lambda: other.get("x")):
        with pytest.raises(StoreRefused, match="refuses these credentials"):
            attempt()
    with pytest.raises(client(limited).exceptions.ClientError, match="AccessDenied"):
        client(limited).delete_object(Bucket=BUCKET, Key=f"{prefix}/x")


@pytest.mark.slow  # this server takes long to check a signature
def test_a_round_within_the_prefix(limited):
    endpoint, keys = limited

    def replica(index: int) -> torch.Tensor:
        tensor = torch.full((200_000,), float(index + 1))
        uri = f"s3://{BUCKET}/runs/r1/round?endpoint_url={endpoint}&region=us-east-1"
        with ObjectStoreAllReduce(index, 2, uri, fsspec_kwargs=keys, poll_s=0.5, timeout_s=120) as reduce:
            reduce.allreduce(tensor).wait()
        return tensor

    large = bytes(70 * 1024 * 1024)  # in parts
    store(limited, "runs/r1").put("large", large)
    assert store(limited, "runs/r1").get("large") == large
    for mean in run_threads([partial(replica, index) for index in range(2)], timeout_seconds=150):
        assert torch.equal(mean, torch.full((200_000,), 1.5))


def test_a_run_beside_it_is_refused_with_the_reason(limited):
    collective = ObjectStoreCollective(store(limited, "runs/r2"), replica=0, replicas=1)
    with pytest.raises(StoreRefused, match="below this prefix"):
        begin(collective, SCALAR)
