"""`policy`: least-privilege access for one run, for people and for the clouds' own tools.

Invariant: prints only; no cloud is asked for anything.
"""

from __future__ import annotations

import json

from composer_replication.store import access

__all__ = ["policy"]

_MEMBER = "serviceAccount:NAME@PROJECT.iam.gserviceaccount.com"
_OPTIONS = {"s3": ("--partition", "--kms-key"), "gs": ("--member",), "az": ("--account", "--principal")}
_ACCOUNT = "/subscriptions/ID/resourceGroups/GROUP/providers/Microsoft.Storage/storageAccounts/ACCOUNT"


def policy(
    uri: str,
    *,
    partition: str,
    kms_key: str | None,
    members: list[str],
    account: str | None,
    principal: str | None,
    read_only: bool,
    as_json: bool,
) -> int:
    location, bucket, prefix = access.run_place(uri)
    given = {"--partition": partition != "aws", "--kms-key": kms_key, "--member": members}
    given |= {"--account": account, "--principal": principal}
    if foreign := [name for name, value in given.items() if value and name not in _OPTIONS[location.kind]]:
        raise ValueError(
            f"{', '.join(foreign)} has no meaning for {location.kind}://, which takes "
            f"{' and '.join(_OPTIONS[location.kind])}"
        )
    if location.kind == "s3":
        print(_lines(access.s3_policy(bucket, prefix, partition=partition, kms_key_arn=kms_key, read_only=read_only)))
        return 0
    if location.kind == "gs":
        found = access.gcs_access(bucket, prefix, members or [_MEMBER], read_only=read_only)
        if as_json:
            print(json.dumps(found, indent=1))
            return 0
        print("# 1. a managed folder (the bucket needs uniform bucket-level access), with this as policy.json:")
        print(_lines(found["managed_folder"]["policy"]))
        print(f"gcloud storage managed-folders create gs://{bucket}/{prefix}")
        print(f"gcloud storage managed-folders set-iam-policy gs://{bucket}/{prefix} policy.json")
        print(
            "\n# 2. or a binding of the bucket's policy (version 3). It can't allow listing, which starting needs: add"
        )
        print("# a second binding, without a condition, of a custom role that holds storage.objects.list and nothing")
        print("# else (it shows the names of all objects of the bucket)")
        print(_lines(found["bucket_binding"]))
        print("\n# 3. or the boundary of a downscoped token, which lives for an hour")
        print(_lines(found["access_boundary"]))
        return 0
    assignment = access.azure_assignment(
        account or _ACCOUNT, bucket, prefix, principal or "PRINCIPAL", read_only=read_only
    )
    sas = access.azure_sas(bucket, prefix, read_only=read_only)
    if as_json:
        print(json.dumps({"role_assignment": assignment, "sas": sas}, indent=1))
        return 0
    print("# 1. a role assignment on the container, limited by a condition")
    print(_lines(assignment))
    print("\n# 2. or a user-delegation SAS, for seven days at most")
    print(_lines(sas))
    return 0


def _lines(value: object) -> str:
    return json.dumps(value, indent=1)
