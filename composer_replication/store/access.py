"""Least-privilege access for one run: what its replicas may do, below its prefix and nowhere else. Pure rendering.

Invariant: no rule that is written here reaches an object beside the prefix, not even of a run whose name begins alike;
and each right is one that the rounds use.

What the rounds do: read, write, overwrite (heartbeats) and delete objects, begin and give up uploads in parts, and list
below the prefix. A create needs no right beyond writing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from composer_replication.store.location import Location, parse_location

__all__ = [
    "PARTITIONS",
    "azure_assignment",
    "azure_condition",
    "azure_sas",
    "gcs_access",
    "run_place",
    "s3_policy",
]

_Json = dict[str, Any]
# What patterns and conditions would read as something else; a run is named without them.
_PREFIX = re.compile(r"[A-Za-z0-9!._=+-][A-Za-z0-9!._=+/-]*")
PARTITIONS = ("aws", "aws-cn", "aws-us-gov")
_AZURE = "Microsoft.Storage/storageAccounts/blobServices/containers"
_CONTRIBUTOR = "ba92f5b4-2d11-453d-a403-e96b0029c9fe"  # Storage Blob Data Contributor


def run_place(uri: str) -> tuple[Location, str, str]:
    """(location, bucket, prefix with a slash at its end). ValueError for what can't be limited to a prefix."""
    location = parse_location(uri)
    if location.kind not in ("s3", "gs", "az"):
        raise ValueError(
            f"{uri}: access by prefix is for s3://, gs:// and az://; a folder has its file system's rights"
        )
    bucket, _, prefix = location.root.partition("/")
    if not prefix:
        raise ValueError(f"{uri}: give the run a prefix of its own, like {uri.partition('?')[0].rstrip('/')}/runs/one")
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(
            f"{uri}: a prefix of letters, digits and . _ - = + ! / only; others mean something else in a policy"
        )
    return location, bucket, f"{prefix}/"


def s3_policy(
    bucket: str, prefix: str, *, partition: str = "aws", kms_key_arn: str | None = None, read_only: bool = False
) -> _Json:
    """An IAM policy: of an identity, a role, or a session. `prefix` ends in a slash.

    Listing is limited by the prefix asked for. Amazon takes the name of a key that is missing for that, too, so that a
    replica that looks for one is told 404 and not 403.
    """
    if partition not in PARTITIONS:
        raise ValueError(f"partition must be one of {', '.join(PARTITIONS)}, got {partition!r}")
    where = f"arn:{partition}:s3:::{bucket}"
    write = ["s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    statements: list[_Json] = [
        {
            "Sid": "ListRun",
            "Effect": "Allow",
            "Action": ["s3:ListBucket"],
            "Resource": where,
            "Condition": {"StringLike": {"s3:prefix": [f"{prefix}*"]}},
        },
        {
            "Sid": "RunObjects",
            "Effect": "Allow",
            "Action": ["s3:GetObject", *([] if read_only else write)],
            "Resource": f"{where}/{prefix}*",
        },
    ]
    if kms_key_arn is not None:
        statements.append(
            {
                "Sid": "RunKey",
                "Effect": "Allow",
                "Action": ["kms:Decrypt", *([] if read_only else ["kms:GenerateDataKey"])],
                "Resource": kms_key_arn,
            }
        )
    return {"Version": "2012-10-17", "Statement": statements}


def gcs_access(bucket: str, prefix: str, members: Sequence[str], *, read_only: bool = False) -> _Json:
    """Three ways to the same: a managed folder with a binding (the plain one, and the one that may list), a bucket's
    binding with a condition (it can't allow a listing), and the boundary of a downscoped token. `prefix` ends in a
    slash."""
    role = "roles/storage.objectViewer" if read_only else "roles/storage.objectUser"
    title = f"run {prefix.rstrip('/')}"
    objects = f"resource.name.startsWith('projects/_/buckets/{bucket}/objects/{prefix}')"
    binding: _Json = {"role": role, "members": list(members)}
    rule = {
        "availablePermissions": [f"inRole:{role}"],
        "availableResource": f"//storage.googleapis.com/projects/_/buckets/{bucket}",
        "availabilityCondition": {
            "title": title,
            "expression": f"{objects} || api.getAttribute('storage.googleapis.com/objectListPrefix', '')"
            f".startsWith('{prefix}')",
        },
    }
    return {
        "managed_folder": {"name": prefix, "policy": {"bindings": [binding]}},
        "bucket_binding": {
            **binding,
            "condition": {
                "title": title,
                "expression": f"resource.type == 'storage.googleapis.com/Object' && {objects}",
            },
        },
        "access_boundary": {"accessBoundary": {"accessBoundaryRules": [rule]}},
    }


def azure_condition(prefix: str, *, read_only: bool = False) -> str:
    """A condition (version 2.0) for a role assignment on the container: blobs below `prefix` only, listings too."""
    blobs = f"{_AZURE}/blobs"
    actions = [f"!(ActionMatches{{'{blobs}/read'}} AND NOT SubOperationMatches{{'Blob.List'}})"]
    if not read_only:
        actions += [f"!(ActionMatches{{'{blobs}/{name}'}})" for name in ("write", "add/action", "delete")]
    path, listed = f"{blobs}:path", f"{blobs}:prefix"
    return (
        f"(({' AND '.join(actions)}) OR (@Resource[{path}] StringStartsWith '{prefix}')) AND "
        f"(!(ActionMatches{{'{blobs}/read'}} AND SubOperationMatches{{'Blob.List'}}) OR "
        f"(@Request[{listed}] StringStartsWith '{prefix}'))"
    )


def azure_assignment(account: str, container: str, prefix: str, principal: str, *, read_only: bool = False) -> _Json:
    """A role assignment on the container with that condition; `account` is the storage account's resource id."""
    return {
        "roleDefinitionId": f"/providers/Microsoft.Authorization/roleDefinitions/"
        f"{'2a2b9908-6ea1-4ae2-8e65-a410df84e7d1' if read_only else _CONTRIBUTOR}",
        "scope": f"{account}/blobServices/default/containers/{container}",
        "principalId": principal,
        "condition": azure_condition(prefix, read_only=read_only),
        "conditionVersion": "2.0",
    }


def azure_sas(container: str, prefix: str, *, read_only: bool = False) -> _Json:
    """What to ask a user-delegation SAS for (at most seven days). Only accounts with a hierarchical namespace can limit
    one to a folder; with others it reaches the whole container, so that each run needs one of its own."""
    folder = prefix.rstrip("/")
    rights = "rl" if read_only else "rcwdl"
    return {
        "hierarchical_namespace": {
            "container": container,
            "directory": folder,
            "sr": "d",
            "sdd": folder.count("/") + 1,
            "sp": rights,
        },
        "flat_namespace": {"container": container, "sr": "c", "sp": rights, "reaches": "the whole container"},
    }
